"""Stochastic rounding to bf16, the same on every layout: up or down by chance, so that the mean is the fp32 value.

bf16 keeps 8 bits. A moment with decay beta changes by a share of about 1 - beta a step; where that is below half of
the last bit, rounding to the nearest loses every change. Chance loses none on average (Gupta et al. 2015).

The chance is a function of the parameter's name, its step, and row and column in the whole: a rank draws what belongs
to its own shard, and a run that is resumed draws what it would have drawn. Every row and every column has a random
word; an element has the exclusive or of the two, scattered by a product: without that, what is rounded up would be a
matrix of low rank. Of a stack of matrices the rows are counted through, those of one matrix after those of the one
before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.train.model.init import local_range
from pipeline.train.model.random_words import WORD, mix, text_word

_HALF = 0xFFFF
"""The bits that bf16 does not have of fp32."""
_FACTORS = (0x2C1B3C6D, 0x297A2D39)
"""Factors of 32-bit words, by kind. Odd; products go around, as they do on CPU and GPU."""
_STRIDE = 0x9E3779B9
"""Odd, so that steps have words of their own for 2**32 steps."""


class Rounding:
    """Rounds what belongs to parameters, of which this process may have shards.

    Args:
        parameters: By name; vectors, matrices and stacks of matrices, plain or DTensors.
        kinds: Tensors of each parameter that are rounded in a step, at most 2.
    """

    def __init__(self, parameters: Mapping[str, Tensor], kinds: int) -> None:
        assert kinds in (1, 2)
        self._kinds = kinds
        places = {name: _places(parameter) for name, parameter in parameters.items()}
        self._names = list(places)
        self._sizes = [len(indices) for name in places for indices in places[name]]
        devices = {parameter.device for parameter in parameters.values()}
        (device,) = devices
        seeds = [
            text_word(f"{name}/{place}") + indices for name in places for place, indices in enumerate(places[name])
        ]
        self._seeds = mix(torch.cat(seeds) & WORD)
        counts = torch.tensor([sum(map(len, places[name])) for name in places], device=device)
        self._whose = torch.arange(len(places), device=device).repeat_interleave(counts, output_size=sum(self._sizes))
        """Place of the parameter of each seed."""
        self._words: dict[str, tuple[Tensor, Tensor]] = {}

    def draw(self, steps: Tensor) -> None:
        """Throw the dice of a step.

        Args:
            steps: [parameters], how many each has had, on their device.
        """
        turn = mix((steps.long() * _STRIDE) & WORD)[self._whose]
        words = torch.split(mix(self._seeds ^ turn).int(), self._sizes)
        self._words = dict(zip(self._names, zip(words[::2], words[1::2], strict=True), strict=True))

    def store(self, name: str, kind: int, value: Tensor, into: Tensor, rows: slice = slice(None)) -> None:
        """Round `value` into a bf16 tensor, with the dice of `draw`. What bf16 can hold stays as it is.

        Args:
            name: Of the parameter.
            kind: Which of its tensors, from 0.
            value: fp32, of the local shard; lost afterwards.
            into: As large.
            rows: Those of the local shard that are given, of a stack counted through; a vector has one.
        """
        assert 0 <= kind < self._kinds and value.dtype == torch.float32 and into.dtype == torch.bfloat16
        across, along = self._words[name]
        dice = across[rows][:, None] ^ along[None, :]
        dice.mul_(_FACTORS[kind]).bitwise_right_shift_(16).bitwise_and_(_HALF)
        # The bits below those of bf16 carry over with the chance that they are of the next number.
        bits = value.view(torch.int32).add_(dice.view(value.shape)).bitwise_and_(~_HALF)
        into.copy_(bits.view(torch.float32))


def _places(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the whole that are here, int64; a vector is one row."""
    *leading, columns = (
        torch.arange(indices.start, indices.start + len(indices), device=parameter.device)
        for indices in (local_range(parameter, dim) for dim in range(parameter.ndim))
    )
    rows = columns.new_zeros(1)
    for dim, indices in enumerate(leading):
        rows = (rows[:, None] * parameter.shape[dim] + indices).flatten()
    return rows, columns
