"""Loss on held-out windows. The same code validates while training and evaluates afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeline.data.heldout import HeldOut
from pipeline.train.loss import token_loss
from pipeline.train.model.decoder import Decoder
from pipeline.train.step import make_context


@dataclass(frozen=True)
class HeldOutLoss:
    """A sum of cross entropy in nats over `targets` tokens."""

    nats: float
    targets: int

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.nats / max(1, self.targets)

    def __add__(self, other: HeldOutLoss) -> HeldOutLoss:
        return HeldOutLoss(self.nats + other.nats, self.targets + other.targets)


@torch.no_grad()
def heldout_loss(
    model: Decoder,
    split: HeldOut,
    windows: Sequence[int],
    *,
    batch_size: int,
    document_attention: bool,
    device: torch.device,
    advance: Callable[[int], None] = lambda windows: None,
) -> HeldOutLoss:
    """Cross entropy of `windows` of a split; sums are taken in fp64.

    Args:
        advance: called with the number of windows done after each batch.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    targets = 0
    model.eval()
    for first in range(0, len(windows), batch_size):
        chosen = windows[first : first + batch_size]
        batch = split.batch(chosen)
        targets += int(batch.weight.sum().item())
        batch = batch.to(device)
        logits = model(batch.tokens, make_context(batch, document_attention))
        loss, _ = token_loss(logits, batch.targets)
        total += (loss * batch.weight).sum(dtype=torch.float64)
        advance(len(chosen))
    model.train()
    return HeldOutLoss(total.item(), targets)
