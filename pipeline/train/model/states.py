"""States of the mixers of a decoder that continues texts: a row for each text.

Rows have pasts of unequal lengths, come and go. Those that are there are always the first ones, so that a forward pass
reads the memory as it lies and an idle row costs nothing.

Shapes: B rows, S new positions, T positions, K key and value heads, E head size, V size of a value head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

_FIRST = 64
"""Positions that memory is taken for at first."""


@dataclass(frozen=True)
class Places:
    """Places of the new positions of a forward pass."""

    past: int | None
    """Positions that each row has so far, where all have equally many; otherwise `positions_BS` says it."""
    positions_BS: Tensor
    """Positions of the new tokens; [1, S] where all rows have the same."""
    keys: int
    """Positions of the longest row, with the new ones."""


class MixerState(Protocol):
    """State of one layer."""

    def join(self, other: Self, lengths: Sequence[int], more: Sequence[int]) -> None:
        """Rows with `more` positions of another state come after the rows of this one, which have `lengths`."""

    def move(self, source: int, target: int, length: int) -> None:
        """Row `source`, which has `length` positions, takes the place of row `target`."""


class NoState:
    """State of a layer without a mixer."""

    def join(self, other: NoState, lengths: Sequence[int], more: Sequence[int]) -> None:
        """See `MixerState`."""

    def move(self, source: int, target: int, length: int) -> None:
        """See `MixerState`."""


class KVCache:
    """Keys and values, [rows, T, K, E] and [rows, T, K, V], in memory that grows by doubling.

    Or two other tensors [rows, T, ...] that they are made of.
    """

    def __init__(self, max_length: int | None) -> None:
        self._max_length = max_length
        self._memory: tuple[Tensor, Tensor] | None = None

    def append(self, keys_BSKE: Tensor, values_BSKV: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Adds new positions to all rows; returns all positions, some of which are not of every row."""
        rows, queries = keys_BSKE.shape[:2]
        memory = self._reserve(rows, places.keys, (keys_BSKE, values_BSKV))
        if places.past is not None:
            for held, new in zip(memory, (keys_BSKE, values_BSKV), strict=True):
                held[:rows, places.past : places.past + queries] = new
        else:
            row_B1 = torch.arange(rows, device=keys_BSKE.device)[:, None]
            for held, new in zip(memory, (keys_BSKE, values_BSKV), strict=True):
                held[row_B1, places.positions_BS] = new
        return memory[0][:rows, : places.keys], memory[1][:rows, : places.keys]

    def join(self, other: KVCache, lengths: Sequence[int], more: Sequence[int]) -> None:
        """See `MixerState`."""
        assert other._memory is not None
        first, longest = len(lengths), max(more)
        memory = self._reserve(first + len(more), longest, other._memory)
        for held, new in zip(memory, other._memory, strict=True):
            held[first : first + len(more), :longest] = new[: len(more), :longest]

    def move(self, source: int, target: int, length: int) -> None:
        """See `MixerState`."""
        assert self._memory is not None
        for held in self._memory:
            held[target, :length] = held[source, :length]

    def _reserve(self, rows: int, positions: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Memory for at least `rows` rows and `positions` positions, of type and heads of `like`."""
        had_rows, had = (0, 0) if self._memory is None else self._memory[0].shape[:2]
        if rows <= had_rows and positions <= had:
            assert self._memory is not None
            return self._memory
        size = had
        if positions > had:
            size = max(positions, min(max(2 * had, _FIRST), self._max_length or 2 * positions))
        more_rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
        grown = []
        for index, new in enumerate(like):
            # Zeros: what no query may see has weight 0, but 0 times what happens to be in memory can be NaN.
            memory = new.new_zeros(more_rows, size, *new.shape[2:])
            if self._memory is not None:
                memory[:had_rows, :had] = self._memory[index]
            grown.append(memory)
        self._memory = (grown[0], grown[1])
        return self._memory


class EncoderCache(KVCache):
    """Keys and values of an encoder's positions, all of which come at once."""

    def hold(self, keys_BTKE: Tensor, values_BTKV: Tensor) -> None:
        """Set the keys and values of all rows; what is padding after a row is never seen."""
        self._memory = (keys_BTKE, values_BTKV)

    def held(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        """The first rows, and positions."""
        assert self._memory is not None, "the encoder comes first"
        keys, values = self._memory
        return keys[:rows, :positions], values[:rows, :positions]


class States:
    """The states of all layers, and how long each row is.

    Args:
        rows: Rows at first, of no positions.
        layers: A state for each layer.
        cross: Of an encoder-decoder, a cache of the encoder for each layer that attends to it, by index.
    """

    def __init__(
        self, rows: int, layers: Sequence[MixerState], cross: Mapping[int, EncoderCache] | None = None
    ) -> None:
        self.lengths = [0] * rows
        """Positions held, by row. The host keeps them: a device would have to be waited for."""
        self.layers = layers
        self.cross = cross or {}
        self.encoder_lengths = [0] * rows
        """Positions of the encoder, by row."""

    def places(self, queries: int, device: torch.device) -> Places:
        """Places of `queries` new positions of every row."""
        longest = max(self.lengths)
        if longest == min(self.lengths):
            positions = torch.arange(longest, longest + queries, device=device)[None]
            return Places(longest, positions, longest + queries)
        past_B1 = torch.tensor(self.lengths, device=device)[:, None]
        return Places(None, past_B1 + torch.arange(queries, device=device), longest + queries)

    def advance(self, counts: Sequence[int]) -> None:
        """Add to the length of each row."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def join(self, other: States) -> None:
        """Rows of other states of the same model come after the own ones."""
        for state, more in zip(self.layers, other.layers, strict=True):
            state.join(more, self.lengths, other.lengths)
        for index, cache in self.cross.items():
            cache.join(other.cross[index], self.encoder_lengths, other.encoder_lengths)
        self.lengths += other.lengths
        self.encoder_lengths += other.encoder_lengths

    def remove(self, row: int) -> None:
        """The last row takes the place of this one."""
        last = len(self.lengths) - 1
        if row != last:
            for state in self.layers:
                state.move(last, row, self.lengths[last])
            for cache in self.cross.values():
                cache.move(last, row, self.encoder_lengths[last])
            self.lengths[row] = self.lengths[last]
            self.encoder_lengths[row] = self.encoder_lengths[last]
        self.lengths.pop()
        self.encoder_lengths.pop()
