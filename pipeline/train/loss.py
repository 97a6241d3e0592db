"""The training loss: a sum over tokens, divided by the valid targets of the global batch by whoever calls it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_loss(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of every token in fp32, and what is to be minimized.

    Args:
        logits_BSV: logits in any float dtype; padded vocabulary columns are -inf.
        targets_BS: int64 ids.
        z_loss: coefficient of log(Z)^2, which keeps the softmax's normalizer near 1 (PaLM, section 5).

    Returns:
        The cross entropy [B, S] in nats, and the objective [B, S]: the same plus the z-loss.
    """
    logits = logits_BSV.float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets_BS.flatten(), reduction="none").view_as(targets_BS)
    if z_loss == 0.0:
        return loss, loss
    return loss, loss + z_loss * torch.logsumexp(logits, dim=-1).square()
