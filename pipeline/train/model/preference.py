"""Direct preference optimization (Rafailov et al. 2023): the loss of pairs of conversations.

A pair is better the more the model prefers its first conversation than a frozen reference model does. With l and r the
log-probabilities of a conversation's trained targets by both,

    z = beta ((l_0 - r_0) - (l_1 - r_1)),    loss = -(1 - e) log sigmoid(z) - e log sigmoid(-z)

where e is the share of pairs that are taken to be in the wrong order (label smoothing; Mitchell 2023). The loss is not
a sum over tokens, but its gradient is that of one: each target's cross entropy, times a factor that is known when both
log-probabilities are.

Shapes: B batch, S positions, P pairs of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Preference:
    """Pairs of a micro-batch."""

    conversation_BS: Tensor
    """int64, see `Batch.conversation`."""
    trained_BS: Tensor
    """fp32, 1 for a target that counts, else 0."""
    reference_P2: Tensor
    """fp64, log-probabilities by the reference model."""
    beta: float
    label_smoothing: float
    group: dist.ProcessGroup | None = None
    """Ranks that have shares of the same sequences; None: this one has all."""

    def log_probabilities(self, loss_BS: Tensor) -> Tensor:
        """[P, 2] fp64, those of each conversation; the same on all ranks of the group.

        Args:
            loss_BS: cross entropy of this rank's positions, without a gradient.
        """
        sums = torch.zeros(2 * len(self.reference_P2) + 1, dtype=torch.float64, device=loss_BS.device)
        nats = torch.where(self.trained_BS != 0, loss_BS, 0).double()
        sums.index_add_(0, self.conversation_BS.flatten(), nats.flatten())
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return -sums[:-1].view(-1, 2)

    def weights(self, own_P2: Tensor) -> Tensor:
        """[B, S] fp32, derivative of the sum of the pairs' losses by the cross entropy of each position.

        Args:
            own_P2: from `log_probabilities`.
        """
        z_P = preference_margins(preference_rewards(own_P2, self.reference_P2, self.beta))
        smoothing = self.label_smoothing
        slope_P = self.beta * ((1 - smoothing) * torch.sigmoid(-z_P) - smoothing * torch.sigmoid(z_P))
        slopes = torch.cat((torch.stack((slope_P, -slope_P), dim=1).flatten(), slope_P.new_zeros(1)))
        return slopes.float()[self.conversation_BS] * self.trained_BS


def preference_rewards(own_P2: Tensor, reference_P2: Tensor, beta: float) -> Tensor:
    """Rewards of both conversations of each pair, [P, 2] fp64.

    Args:
        own_P2: log-probabilities by the model.
        reference_P2: the same by the reference model.
        beta: factor of rewards.
    """
    return beta * (own_P2 - reference_P2)


def preference_margins(rewards_P2: Tensor) -> Tensor:
    """Margins z of pairs, [P] fp64: the reward of the preferred conversation, less that of the other."""
    return rewards_P2[:, 0] - rewards_P2[:, 1]


def preference_losses(z_P: Tensor, label_smoothing: float) -> Tensor:
    """Loss of each pair, [P] fp64, of its margin."""
    return -(1 - label_smoothing) * F.logsigmoid(z_P) - label_smoothing * F.logsigmoid(-z_P)
