"""Choice of the next token: settings of a text, and draws for many texts at once.

Shapes: R rows, each with settings of its own; V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.common.errors import UserError

_ONE = 2**40
"""Stands for probability 1 in sums."""


@dataclass(frozen=True)
class Sampling:
    """Settings by which one text is continued.

    Logits go through the repetition penalty, temperature, top-k, top-p and min-p, in this order, as in transformers.
    Each cut looks at what those before it have left. Equal logits stay or go together.
    """

    max_tokens: int = 64
    """New tokens at most; 0 only reads the prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token, of equal ones that of the smallest id (greedy)."""
    top_k: int | None = None
    """Keep the k most probable tokens."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches this (nucleus; Holtzman et al. 2020)."""
    min_p: float | None = None
    """Keep tokens whose probability is this share of the largest one or more (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the new text has are divided by it where they are positive, and multiplied
    where they are negative (Keskar et al. 2019)."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these: the one that is complete first, and of several the longest."""
    end_tokens: tuple[int, ...] = ()
    """Ids of tokens that end the text as the end of document does: the end of a turn, say."""
    hidden_tokens: frozenset[int] = frozenset()
    """Ids of tokens that are taken, and are no text: special tokens in an answer, say."""
    seed: int = 0
    """The draws depend on it, the prompt and the probabilities alone."""
    logprobs: int | None = None
    """Log-probabilities of the token that was taken and of the N most probable ones: natural logarithm, of the
    model itself, before all of the above. None: none."""
    prompt_logprobs: bool = False
    """Those of the prompt's tokens too; needs `logprobs`."""
    ignore_end: bool = False
    """Go on behind an end of document."""

    def __post_init__(self) -> None:
        """Checks each setting.

        Raises:
            UserError: A value that means nothing.
        """
        allowed = {
            "max_tokens": (self.max_tokens >= 0, "0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0 (1 has no effect)"),
            "stop": (all(self.stop), "texts of one character or more"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "0 or more"),
            "prompt_logprobs": (not self.prompt_logprobs or self.logprobs is not None, "given together with logprobs"),
        }
        for name, (is_valid, what) in allowed.items():
            if not is_valid:
                raise UserError(f"{name} is {getattr(self, name)!r}, but must be {what}")


def penalize(logits_RV: Tensor, seen_RV: Tensor, penalties: Sequence[float]) -> Tensor:
    """Logits after the repetition penalty of each row, where `seen_RV` says which tokens its text has."""
    penalty_R1 = torch.tensor(penalties, dtype=logits_RV.dtype, device=logits_RV.device)[:, None]
    penalized_RV = torch.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
    return torch.where(seen_RV, penalized_RV, logits_RV)


def probabilities(logits_RV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Distributions [R, V] that tokens are drawn from: temperature, then top-k, top-p, min-p.

    Args:
        logits_RV: fp32, after penalties; -inf is never drawn.
        settings: By row; temperatures above 0.
    """

    def by_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_RV.device)[:, None]

    # The largest is taken off first: divided by a small temperature it would be infinite.
    temperature_R1 = by_row([max(each.temperature, torch.finfo(torch.float32).tiny) for each in settings])
    logits_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R1
    vocab = logits_RV.shape[-1]
    top_k = [min(each.top_k or vocab, vocab) for each in settings]
    top_p = [1.0 if each.top_p is None else each.top_p for each in settings]
    cuts_p = min(top_p) < 1
    if cuts_p or min(top_k) < vocab:
        # Rows without top-k need all of the order for top-p alone.
        needed = max(k for k, p in zip(top_k, top_p, strict=True) if k < vocab or p < 1)
        ordered_RC = logits_RV.topk(needed).values if needed < vocab else logits_RV.sort(descending=True).values
        index_R1 = torch.tensor([min(k, needed) - 1 for k in top_k], device=logits_RV.device)[:, None]
        least_R1 = ordered_RC.gather(1, index_R1)
        least_R1 = least_R1.where(by_row(top_k) < vocab, -math.inf)
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -math.inf)
        if cuts_p:
            ordered_RC = ordered_RC.masked_fill(ordered_RC < least_R1, -math.inf)
            fraction_RC = _in_units((ordered_RC - logits_RV.logsumexp(-1, keepdim=True)).exp())
            # A token stays if those before it have not reached top_p yet: the first one always does.
            enough_R1 = torch.tensor([[max(1, round(p * _ONE))] for p in top_p], device=logits_RV.device)
            stays_RC = (fraction_RC.cumsum(-1) - fraction_RC < enough_R1) & (fraction_RC > 0)
            last_R1 = stays_RC.sum(-1, keepdim=True) - 1
            least_R1 = ordered_RC.gather(1, last_R1).where(by_row(top_p) < 1, -math.inf)
            logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -math.inf)
    min_p = [each.min_p or 0.0 for each in settings]
    if max(min_p) > 0:
        least_R1 = logits_RV.amax(-1, keepdim=True) + by_row(min_p).log()
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -math.inf)
    return logits_RV.softmax(-1)


def draw(probabilities_RV: Tensor, chances: Sequence[torch.Generator]) -> Tensor:
    """A token [R] for each row: of exponential waiting times with the probabilities as rates, the shortest.

    Where probabilities change by rounding alone, as with other texts in a batch, another token is drawn only if two
    waiting times are that close. With one number a row and cumulative sums, every token below would move the draw.

    Args:
        probabilities_RV: 0 is never drawn.
        chances: By row, on the device of the probabilities; each gives V numbers.
    """
    waiting_RV = torch.empty_like(probabilities_RV, dtype=torch.float64)  # in fp32, rare tokens would never be first
    for waiting_V, chance in zip(waiting_RV, chances, strict=True):
        waiting_V.exponential_(generator=chance)
    return (probabilities_RV / waiting_RV.clamp_(min=torch.finfo(torch.float64).tiny)).argmax(-1)


def _in_units(probabilities: Tensor) -> Tensor:
    """Whole numbers: their sums are the same in any order, and a rare token is not lost in them as it is in fp32."""
    return (probabilities.double() * _ONE).round().long()
