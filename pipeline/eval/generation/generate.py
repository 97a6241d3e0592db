"""Generation of text: prompts are continued together, and their continuations come as they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.eval.expert_choices import ChoiceCollector, ExpertChoices
from pipeline.eval.generation.batch import Finish, GeneratedText, GenerationBatch, Token
from pipeline.eval.generation.detokenize import TextTokenizer
from pipeline.eval.generation.sampling import Sampling
from pipeline.train.model.decoder import Decoder


@dataclass(frozen=True)
class Continuation:
    """A text that has ended. Its attributes are those of its pieces together."""

    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]
    finish: Finish
    choices: ExpertChoices | None = None
    """Experts of its tokens, if they were asked for."""


def encode_prompt(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """Ids of a prompt; an empty one begins a document.

    Raises:
        UserError: It is not UTF-8 text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"the prompt {prompt!r} is not UTF-8 text") from None
    return tokenizer.encode(prompt) or [tokenizer.end_of_document]


def generate(
    model: Decoder,
    tokenizer: TextTokenizer,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    slots: int = 8,
    max_length: int | None = None,
) -> list[Continuation]:
    """Continues each prompt.

    Args:
        model: A whole model, on one device.
        tokenizer: The one that it was trained with.
        prompts: Texts, or their tokens. An empty text begins a document.
        sampling: For all of them, or one each.
        slots: Texts that are continued at the same time.
        max_length: Positions of a text: prompt and new tokens. By default as many as are needed.

    Raises:
        UserError: A prompt is not UTF-8 text or leaves no position for a new token; logits are not finite.
    """
    ended = dict(as_they_end(model, tokenizer, prompts, sampling, slots=slots, max_length=max_length))
    return [ended[index] for index in range(len(prompts))]


def as_they_end(
    model: Decoder,
    tokenizer: TextTokenizer,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    *,
    slots: int = 8,
    max_length: int | None = None,
    experts: bool = False,
) -> Iterator[tuple[int, Continuation]]:
    """`generate`, one by one: the index of a prompt and its continuation, the first one to end first.

    With `experts`, for a model that has some, continuations have the choices of their tokens.
    """
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    ids = [encode_prompt(tokenizer, each) if isinstance(each, str) else list(each) for each in prompts]
    if max_length is None:
        max_length = max((_positions(model, a, b) for a, b in zip(ids, settings, strict=True)), default=1)
    choices = ChoiceCollector() if experts else None
    batch = GenerationBatch(model, tokenizer, slots=slots, max_length=max_length, choices=choices)
    texts: dict[int, tuple[int, list[str], list[Token]]] = {}
    waiting = deque(enumerate(zip(ids, settings, strict=True)))
    while waiting or texts:
        while waiting and batch.free:
            index, (prompt, how) = waiting.popleft()
            texts[batch.start(prompt, how)] = (index, [], [])
        for key, piece in batch.step():
            index, words, tokens = texts[key]
            words.append(piece.text)
            tokens.extend(piece.tokens)
            if piece.finish:
                del texts[key]
                everything = [*ids[index], *(token.id for token in tokens)]
                chosen = None if choices is None else choices.take(key, everything)
                yield index, Continuation("".join(words), tuple(tokens), batch.prompt_tokens(key), piece.finish, chosen)


def _positions(model: Decoder, ids: Sequence[int], sampling: Sampling) -> int:
    """Positions that a text needs; those of an encoder are others than those of its decoder."""
    new = max(sampling.max_tokens, 1)
    return max(len(ids), new) + 1 if model.spec.sided else len(ids) + new


def stream(
    model: Decoder, tokenizer: TextTokenizer, prompt: str | Sequence[int], sampling: Sampling
) -> Iterator[GeneratedText]:
    """The pieces of one text as they come; their texts joined are the continuation. See `generate`."""
    ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    batch = GenerationBatch(model, tokenizer, slots=1, max_length=_positions(model, ids, sampling))
    batch.start(ids, sampling)
    return _pieces(batch)


def _pieces(batch: GenerationBatch) -> Iterator[GeneratedText]:
    while not batch.free:
        yield from (piece for _, piece in batch.step())
