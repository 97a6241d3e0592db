"""Dropout (Srivastava et al. 2014) whose masks are a function of what they fall on.

An element is dropped by the run's seed, the sample's number in the run, the place in the model, the position in the
sample and the channel. Every layout therefore drops the same elements, as do a resumed run and a layer that is computed
again; nothing is stored, and no state moves on.

A row of channels has two random words, and an element the first one with its channel's, scattered by lowbias32 (Wellons
2018) around the second. Two rows that share one word still differ.

Shapes: B batch, S positions of a process, D channels, P places in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.train.host.host_copy import to_device
from pipeline.train.model.random_words import WORD, mix, text_word

_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Of lowbias32, as int32."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of a micro-batch in training.

    Attributes:
        rate: Share of the elements that become 0; the others are divided by what is left.
        seed: Of the run.
        samples_B: Number of each sample in the run, [B] int64.
    """

    rate: float
    seed: int
    samples_B: Tensor


@dataclass(frozen=True)
class PlacedDropout:
    """Dropout of one forward pass at some places of the model.

    Attributes:
        rate: See `Dropout`.
        positions_S: Positions in the whole sample of the rows that this process has, [S] int64.
        words_2B: By name of the place, two words of each sample, [2, B] int64.
    """

    rate: float
    positions_S: Tensor
    words_2B: Mapping[str, Tensor]

    def within(self, module: str) -> PlacedDropout:
        """Places within a module, by their names there."""
        prefix = f"{module}."
        words = {name.removeprefix(prefix): each for name, each in self.words_2B.items() if name.startswith(prefix)}
        return PlacedDropout(self.rate, self.positions_S, words)


class DropoutPlaces:
    """Places of a model, or of a part of one, where elements are dropped.

    Args:
        names: Unique in the whole model; the masks follow from them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._keys_P2: Tensor | None = None
        self._keys_of: tuple[int, torch.device] | None = None

    def draw(self, dropout: Dropout, positions_S: Tensor) -> PlacedDropout:
        """The dropout of a forward pass for the rows at some positions."""
        samples_B = dropout.samples_B
        words_P2B = self._keys(dropout.seed, samples_B.device)[..., None]
        for half_B in (samples_B & WORD, (samples_B >> 32) & WORD):
            words_P2B = mix(words_P2B ^ half_B)
        return PlacedDropout(dropout.rate, positions_S, dict(zip(self._names, words_P2B.unbind(), strict=True)))

    def _keys(self, seed: int, device: torch.device) -> Tensor:
        """Two words of each place, [P, 2]; sent to the device once."""
        if self._keys_P2 is None or self._keys_of != (seed, device):
            words = [[text_word(f"dropout/{seed}/{name}/{half}") for half in (0, 1)] for name in self._names]
            self._keys_P2 = to_device(torch.tensor(words, dtype=torch.int64).view(-1, 2), device)
            self._keys_of = seed, device
        return self._keys_P2


def dropped(x_BSD: Tensor, place: str, dropout: PlacedDropout | None) -> Tensor:
    """Tensor `x` without the elements that are dropped at a place; `x` itself without dropout."""
    if dropout is None:
        return x_BSD
    keep_BSD = keep_mask(dropout.words_2B[place], dropout.positions_S, x_BSD.shape[-1], dropout.rate)
    return torch.where(keep_BSD, x_BSD * (1 / (1 - dropout.rate)), 0.0)


def keep_mask(words_2B: Tensor, positions_S: Tensor, channels: int, rate: float) -> Tensor:
    """True where an element stays, [B, S, D].

    Args:
        words_2B: Of a place, see `PlacedDropout`.
        positions_S: [S] int64.
        channels: D.
        rate: Share of the elements that do not stay.
    """
    rows_2BS = mix(words_2B[..., None] ^ mix(positions_S))
    columns_D = mix(torch.arange(channels, device=positions_S.device))
    # Products of int32 go around; a shift drags the sign along, which is cut off.
    first_BS1, second_BS1 = rows_2BS.to(torch.int32)[..., None].unbind()
    bits_BSD = first_BS1 ^ columns_D.to(torch.int32)
    bits_BSD = (bits_BSD ^ ((bits_BSD >> 16) & 0xFFFF)) * _FACTORS[0] ^ second_BS1
    bits_BSD = (bits_BSD ^ ((bits_BSD >> 15) & 0x1FFFF)) * _FACTORS[1]
    return bits_BSD >= min(round(rate * 2**32), 2**32 - 1) - 2**31
