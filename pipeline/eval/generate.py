"""Continue a prompt, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipeline.config.eval import GenerateConfig
from pipeline.errors import UserError
from pipeline.train.model.attention import KVCache
from pipeline.train.model.decoder import Context, Decoder

_INCOMPLETE = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet


class TextTokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def end_of_document(self) -> int:
        """Id of the token that closes a document."""

    def encode(self, text: str, /) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of some ids."""


def generate(model: Decoder, tokenizer: TextTokenizer, prompt: str, config: GenerateConfig) -> Iterator[str]:
    """Continues `prompt` with up to `config.max_tokens` tokens, and yields the text as it comes.

    It ends earlier at the end of the document, and where a learned position embedding has no more rows. An empty prompt
    begins a document. The pieces joined are the text of the new tokens: a character made of several tokens comes whole.

    Args:
        model: A whole model, on one device.
        tokenizer: The one that it was trained with.
        prompt: Text to continue; it is not repeated.
        config: The `generate:` section; its own `prompt` is not looked at.

    Raises:
        UserError: The prompt alone fills all positions of a learned embedding.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"generate.prompt {prompt!r} is not UTF-8 text") from None
    prompt_ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    rows = model.spec.learned_positions
    if rows is not None and len(prompt_ids) >= rows:
        raise UserError(
            f"generate.prompt has {len(prompt_ids)} tokens, but model.max_positions is {rows}; "
            f"give a prompt of at most {rows - 1} tokens"
        )
    return _stream_text(_generate_ids(model, tokenizer.end_of_document, prompt_ids, config), tokenizer, prompt_ids)


def next_token_probabilities(logits_V: Tensor, config: GenerateConfig) -> Tensor:
    """Distribution [V] that a token is drawn from: temperature, then top-k, then top-p (Holtzman et al. 2020).

    Args:
        logits_V: fp32; -inf is never drawn.
        config: `temperature` above 0, `top_k`, `top_p`.
    """
    # The largest is taken off first: divided by a small temperature it would be infinite.
    probabilities_V = torch.softmax((logits_V - logits_V.max()) / config.temperature, dim=-1)
    if config.top_k is None and config.top_p is None:
        return probabilities_V
    sorted_V, index_V = probabilities_V.sort(descending=True, stable=True)
    if config.top_k is not None:
        sorted_V[config.top_k :] = 0
        sorted_V /= sorted_V.sum()
    if config.top_p is not None:
        # A token stays if those before it have not reached top_p yet: the first one always does.
        sorted_V[sorted_V.cumsum(0) - sorted_V >= config.top_p] = 0
        sorted_V /= sorted_V.sum()
    return torch.zeros_like(sorted_V).scatter_(0, index_V, sorted_V)


def _generate_ids(model: Decoder, end: int, prompt_ids: list[int], config: GenerateConfig) -> Iterator[int]:
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(config.seed)
    states = model.new_states()
    count = config.max_tokens
    if model.spec.learned_positions is not None:
        count = min(count, model.spec.learned_positions - len(prompt_ids))
    ids = prompt_ids
    for _ in range(count):
        logits_V = _last_logits(model, torch.tensor([ids], device=device), states)
        if not torch.isfinite(logits_V.max()):
            raise UserError("the model's logits are not finite: its training diverged; try an earlier --step")
        if config.temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial(next_token_probabilities(logits_V, config), 1, generator=generator))
        if token == end:
            return
        yield token
        ids = [token]


# Around each step only: a generator would leave inference mode switched on for its consumer between two tokens.
@torch.no_grad()
def _last_logits(model: Decoder, tokens_1S: Tensor, states: list[KVCache]) -> Tensor:
    logits: Tensor = model(tokens_1S, Context(states=states))
    return logits[0, -1].float()


def _stream_text(ids: Iterator[int], tokenizer: TextTokenizer, prompt_ids: list[int]) -> Iterator[str]:
    """Text of `ids` as they come.

    New ids are decoded together with those before them, because some tokenizers treat the first token of a text
    differently (leading spaces); what ends in an incomplete character waits for the next id.
    """
    before, pending = list(prompt_ids), list[int]()
    shown = len(tokenizer.decode(before))
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(before + pending)
        if len(text) > shown and not text.endswith(_INCOMPLETE):
            yield text[shown:]
            before, pending = pending, []
            shown = len(tokenizer.decode(before))
    if pending and (rest := tokenizer.decode(before + pending)[shown:]):
        yield rest
