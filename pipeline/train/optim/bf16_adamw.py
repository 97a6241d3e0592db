"""AdamW (Loshchilov and Hutter 2019) whose moments are kept in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pipeline.train.optim.stochastic_rounding import Rounding
from pipeline.train.torch_compat.core import local_shard, plain

_AT_ONCE = 1 << 24
"""Elements whose moments are in fp32 at the same time."""


class StatesOptimizer(torch.optim.Optimizer):
    """An optimizer that has its states from the beginning, and keeps their format when they are loaded.

    Args:
        groups: As torch's optimizers take them.
        names: Of all parameters.
        states: Names of the tensors that it has of each, besides the number of its steps.
        dtype: Theirs.
    """

    found_inf: Tensor | None = None
    """fp32 scalar: if it is 1, the next step leaves all bits as they are. See `guard_optimizer_step`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        states: tuple[str, ...],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, {})
        self._names, self._states, self._dtype = names, states, dtype
        mine = {names[parameter]: parameter for parameter in self._parameters()}
        self._rounding = Rounding(mine, len(states)) if dtype == torch.bfloat16 else None
        for parameter in mine.values():
            device = local_shard(parameter).device
            self.state[parameter] = {"step": torch.zeros((), device=device)} | {
                state: torch.zeros_like(plain(parameter), dtype=dtype, requires_grad=False) for state in states
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Kept from torch, which casts each state of floating point to the type of its parameter, here fp32, and has
        # both copies in memory meanwhile.
        given = state_dict["state"]
        rest = {
            place: {name: value for name, value in values.items() if name not in self._states}
            for place, values in given.items()
        }
        super().load_state_dict(state_dict | {"state": rest})
        places = (place for group in state_dict["param_groups"] for place in group["params"])
        for place, parameter in zip(places, self._parameters(), strict=True):
            self.state[parameter] |= {
                state: given[place][state].to(parameter.device, self._dtype) for state in self._states
            }

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Parameters in the order of their groups; that of `state` may be another one."""
        for group in self.param_groups:
            yield from group["params"]

    def _begin(self) -> Tensor:
        """1 in a step that is withheld, else 0; the dice are thrown."""
        steps = [self.state[parameter]["step"] for parameter in self._parameters()]
        if self._rounding is not None:
            # Not one for all: where some began anew, layouts would differ in whose step that is.
            self._rounding.draw(torch.stack(steps))
        return torch.zeros_like(steps[0]) if self.found_inf is None else self.found_inf


class Bf16AdamW(StatesOptimizer):
    """The arithmetic of torch's fused AdamW in fp32, with moments that are rounded to bf16 by chance.

    Args:
        groups: With `lr` and `weight_decay`.
        names: Of all parameters.
        betas: Decay of the moments.
        eps: Added to the root of the second one.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, names, ("exp_avg", "exp_avg_sq"), torch.bfloat16)
        self._betas, self._eps = betas, eps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. There must be no closure."""
        assert closure is None
        withheld = self._begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, withheld)
                    self.state[parameter]["step"].add_(1 - withheld)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], withheld: Tensor) -> None:
        assert parameter.grad is not None and self._rounding is not None
        state, name = self.state[parameter], self._names[parameter]
        weights, gradients, *moments = (
            _rows(local_shard(each)) for each in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        for rows in pieces(weights):
            wide = [moment[rows].float() for moment in moments]
            adamw(
                [weights[rows]],
                [gradients[rows]],
                [wide[0]],
                [wide[1]],
                [],
                [state["step"].clone()],
                fused=True,
                found_inf=withheld,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self._eps,
                maximize=False,
            )
            # Of a step that was withheld they are as they were, which rounding does not change.
            for kind, (each, moment) in enumerate(zip(wide, moments, strict=True)):
                self._rounding.store(name, kind, each, moment[rows], rows if weights.ndim > 1 else slice(None))


def _rows(tensor: Tensor) -> Tensor:
    """A stack of matrices as one with the rows of all, in the same memory; others as they are."""
    return tensor if tensor.ndim <= 2 else tensor.view(prod(tensor.shape[:-1]), tensor.shape[-1])


def pieces(tensor: Tensor) -> Iterator[slice]:
    """Slices of rows of a matrix, or matrices of a stack, with about `_AT_ONCE` elements each; a vector at once."""
    if tensor.numel() == 0:
        return
    rows = len(tensor) if tensor.ndim == 1 else max(1, _AT_ONCE // tensor[0].numel())
    for start in range(0, len(tensor), rows):
        yield slice(start, start + rows)
