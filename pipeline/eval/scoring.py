"""Probabilities of given tokens, and the most probable next ones, from a model on any layout.

Every rank is given all requests and gets all results. The work is dealt over the data-parallel ranks in batches of one
shape a round, which all ranks can tell from the requests alone: none ever waits for one that has nothing to do.

Padding is on the right, where causal attention does not see it. A request is one text: attention is not cut at the
end-of-document tokens in it, as no other program does either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from pipeline.common.errors import MachineError, UserError
from pipeline.data.loading.batch import Batch
from pipeline.eval.encoders import document
from pipeline.eval.engine import GenerationEngine
from pipeline.eval.inference import start_token
from pipeline.train.loop.step import make_context
from pipeline.train.model.loss import VocabShard, token_loss
from pipeline.train.model.mixers.sequence import SequenceCut
from pipeline.train.parallel.context import sequence_shard

T = TypeVar("T")
_AT_ONCE = 4096
"""Tokens whose logits are in memory in fp32 at the same time."""
_SHORTEST = 16
"""Positions of a batch at least."""
_ANY = 2**40
"""No limit."""
_NONE = 2**40
"""Stands for a token where there is none, because no logit is the largest: they are not finite."""


@dataclass(frozen=True)
class Request:
    """Tokens, of which the last ones are predicted."""

    tokens: Sequence[int]
    """2 <= length <= max_length + 1: the last one is not an input."""
    scored: int
    """Number of tokens at the end that are predicted, each from all before it; 1 <= scored < length."""
    is_truncated: bool = field(default=False, compare=False)
    """The context was longer; only its end is here."""


@dataclass(frozen=True)
class Scored:
    """Probability of the predicted tokens of a request."""

    nats: float
    """Sum of -log p over them, fp64."""
    greedy: bool
    """Each had the largest logit; of equal ones that of the smallest id."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue."""

    tokens: Sequence[int]
    """At least one; with the new tokens at most max_length + 1."""
    most: int
    """New tokens at most."""


def rolling(tokens: Sequence[int], prefix: int, max_length: int, stride: int | None = None) -> list[Request]:
    """The requests that predict each token of a text exactly once.

    The first window predicts its first `max_length` tokens, the first of them from `prefix` alone. Each further one
    predicts the next `stride` tokens, and its input is the `max_length` tokens before the last of them; so a token
    after the first window is predicted from at least `max_length - stride + 1` tokens. With a stride of `max_length`
    the windows are disjoint but for the last one, which reaches back for as much context as it can have: that is what
    lm-evaluation-harness does.

    Args:
        tokens: of the text, may be none.
        prefix: stands before the first.
        max_length: of the input.
        stride: at most `max_length`, and by default that.
    """
    stride = stride or max_length
    assert 1 <= stride <= max_length
    everything = [prefix, *tokens]
    done = min(max_length, len(tokens))
    requests = [Request(everything[: done + 1], done)] if tokens else []
    while done < len(tokens):
        scored = min(stride, len(tokens) - done)
        done += scored
        requests.append(Request(everything[done - max_length : done + 1], scored))
    return requests


