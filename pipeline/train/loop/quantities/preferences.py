"""Loss, accuracy and rewards of the pairs of a step that is trained by preference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config.weights import PreferenceConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers, Update
from pipeline.train.model.loss import TokenLosses
from pipeline.train.model.preference import preference_losses, preference_margins, preference_rewards
from pipeline.train.parallel.mesh import Mesh


class PreferenceLosses(Quantity):
    """Means over the pairs of a step.

    Args:
        settings: of the preference.
        mesh: of the run.
        device: of this rank.
    """

    def __init__(self, settings: PreferenceConfig, mesh: Mesh, device: torch.device) -> None:
        self._settings, self._device = settings, device
        # Ranks with shares of a sequence know all of its pairs.
        self._share = 1 / mesh.size("cp")
        self._sums = torch.zeros(0)
        self._pairs = 1

    def begin(self, data: StepData) -> None:
        """Begin with nothing."""
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        self._pairs = max(1, data.pairs)

    def book(self, losses: TokenLosses, batch: Batch) -> None:
        """Add the pairs of a micro-batch."""
        assert losses.of_pairs is not None and batch.reference is not None
        rewards_P2 = preference_rewards(losses.of_pairs, batch.reference, self._settings.beta)
        z_P = preference_margins(rewards_P2)
        found = (preference_losses(z_P, self._settings.label_smoothing), (z_P > 0).double(), *rewards_P2.unbind(1))
        self._sums += self._share * torch.stack([each.sum() for each in found])

    def parts(self) -> list[Tensor]:
        """Sums over pairs."""
        return [self._sums]

    def totals(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of losses and number of pairs over all ranks, fp64 scalars on the device."""
        return sums[0][0], torch.full_like(sums[0][0], self._pairs)

    def finish(self, sums: Sequence[Tensor], update: Update) -> QuantityNumbers:
        """See `Quantity`."""
        return QuantityNumbers({"means": sums[0] / self._pairs}, _columns)


def _columns(means: Tensor) -> dict[str, Any]:
    loss, accuracy, chosen, rejected = means.tolist()
    return {
        "preference_loss": loss,
        "preference_accuracy": accuracy,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }
