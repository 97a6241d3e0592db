"""Muon (Jordan et al. 2024): momentum whose matrices are orthogonalized before they are added to the weights.

Of each matrix there is one moment rather than the two of AdamW. A shard of a matrix cannot be orthogonalized by itself:
each process does that for some whole matrices, see `Owners`. What is sent is bf16, in which the iteration computes. Of
experts each matrix counts by itself; a process that has whole ones sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.config.train import MuonConfig
from pipeline.train.optim.bf16_adamw import StatesOptimizer, pieces
from pipeline.train.optim.muon_owners import Owners
from pipeline.train.torch_compat.core import local_shard

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration (Jordan et al. 2024): steep at 0, so that few steps take singular values close to 1."""
_SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns: singular values come to lie near 1, by Newton-Schulz.

    Args:
        matrix: [R, C], or several of them, [E, R, C], bf16; stays as it is.
        steps: Iterations.
    """
    if matrix.ndim == 3:
        # Each by itself: products of several at once round by their number, which a layout decides.
        return torch.stack([orthogonalize(each, steps) for each in matrix]) if len(matrix) else matrix
    first, third, fifth = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the square matrices below are the smaller ones then
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=third, alpha=fifth), x, beta=first)
    return x.T if tall else x


def rate_factor(shape: torch.Size, adjust: str) -> float:
    """Factor on the learning rate of a matrix, or of each in a stack, see `train.optimizer.muon.adjust_lr`."""
    rows, columns = shape[-2:]
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    # An orthogonal matrix has elements of RMS 1 / sqrt(max(rows, columns)), an update of AdamW about 0.2.
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(StatesOptimizer):
    """Muon for the matrices of this process's part of a stage.

    Args:
        groups: With `lr` and `weight_decay`; parameters are DTensors, matrices and stacks of them.
        names: Of all parameters.
        config: The `train.optimizer.muon:` section.
        dtype: Of the momentum, fp32 or bf16.
        group: All processes of the stage, see `group_of`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        config: MuonConfig,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(groups, names, ("momentum_buffer",), dtype)
        self._config = config
        self._owners: list[Owners] = []
        self._of_experts: dict[Tensor, Owners] = {}
        """Of stacks whose matrices are cut."""
        for these in self.param_groups:
            matrices, stacks = _by_kind(these)
            self._owners.append(Owners.of_matrices([cast(DTensor, each) for each in matrices], group))
            self._of_experts |= Owners.of_experts([cast(DTensor, each) for each in stacks], group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters, which must have gradients. There must be no closure."""
        assert closure is None
        withheld = self._begin()
        skip = withheld.bool()
        for group, owners in zip(self.param_groups, self._owners, strict=True):
            matrices, stacks = _by_kind(group)
            for places in owners.rounds():
                parameters = [matrices[place] for place in places]
                updates = [self._average(parameter, skip) for parameter in parameters]
                results = owners.compute(places, updates, self._orthogonalize)
                for parameter, update in zip(parameters, results, strict=True):
                    self._add(parameter, update, group, skip)
            for stack in stacks:
                if cut := self._of_experts.get(stack):
                    update = cut.compute_experts(cast(DTensor, stack), self._average(stack, skip), self._orthogonalize)
                    self._add(stack, update, group, skip)
                    continue
                for some in pieces(local_shard(stack)):
                    self._add(stack, self._orthogonalize(self._average(stack, skip, some)), group, skip, some)
            for parameter in group["params"]:
                self.state[parameter]["step"].add_(1 - withheld)

    def _orthogonalize(self, matrix: Tensor) -> Tensor:
        return orthogonalize(matrix, self._config.steps)

    def _average(self, parameter: nn.Parameter, skip: Tensor, some: slice = slice(None)) -> Tensor:
        """Take the gradient into the momentum, unless the step is withheld; returns what is to be orthogonalized, bf16.

        Args:
            parameter: A matrix, or a stack.
            skip: Whether the step is withheld.
            some: Which of this process's matrices, if it is a stack.
        """
        assert parameter.grad is not None
        gradient, kept = local_shard(parameter.grad)[some], local_shard(self.state[parameter]["momentum_buffer"])[some]
        old, momentum = kept.float(), self._config.momentum
        new = old.lerp(gradient, 1 - momentum)
        update = gradient.lerp(new, momentum) if self._config.nesterov else new
        stored = torch.where(skip, old, new)
        if self._rounding is None:
            kept.copy_(stored)
        else:
            rows = some if some == slice(None) else slice(some.start * kept.shape[1], some.stop * kept.shape[1])
            self._rounding.store(self._names[parameter], 0, stored, kept, rows)
        return update.bfloat16()

    def _add(
        self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any], skip: Tensor, some: slice = slice(None)
    ) -> None:
        weights, lr = local_shard(parameter)[some], group["lr"]
        factor = rate_factor(parameter.shape, self._config.adjust_lr)
        new = weights.mul(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * factor)
        weights.copy_(torch.where(skip, weights, new))


def _by_kind(group: dict[str, Any]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and stacks of a group."""
    parameters = group["params"]
    return [each for each in parameters if each.ndim == 2], [each for each in parameters if each.ndim == 3]