def truncated(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Request:
    """The request that predicts `continuation`, from as much of the end of `context` as fits.

    Raises:
        UserError: the continuation alone is too long.
    """
    if len(continuation) > max_length:
        raise UserError(
            f"a request has {len(continuation)} tokens to predict, but the model takes {max_length} tokens at once "
            "(eval.max_length, by default train.sequence_length); raise that, or leave the task out"
        )
    kept = max_length + 1
    whole = [*context, *continuation]
    return Request(whole[-kept:], len(continuation), is_truncated=len(whole) > kept)


@torch.no_grad()
def score(
    engine: GenerationEngine,
    requests: Sequence[Request],
    *,
    batch_size: int,
    advance: Callable[[int], None] = lambda requests: None,
) -> list[Scored]:
    """Scores of the predicted tokens of each request. Every rank calls this, with the same requests.

    Args:
        engine: the model.
        requests: all of them.
        batch_size: requests of one forward pass on one rank.
        advance: told how many requests are done after each round.

    Raises:
        MachineError: the ranks were given different requests.
    """
    for request in requests:
        assert 1 <= request.scored < len(request.tokens) <= engine.max_length + 1
    _agree(engine, [[request.scored, *request.tokens] for request in requests])
    # Those with the same input, like answers of one token to the same question, share a row.
    together: dict[bytes, list[int]] = {}
    for number, request in enumerate(requests):
        # With an encoder a token is in the context or predicted, and so of one side or the other.
        apart = [request.scored] if engine.setup.spec.sided else []
        together.setdefault(np.array([*apart, *request.tokens[:-1]]).tobytes(), []).append(number)
    rows = [_row(engine, requests, numbers) for numbers in together.values()]
    rows.sort(key=lambda row: -len(row.tokens))
    # One more for what fills up batches.
    nats = torch.zeros(len(requests) + 1, dtype=torch.float64, device=engine.setup.device)
    misses = torch.zeros_like(nats)
    counts = engine.setup.mesh.counts_losses

    def measure(logits: Tensor, batch: Batch) -> None:
        for asked in torch.split(batch.extras["asked"], _AT_ONCE):
            row, column, target, request = asked.unbind(1)
            picked = logits[row, column]
            loss, _ = token_loss(picked[None], target[None], shard=engine.model.vocab_shard)
            missed = _largest(picked, engine.model.vocab_shard) != target
            if counts:
                nats.index_add_(0, request, loss[0].double())
                misses.index_add_(0, request, missed.double())

    with _evaluation_mode(engine):
        for chosen in _rounds(engine, rows, batch_size):
            _evaluate(engine, chosen, len(requests), measure)
            advance(len({request for row in chosen for _, _, request in row.asked}))
    sums = torch.stack((nats, misses))
    dist.all_reduce(sums)
    return [Scored(sum_, miss == 0) for sum_, miss in zip(*sums[:, :-1].tolist(), strict=True)]


@torch.no_grad()
def continue_greedily(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    ended: Callable[[int, list[int]], bool] = lambda number, tokens: False,
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[list[int]]:
    """The most probable continuation of each prompt, token by token. Every rank calls this, with the same prompts.

    A continuation ends before the end of the document, after `most` tokens, or when `ended` says so. There is no cache:
    each token takes a forward pass of the text so far, which any layout can do. A batch takes up the next prompt as
    soon as one of its own has ended.

    Args:
        engine: the model.
        prompts: all of them.
        batch_size: prompts of one forward pass on one rank.
        ended: told the number of a prompt and its new tokens after each one; it must say the same on all ranks.
        advance: told after each token how many prompts have ended with it.

    Returns:
        The new tokens of each prompt.

    Raises:
        MachineError: the ranks were given different prompts.
        UserError: the logits are not finite.
    """
    for prompt in prompts:
        assert prompt.tokens and prompt.most >= 1 and len(prompt.tokens) + prompt.most <= engine.max_length + 1
    _agree(engine, [[prompt.most, *prompt.tokens] for prompt in prompts])
    new: list[list[int]] = [[] for _ in prompts]
    # Long ones first: what is in a batch together is of about the same length then.
    waiting = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].tokens))
    counts = engine.setup.mesh.counts_losses
    with _evaluation_mode(engine):
        while waiting:
            active = next(_rounds(engine, waiting, batch_size))
            # What a number of this round stands for; one more for what fills up batches.
            chosen = torch.zeros(len(active) + 1, dtype=torch.int64, device=engine.setup.device)

            def measure(logits: Tensor, batch: Batch, chosen: Tensor = chosen) -> None:
                row, column, _, place = batch.extras["asked"].unbind(1)
                token = _largest(logits[row, column], engine.model.vocab_shard)
                if counts:
                    chosen[place] = token

            # There is no target to compare with.
            rows = [_row_of(engine, prompts[number].tokens, new[number]) for number in active]
            for place, row in enumerate(rows):
                row.asked.append((len(row.tokens) - 1, 0, place))
            _evaluate(engine, rows, len(active), measure)
            dist.all_reduce(chosen)
            done = set()
            for number, token in zip(active, chosen.tolist(), strict=False):
                if token >= _NONE:
                    raise UserError("the model's logits are not finite: its training diverged; try an earlier --step")
                if token != engine.tokenizer.end_of_document:
                    new[number].append(token)
                    if len(new[number]) < prompts[number].most and not ended(number, new[number]):
                        continue
                done.add(number)
            waiting = [number for number in waiting if number not in done]
            advance(len(done))
    return new


