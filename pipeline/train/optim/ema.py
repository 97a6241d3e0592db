"""A moving average of the weights, sharded as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config.train import EmaConfig
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.torch_compat.core import guard_optimizer_step, local_shard, plain


class Ema:
    """average = decay * average + (1 - decay) * weights after each step that changes them, in fp32.

    It starts as the weights. Each process averages its own shards, so that nothing is communicated.
    """

    def __init__(self, config: EmaConfig, model: ParallelModel) -> None:
        self._model = model
        self.averages: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in self._weights().items()}
        """By parameter name: DTensors with the placements of the parameters."""
        self._shards = {name: nn.Parameter(local_shard(average)) for name, average in self.averages.items()}
        # a - (1 - decay) * (1 * a - w): a step of descent with weight decay 1 along the weights. Torch has it as one
        # kernel for all tensors that needs no memory of its own and that a flag on the device can withhold.
        self._descent = torch.optim.SGD(
            self._shards.values(), lr=1 - config.decay, weight_decay=1.0, maximize=True, fused=True
        )

    @torch.no_grad()
    def update(self, updated: Tensor) -> None:
        """Take in the weights after a step.

        Args:
            updated: bool scalar on the device; if it is false, no bit changes.
        """
        for name, weight in self._weights().items():
            self._shards[name].grad = local_shard(weight)
        guard_optimizer_step(self._descent, (~updated).float())
        self._descent.step()
        self._descent.zero_grad(set_to_none=True)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the weights as they are now."""
        for name, weight in self._weights().items():
            self.averages[name].copy_(weight)

    def _weights(self) -> dict[str, Tensor]:
        """Weights by name; of a tied table that this process has twice, the first of its equal copies."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            weights.setdefault(name, plain(parameter.detach()))
        return weights
