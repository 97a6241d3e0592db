"""Kernels of recurrences that a model is built with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RecurrentKernels:
    """Functions that compute what layers with a recurrence have besides matrix products."""

    ssd: Callable[..., tuple[Tensor, Tensor]]
    """See `pipeline.train.model.kernels.recurrence.ssd.ssd`."""
    delta_rule: Callable[..., tuple[Tensor, Tensor]]
    """See `pipeline.train.model.kernels.recurrence.delta_rule.delta_rule`."""
    causal_conv: Callable[..., Tensor]
    """See `pipeline.train.model.kernels.recurrence.causal_conv.causal_conv`."""


def _ssd(*args: Any) -> tuple[Tensor, Tensor]:
    from pipeline.train.model.kernels.recurrence.ssd import ssd

    return ssd(*args)


def _delta_rule(*args: Any) -> tuple[Tensor, Tensor]:
    from pipeline.train.model.kernels.recurrence.delta_rule import delta_rule

    return delta_rule(*args)


def _causal_conv(*args: Any) -> Tensor:
    from pipeline.train.model.kernels.recurrence.causal_conv import causal_conv

    return causal_conv(*args)


PLAIN = RecurrentKernels(_ssd, _delta_rule, _causal_conv)
"""Kernels in plain PyTorch, for all devices."""
