"""Spikes of the loss or of the gradient norm, found on the device before the update."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.common.hashing import value_hash
from pipeline.config.train import FaultsConfig
from pipeline.data.order.segments import Segment

_LEAST_DEVIATION = 1e-3
"""A standard deviation counts as this share of the mean at least: of values that hardly differ, none is a spike."""


class SpikeVerdict(NamedTuple):
    """The verdict on a step before its update, on the device."""

    spike: Tensor
    """Bool scalar: the loss or the norm lies too far above those before it."""
    zscores: Tensor
    """[2] fp64: standard deviations of loss and norm above the mean of the window; NaN while it has too few steps."""


class SpikeGuard:
    """Compares each step with a window of those before it. All ranks have the same numbers and find the same.

    The window has the loss and the gradient norm of the newest steps that were finite and no spikes. A step is compared
    only with steps on the same kind of data (`compare_within`): another blend begins with an empty window.
    """

    def __init__(self, config: FaultsConfig, device: torch.device) -> None:
        self._zscore = config.spike_zscore
        self._least = config.spike_window // 2
        self._kind: str | None = None
        # Loss and norm, the oldest first and always at the same place, so that a resumed run adds in the same order;
        # NaN on the left where there is nothing yet.
        self._window_2W = torch.full((2, config.spike_window), math.nan, dtype=torch.float64, device=device)

    def compare_within(self, kind: str) -> None:
        """Say of what kind the data of the coming steps are; the steps of another kind are forgotten."""
        if self._kind is not None and kind != self._kind:
            self._forget()
        self._kind = kind

    def judge(self, loss: Tensor, norm: Tensor, finite: Tensor) -> SpikeVerdict:
        """The verdict on this step; if it is not a spike, and finite, it is added to the window.

        Args:
            loss: fp64 scalar, nats a target.
            norm: fp64 scalar, global gradient norm before clipping.
            finite: bool scalar.
        """
        values_2 = torch.stack((loss, norm)).double()
        empty_2W = self._window_2W.isnan()
        count = (~empty_2W[0]).sum()
        enough = count >= self._least
        # Filled and not chosen by torch.where, which copies a number of the host to a GPU and waits for that.
        mean_2 = self._window_2W.masked_fill(empty_2W, 0.0).sum(dim=1) / count
        off_2W = (self._window_2W - mean_2[:, None]).masked_fill(empty_2W, 0.0)
        deviation_2 = (off_2W.square().sum(dim=1) / (count - 1)).sqrt()
        deviation_2 = deviation_2.maximum(_LEAST_DEVIATION * mean_2.abs()).clamp(min=torch.finfo(torch.float64).tiny)
        zscores_2 = ((values_2 - mean_2) / deviation_2).masked_fill(~enough, math.nan)
        spike = finite & enough & (zscores_2 > self._zscore).any()
        longer_2W = torch.cat((self._window_2W[:, 1:], values_2[:, None]), dim=1)
        self._window_2W = torch.where(finite & ~spike, longer_2W, self._window_2W)
        return SpikeVerdict(spike, zscores_2)

    def state(self) -> dict[str, Any]:
        """For the checkpoint; reads the device."""
        losses, norms = self._window_2W.tolist()
        first = sum(map(math.isnan, losses))
        return {"losses": losses[first:], "norms": norms[first:], "kind": self._kind}

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `state`, of a window of any size: its newest steps count. {} is an empty window."""
        self._forget()
        self._kind = state.get("kind")
        values_2N = torch.tensor([state.get("losses", []), state.get("norms", [])], dtype=torch.float64)
        count = min(values_2N.shape[1], self._window_2W.shape[1])
        if count:
            self._window_2W[:, -count:] = values_2N[:, -count:]

    def _forget(self) -> None:
        self._window_2W = torch.full_like(self._window_2W, math.nan)


def kind_of(segment: Segment) -> str:
    """The kind of data of a segment, for `SpikeGuard.compare_within`: its windows' length, its sources and shares."""
    sources = {name: [source.weight, source.documents] for name, source in segment.sources.items()}
    return value_hash([segment.sequence_length, sources])