@dataclass(frozen=True)
class _Row:
    """A row of a batch: a text, and what is asked of it."""

    tokens: Sequence[int]
    """The input; that of the decoder, where there is an encoder."""
    asked: list[tuple[int, int, int]]
    """(column of the input, token that may follow it, number of who asks)."""
    first: int
    """Column that predicts the first token behind the context."""
    encoder: Sequence[int] = ()
    """Input of the encoder, if there is one."""


def _row(engine: GenerationEngine, requests: Sequence[Request], numbers: Sequence[int]) -> _Row:
    """The row of some requests with the same input; the last token of each may be another one."""
    tokens = requests[numbers[0]].tokens
    # Where what is predicted begins; with an encoder it is the same for all, and otherwise it does not matter.
    begin = len(tokens) - requests[numbers[0]].scored
    row = _row_of(engine, tokens[:begin], tokens[begin:-1])
    for number in numbers:
        own, scored = requests[number].tokens, requests[number].scored
        row.asked.extend(
            (row.first + place - begin, own[place], number) for place in range(len(own) - scored, len(own))
        )
    return row


def _row_of(engine: GenerationEngine, context: Sequence[int], behind: Sequence[int]) -> _Row:
    """The row of a context and of tokens behind it, of which nothing is asked yet.

    Args:
        engine: The model.
        context: At least one token. An encoder reads it as a document that ends, and its decoder what is behind.
        behind: Further tokens.
    """
    if not engine.setup.spec.sided:
        return _Row([*context, *behind], [], len(context) - 1)
    text = document(context, engine.tokenizer.end_of_document)
    return _Row([start_token(engine.config, engine.tokenizer), *behind], [], 0, text)


def _rounds(engine: GenerationEngine, order: Sequence[T], batch_size: int) -> Iterator[Sequence[T]]:
    """Rounds of work for all ranks: a batch on each, and as many as there are stages, so that all work."""
    most = batch_size * engine.setup.mesh.size("batch") * len(engine.model.stages)
    for first in range(0, len(order), most):
        yield order[first : first + most]


