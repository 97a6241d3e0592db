"""Sequences that several processes have a shard of: their cut as mixers see it, and its pieces.

A recurrence runs each piece as a sequence of its own, from an empty state. What a piece makes of a state that enters it
is linear, so that the state that truly enters follows from a few numbers of each piece before it, whatever the length:
only they are sent.

Shapes: B batch, S positions, T keys, H query heads, K key and value heads, E head size, V size of a value head; with a
cut L positions of a share, P pieces of a process, N of all and C positions of one; G numbers of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeline.train.model.kernels.recurrence.chunks import Chunks

AttentionFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Attention itself: q [B, C, H, E], k, v [B, T, K, V] and which piece of the queries this is -> [B, C, H, V]."""


class SequenceCut(Protocol):
    """Cut of a sequence over processes that have a shard of it each and attend to all of it."""

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This process's shard of x, whose dimension `dim` is positions."""

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """Positions, from and to, of each piece that `attend` cuts the queries into; the length is the whole's."""

    def own_pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """Positions, from and to, of each piece of the whole that this process has, all of one length."""

    def gather_pieces(self, x_P: Tensor) -> Tensor:
        """Values of all pieces in their order, [N, ...], from the values of this process's pieces [P, ...].

        Its gradient is summed over the processes, each of which gets that of its pieces.
        """

    def own_heads(self, x_H: Tensor) -> Tensor:
        """Elements of the query heads that `attend` computes on this process, of one for each query head."""

    def attend(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKV: Tensor,
        core: AttentionFn,
        keys: Sequence[int],
    ) -> Tensor:
        """Attention of this process's queries to the whole sequence, [B, L, H, V]; every process calls this.

        Args:
            q_BLHE: Queries.
            k_BLKE: Keys.
            v_BLKV: Values.
            core: Attention itself.
            keys: Keys that each piece needs, see `AttentionMask`.
        """

    def attend_latent(
        self,
        q_BLHE: Tensor,
        g_BLG: Tensor,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]],
        core: AttentionFn,
        keys: Sequence[int],
    ) -> Tensor:
        """Attention as `attend`, to keys and values made of a latent; the latent is sent where that is possible.

        Args:
            q_BLHE: Queries.
            g_BLG: Latents.
            expand: Makes keys [B, T, H, E] and values [B, T, H, V] of latents [B, T, G].
            core: See `attend`.
            keys: See `attend`.
        """


@dataclass(frozen=True)
class SequencePieces:
    """Pieces of every sequence that this process has, one after the other in the batch; without a cut the whole."""

    chunks: Chunks
    """Of the pieces."""
    cut: SequenceCut | None = None
    numbers: tuple[int, ...] = (0,)
    """Place of each among all pieces of a sequence."""

    @classmethod
    def of(cls, length: int, bounds_BS: Tensor | None, cut: SequenceCut | None) -> SequencePieces:
        """Pieces of sequences of a length with these bounds."""
        if cut is None:
            return cls(Chunks.of(length, bounds_BS))
        pieces = cut.own_pieces(length)
        size = pieces[0][1] - pieces[0][0]
        bounds = None if bounds_BS is None else torch.cat([bounds_BS[:, begin:end] - begin for begin, end in pieces])
        return cls(Chunks.of(size, bounds), cut, tuple(begin // size for begin, _ in pieces))

    def split(self, x_BS: Tensor) -> Tensor:
        """[B, P * C, ...] -> [P * B, C, ...]."""
        return x_BS if len(self.numbers) == 1 else torch.cat(x_BS.chunk(len(self.numbers), dim=1))

    def join(self, x_BC: Tensor) -> Tensor:
        """The reverse of `split`."""
        return x_BC if len(self.numbers) == 1 else torch.cat(x_BC.chunk(len(self.numbers)), dim=1)

    def before(self, x_BCD: Tensor, count: int) -> Tensor | None:
        """The `count` positions ahead of each piece; None: there are none ahead of any."""
        if self.cut is None:
            return None
        assert x_BCD.shape[1] >= count, f"pieces of {x_BCD.shape[1]} positions, and {count} are looked back at"
        ends = self.cut.gather_pieces(self._by_piece(x_BCD[:, -count:]))
        return self._own(torch.cat((torch.zeros_like(ends[:1]), ends)))

    def entering(self, sent_B: Tensor, added_B: Tensor, follow: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The state that enters each piece, [P * B, ...].

        Args:
            sent_B: What the others need to know of a piece, [P * B, ...].
            added_B: State that a piece makes of an empty one, [P * B, ...].
            follow: Makes the state after a piece of what is known of it and the state that enters.
        """
        assert self.cut is not None
        entering = [torch.zeros_like(self._by_piece(added_B)[0])]
        for each in self.cut.gather_pieces(self._by_piece(sent_B)).unbind()[:-1]:
            entering.append(follow(each, entering[-1]))
        return self._own(torch.stack(entering))

    def _own(self, x_NB: Tensor) -> Tensor:
        """Rows of this process's pieces, [P * B, ...], out of the rows of all pieces [N, B, ...].

        It is taken out of all, as every process must be in the backward pass of what was collected: also the one whose
        piece is the first, and that needs nothing of the others.
        """
        return torch.cat([x_NB[number] for number in self.numbers])

    def _by_piece(self, x_B: Tensor) -> Tensor:
        return torch.unflatten(x_B, 0, (len(self.numbers), -1))
