"""Continue texts, many at once and each as if it were alone.

Shapes: R rows, S positions, V padded vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.eval.encoders import document
from pipeline.eval.expert_choices import ChoiceCollector
from pipeline.eval.generation.detokenize import Detokenizer, StopStrings, TextTokenizer
from pipeline.eval.generation.sampling import Sampling, draw, penalize, probabilities
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.states import States

Finish = Literal["stop", "length"]
"""Why a text ended. `stop`: end of the document or of the turn, or a stop string. `length`: `max_tokens`, or no
positions left."""

_READ_AT_ONCE = 2048
"""Tokens of prompts in one forward pass, padding included; those who wait for their next token wait for it."""
_SCORED_AT_ONCE = 512
"""The same where each of them gets logits."""
_SHORT = 64
"""Prompts up to this length are read together whatever their lengths are."""


@dataclass(frozen=True)
class Token:
    """A token of a text."""

    id: int
    text: str
    """Decoded by itself, for display: a part of a character is U+FFFD."""
    logprob: float | None
    """See `Sampling.logprobs`; None where there is none."""
    top: tuple[tuple[int, str, float], ...]
    """Id, text and log-probability of the most probable tokens in its place, most probable first."""


@dataclass(frozen=True)
class GeneratedText:
    """Text that a step adds."""

    text: str
    """It lags behind the tokens: incomplete characters and what may become a stop string are held back."""
    tokens: tuple[Token, ...]
    """Those taken. A token that ends the text is not among them; what a stop string cuts off is."""
    finish: Finish | None
    """Set on the last piece."""


@dataclass
class _Row:
    """A text that is being continued."""

    key: int
    prompt: list[int]
    sampling: Sampling
    most: int
    """New tokens at most."""
    detokenizer: Detokenizer
    stop: StopStrings
    chance: torch.Generator
    last: int = -1
    """The newest token, which the model has not read yet."""
    count: int = 0
    """New tokens."""
    seen_V: Tensor | None = None
    """Tokens that the text has; only with a repetition penalty."""
    prompt_tokens: list[Token] = field(default_factory=list)


class GenerationBatch:
    """Texts that are continued together: each begins when it comes and leaves when it ends (continuous batching).

    What a text becomes does not depend on the others, but for the rounding of sums. After an error it cannot go on.
    Not thread-safe: one thread drives it.

    Of an encoder-decoder the encoder reads the prompt, as a document that ends, and the decoder begins behind its start
    token.

    Args:
        model: A whole model, on one device.
        tokenizer: The one that it was trained with.
        slots: Texts at once.
        max_length: Positions of each: prompt and new tokens. Learned positions may be fewer.
        choices: Is shown which experts the tokens choose.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextTokenizer,
        *,
        slots: int,
        max_length: int,
        choices: ChoiceCollector | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._choices = choices
        self._slots = slots
        self._limit = "there are {} positions for it and its continuation"
        learned = model.spec.learned_positions
        if learned is not None and learned <= max_length:
            max_length, self._limit = learned, "model.max_positions is {}"
        self._max_length = max_length
        self._device = next(model.parameters()).device
        self._encodes = model.spec.sided
        self._start = tokenizer.end_of_document if model.start_token is None else model.start_token
        self._states = model.new_states(0, max_length)
        self._waiting: deque[_Row] = deque()
        self._reading: tuple[_Row, States] | None = None  # a prompt that takes several passes
        self._rows: list[_Row] = []  # in the order of the states' rows
        self._prompt_tokens: dict[int, tuple[Token, ...]] = {}
        self._ended: list[int] = []
        self._texts: dict[int, str] = {}
        self._keys = 0

    @property
    def free(self) -> int:
        """Texts that can come now."""
        return self._slots - len(self._waiting) - len(self._rows) - (self._reading is not None)

    def start(self, prompt_ids: Sequence[int], sampling: Sampling) -> int:
        """A text comes; the next steps read it. There has to be a free slot.

        Args:
            prompt_ids: At least one token.
            sampling: How it goes on.

        Returns:
            The key of its pieces.

        Raises:
            UserError: The prompt leaves no position for a new token, or has a token that the model does not.
        """
        assert self.free > 0, "no free slot"
        if self._encodes:
            self._check_encoded(prompt_ids, sampling)
            prompt_ids = document(prompt_ids, self._tokenizer.end_of_document)
        length, limit = len(prompt_ids), self._max_length
        if length >= limit + self._encodes:
            raise UserError(
                f"the prompt has {length:,} tokens, but {self._limit.format(f'{limit:,}')}; "
                f"give a prompt of at most {limit - 1:,} tokens"
            )
        vocabulary = self._model.spec.vocab_size
        bad = next((token for token in prompt_ids if not 0 <= token < vocabulary), None)
        if not length or bad is not None:
            what = "no tokens" if bad is None else f"token {bad}"
            raise UserError(f"the prompt has {what}; give one or more tokens from 0 to {vocabulary - 1:,}")
        self._keys += 1
        row = _Row(
            key=self._keys,
            prompt=list(prompt_ids),
            sampling=sampling,
            most=min(sampling.max_tokens, limit - (1 if self._encodes else length)),
            detokenizer=Detokenizer(self._tokenizer, [self._start] if self._encodes else prompt_ids),
            stop=StopStrings(sampling.stop),
            chance=self._chance(prompt_ids, sampling.seed),
        )
        if sampling.repetition_penalty != 1:
            row.seen_V = torch.zeros(self._model.spec.vocab_padded, dtype=torch.bool, device=self._device)
            seen = [self._start] if self._encodes else row.prompt
            row.seen_V[torch.tensor(seen, device=self._device)] = True
        self._waiting.append(row)
        return row.key

    def _check_encoded(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Refuse what an encoder does not do with a prompt."""
        if not prompt_ids:
            raise UserError("the prompt has no tokens; give one or more")
        if sampling.prompt_logprobs:
            raise UserError(
                "the model has an encoder, which reads the prompt and predicts nothing of it: ask for no "
                "log-probabilities of the prompt"
            )

    def prompt_tokens(self, key: int) -> tuple[Token, ...]:
        """The tokens of a text's prompt, with `Sampling.prompt_logprobs`; the first one has no log-probability.

        They are known from its first piece to the step after its last one.
        """
        return self._prompt_tokens.get(key, ())

    def step(self) -> list[tuple[int, GeneratedText]]:
        """Each text that was read gets a token; of those that wait some are read, and get their first one.

        Returns:
            A piece for each of these, by key. Texts that ended have left.

        Raises:
            UserError: The model's logits are not finite.
        """
        for key in self._ended:
            self._prompt_tokens.pop(key, None)
        self._ended = []
        pieces = []
        if self._rows:
            tokens_R1 = torch.tensor([[row.last] for row in self._rows], device=self._device)
            logits_RV = self._forward(self._rows, tokens_R1, Context(states=self._states))[:, -1]
            pieces += self._continue(self._rows, logits_RV)
            self._remove([index for index, piece in enumerate(pieces) if piece[1].finish])
        if self._reading or self._waiting:
            pieces += self._read()
        return pieces

    def drop(self, key: int) -> None:
        """Nobody waits for a text any more. One that has ended may be dropped, too."""
        self._waiting = deque(row for row in self._waiting if row.key != key)
        if self._reading and self._reading[0].key == key:
            self._reading = None
        self._remove([index for index, row in enumerate(self._rows) if row.key == key])
        self._prompt_tokens.pop(key, None)
        if self._choices is not None:
            self._choices.forget(key)

    def _chance(self, prompt_ids: Sequence[int], seed: int) -> torch.Generator:
        """Generator of a text's draws: the same wherever and whenever, and another one for another prompt."""
        key = xxhash.xxh3_64_intdigest(np.asarray(prompt_ids, dtype="<i8").tobytes(), seed=seed % 2**64)
        return torch.Generator(self._device).manual_seed(key)

    def _remove(self, indices: Sequence[int]) -> None:
        for index in reversed(indices):
            self._ended.append(self._rows[index].key)
            self._states.remove(index)
            last = self._rows.pop()
            if index < len(self._rows):
                self._rows[index] = last

    # Around the model only: a generator would leave it switched on for its consumer between two tokens.
    @torch.no_grad()
    def _forward(self, rows: Sequence[_Row], tokens_RS: Tensor, context: Context) -> Tensor:
        if self._choices is not None:
            counts = context.counts or [tokens_RS.shape[1]] * len(rows)
            context = replace(context, on_routed=self._choices.observer([row.key for row in rows], counts))
        logits_RSV: Tensor = self._model(tokens_RS, context)
        return logits_RSV.float()

    def _read(self) -> list[tuple[int, GeneratedText]]:
        """One forward pass of prompts: several short ones, or a part of a long one."""
        if self._encodes:
            return self._encode()
        if self._reading is None:
            rows = self._next_to_read()
            states = self._model.new_states(len(rows), max(len(row.prompt) for row in rows))
        else:
            rows, states = [self._reading[0]], self._reading[1]
            self._reading = None
        scored = rows[0].sampling.prompt_logprobs
        begin = states.lengths[0]
        end = begin + (_SCORED_AT_ONCE if scored else _READ_AT_ONCE)
        prompts = [row.prompt[begin:end] for row in rows]
        counts = [len(prompt) for prompt in prompts]
        # On the right, where causal attention does not see it.
        padded = [[*prompt, *[0] * (max(counts) - len(prompt))] for prompt in prompts]
        tokens_RS = torch.tensor(padded, device=self._device)
        context = Context(states=states, counts=counts, last_only=not scored)
        logits_RSV = self._forward(rows, tokens_RS, context)
        if scored:
            for row, logits_SV, count in zip(rows, logits_RSV, counts, strict=True):
                self._score_prompt(row, logits_SV[:count], begin)
        if end < len(rows[0].prompt):
            self._reading = (rows[0], states)
            return []
        last_R = torch.tensor(counts, device=self._device) - 1
        index_R = torch.arange(len(rows), device=self._device)
        logits_RV = logits_RSV[index_R, last_R] if scored else logits_RSV[:, -1]
        self._prompt_tokens |= {row.key: tuple(row.prompt_tokens) for row in rows}
        return self._begin(rows, logits_RV, states)

    def _encode(self) -> list[tuple[int, GeneratedText]]:
        """Prompts go through the encoder, whole ones, and the decoder gets its start token."""
        rows = self._next_to_read()
        states = self._model.new_states(len(rows), self._max_length)
        counts = [len(row.prompt) for row in rows]
        padded = [[*row.prompt, *[0] * (max(counts) - len(row.prompt))] for row in rows]
        tokens_RS = torch.tensor(padded, device=self._device)
        with torch.no_grad():
            self._model(tokens_RS, Context(states=states, counts=counts, encoder=max(counts)))
        starts_R1 = torch.full((len(rows), 1), self._start, device=self._device)
        return self._begin(rows, self._forward(rows, starts_R1, Context(states=states))[:, -1], states)

    def _begin(self, rows: list[_Row], logits_RV: Tensor, states: States) -> list[tuple[int, GeneratedText]]:
        """The first tokens of texts whose prompts were read; they are continued with the others."""
        pieces = self._continue(rows, logits_RV)
        self._states.join(states)
        before = len(self._rows)
        self._rows += rows
        self._remove([before + index for index, piece in enumerate(pieces) if piece[1].finish])
        return pieces

    def _next_to_read(self) -> list[_Row]:
        """Prompts for one forward pass, from those that wait longest: of similar length, or a long one alone."""
        rows = [self._waiting.popleft()]
        scored = rows[0].sampling.prompt_logprobs
        room = _SCORED_AT_ONCE if scored else _READ_AT_ONCE
        shortest = longest = len(rows[0].prompt)
        for row in list(self._waiting):
            low, high = min(shortest, len(row.prompt)), max(longest, len(row.prompt))
            fits = high * (len(rows) + 1) <= room and (high <= 2 * low or high <= _SHORT)
            if fits and row.sampling.prompt_logprobs == scored:
                shortest, longest = low, high
                rows.append(row)
                self._waiting.remove(row)
        return rows

    def _continue(self, rows: Sequence[_Row], logits_RV: Tensor) -> list[tuple[int, GeneratedText]]:
        """The next token of each row, of which `logits_RV` are the logits."""
        taken_R = self._choose(rows, logits_RV)
        ids: list[int] = taken_R.tolist()
        if min(ids) < 0:
            raise UserError("the model's logits are not finite: its training diverged; try an earlier --step")
        tokens = self._with_logprobs(rows, logits_RV, taken_R, ids)
        return [(row.key, self._take(row, token)) for row, token in zip(rows, tokens, strict=True)]

    def _choose(self, rows: Sequence[_Row], logits_RV: Tensor) -> Tensor:
        """Ids [R], on the device; -1 where the logits are not finite."""
        finite_R = logits_RV.amax(-1).isfinite()
        if any(row.seen_V is not None for row in rows):
            nothing_V = torch.zeros(logits_RV.shape[-1], dtype=torch.bool, device=self._device)
            seen = [nothing_V if row.seen_V is None else row.seen_V for row in rows]
            logits_RV = penalize(logits_RV, torch.stack(seen), [row.sampling.repetition_penalty for row in rows])
        drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0 and row.sampling.max_tokens]
        taken_R = logits_RV.argmax(-1)
        if drawn:
            index_R = torch.tensor(drawn, device=self._device)
            logits_RV = logits_RV if len(drawn) == len(rows) else logits_RV[index_R]
            probabilities_RV = probabilities(logits_RV, [rows[index].sampling for index in drawn])
            taken_R[index_R] = draw(probabilities_RV, [rows[index].chance for index in drawn])
        return taken_R.where(finite_R, -1)

    def _with_logprobs(
        self, rows: Sequence[_Row], logits_RV: Tensor, taken_R: Tensor, ids: Sequence[int]
    ) -> list[Token]:
        """The tokens taken, with log-probabilities for the rows that want them."""
        wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        found: dict[int, Token] = {}
        if wanted:
            index_R = torch.tensor(wanted, device=self._device)
            counts = [rows[index].sampling.logprobs or 0 for index in wanted]
            found = dict(zip(wanted, self._scored(logits_RV[index_R], taken_R[index_R], counts), strict=True))
        return [found.get(index) or Token(token, self._text(token), None, ()) for index, token in enumerate(ids)]

    def _score_prompt(self, row: _Row, logits_SV: Tensor, begin: int) -> None:
        """The prompt's tokens that a part of it predicts, which begins at position `begin`."""
        if not row.prompt_tokens:
            first = row.prompt[0]
            row.prompt_tokens.append(Token(first, self._text(first), None, ()))
        targets = row.prompt[begin + 1 : begin + 1 + len(logits_SV)]
        if targets:
            logits_SV = logits_SV[: len(targets)]
            counts = [row.sampling.logprobs or 0] * len(targets)
            row.prompt_tokens += self._scored(logits_SV, torch.tensor(targets, device=self._device), counts)

    def _scored(self, logits_RV: Tensor, ids_R: Tensor, counts: Sequence[int]) -> list[Token]:
        """Tokens with their log-probabilities, and those of the `counts` most probable ones of each row."""
        logprobs_RV = logits_RV.log_softmax(-1)
        own: list[float] = logprobs_RV.gather(1, ids_R[:, None])[:, 0].tolist()
        ids: list[int] = ids_R.tolist()
        # The vocabulary's padding is never among them.
        best = logprobs_RV.topk(min(max(counts), self._model.spec.vocab_size))
        tokens = []
        for token, logprob, count, values, places in zip(
            ids, own, counts, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            # Of equal ones the smallest id first, whatever the kernel does.
            pairs = sorted(zip(values, places, strict=True), key=lambda pair: (-pair[0], pair[1]))
            top = tuple((place, self._text(place), value) for value, place in pairs[:count])
            tokens.append(Token(token, self._text(token), logprob, top))
        return tokens

    def _take(self, row: _Row, token: Token) -> GeneratedText:
        """Continue the row with a token, or end it."""
        if row.most == 0:
            return GeneratedText("", (), "length")
        ends = token.id == self._tokenizer.end_of_document or token.id in row.sampling.end_tokens
        if ends and not row.sampling.ignore_end:
            return GeneratedText(self._rest(row), (), "stop")
        row.last = token.id
        row.count += 1
        if row.seen_V is not None:
            row.seen_V[token.id] = True
        hidden = token.id in row.sampling.hidden_tokens
        text = row.stop.add("" if hidden else row.detokenizer.add(token.id))
        if row.stop.found:
            return GeneratedText(text, (token,), "stop")
        if row.count < row.most:
            return GeneratedText(text, (token,), None)
        text += self._rest(row)
        return GeneratedText(text, (token,), "stop" if row.stop.found else "length")

    @staticmethod
    def _rest(row: _Row) -> str:
        """The rest of the text, where no token comes any more."""
        text = row.stop.add(row.detokenizer.finish())
        return text if row.stop.found else text + row.stop.finish()

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]