def _evaluate(
    engine: GenerationEngine, rows: Sequence[_Row], dummy: int, measure: Callable[[Tensor, Batch], None]
) -> None:
    """A forward pass of a round of rows, of which this rank has its share; what fills up batches asks as `dummy`."""
    ranks, rank = engine.setup.mesh.size("batch"), engine.setup.mesh.rank("batch")
    # The fewest rows on a rank, over as many batches as there are stages, or fewer rows than those.
    count = min(len(engine.model.stages), -(-len(rows) // ranks))
    size = -(-len(rows) // (count * ranks))
    length = _length(max(len(row.tokens) for row in rows), engine.max_length, engine.model.sequence_multiple)
    starts = [(number * ranks + rank) * size for number in range(count)]
    cut = engine.model.cut
    encoder = 0
    if engine.setup.spec.sided:
        # Room for padding, a document of its own on both sides.
        multiple = engine.model.sequence_multiple
        length = _length(max(len(row.tokens) for row in rows) + 1, _ANY, multiple)
        encoder = _length(max(len(row.encoder) for row in rows) + 1, _ANY, multiple)
    batches = [
        _batch(rows[start : start + size], size, length, dummy, encoder).to(engine.setup.device) for start in starts
    ]
    contexts = [make_context(batch, bool(encoder), cut=cut) for batch in batches]
    engine.runner.evaluate([_sequence_shard(batch, cut, dummy) for batch in batches], contexts, measure)


def _sequence_shard(batch: Batch, cut: SequenceCut | None, dummy: int) -> Batch:
    """With this rank's share of the texts, and of what is asked of them."""
    if cut is None:
        return batch
    asked, length = batch.extras["asked"], batch.tokens.shape[1]
    places = cut.shard(torch.arange(length, device=asked.device), 0)
    column = torch.full((length,), -1, device=asked.device)
    column[places] = torch.arange(len(places), device=asked.device)
    asked = torch.cat((asked[:, :1], column[asked[:, 1:2]], asked[:, 2:]), dim=1)
    asked = asked[asked[:, 1] >= 0]
    if not len(asked):
        asked = asked.new_tensor([_nothing(dummy)])
    return replace(sequence_shard(batch, cut), extras={"asked": asked})


def _nothing(dummy: int) -> tuple[int, int, int, int]:
    """Something is always asked, so that no collective of those who have parts of the vocabulary is over nothing."""
    return 0, 0, 0, dummy


def _length(longest: int, max_length: int, multiple: int) -> int:
    """Positions of a batch with a longest text of `longest`: one of few lengths, so that shapes come again.

    It is a power of two or one and a half of one, a multiple of `multiple` (the residual stream may be cut along the
    sequence), and not more than the model has.
    """
    length = _SHORTEST
    while length < longest:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return max(longest, min(-(-length // multiple) * multiple, max_length))


def _batch(rows: Sequence[_Row], size: int, length: int, dummy: int, encoder: int) -> Batch:
    length += encoder
    tokens = np.zeros((size, length), dtype=np.int64)
    starts = {place * length + side for place in range(size) for side in (0, encoder)}
    for place, row in enumerate(rows):
        tokens[place, encoder : encoder + len(row.tokens)] = row.tokens
        tokens[place, : len(row.encoder)] = row.encoder
        if encoder:
            starts |= {place * length + len(row.encoder), place * length + encoder + len(row.tokens)}
    asked = [(place, *each) for place, row in enumerate(rows) for each in row.asked]
    asked = asked or [_nothing(dummy)]
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.zeros(size, length, dtype=torch.int64),
        weight=torch.zeros(size, length),
        starts=torch.tensor(sorted(starts), dtype=torch.int32),
        encoder=encoder,
        sources=torch.zeros(size, dtype=torch.int64),
        extras={"asked": torch.tensor(asked, dtype=torch.int64)},
    )


def _largest(logits_NV: Tensor, shard: VocabShard | None) -> Tensor:
    """Id of the largest logit [N], the smallest of several; `_NONE` where the logits are not finite."""
    value_N, index_N = logits_NV.max(dim=-1)
    value_N = value_N.float()
    best_N = value_N.clone()
    if shard is not None:
        dist.all_reduce(best_N, dist.ReduceOp.MAX, shard.group)
        index_N = index_N + shard.first
    index_N = index_N.masked_fill((value_N != best_N) | ~torch.isfinite(best_N), _NONE)
    if shard is not None:
        dist.all_reduce(index_N, dist.ReduceOp.MIN, shard.group)
    return index_N


@contextmanager
def _evaluation_mode(engine: GenerationEngine) -> Iterator[None]:
    """Weights that are in training go on as they were."""
    training = any(part.training for part in engine.model.parts.values())
    engine.model.train(False)
    try:
        yield
    finally:
        engine.model.train(training)


def _agree(engine: GenerationEngine, what: Sequence[Sequence[int]]) -> None:
    """Check that all ranks have the same: if not, some would wait for others for ever.

    Raises:
        MachineError: they have not.
    """
    digest = xxhash.xxh3_64(len(what).to_bytes(8, "little"))
    for numbers in what:
        digest.update(np.array([len(numbers), *numbers], dtype=np.int64).tobytes())
    own = digest.intdigest() >> 2
    both = torch.tensor([own, -own], device=engine.setup.device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if both[0] != -both[1]:
        raise MachineError(
            "the processes of the evaluation have different requests to score; is the task's file the same on all "
            "nodes, and its order independent of the process?"
        )
