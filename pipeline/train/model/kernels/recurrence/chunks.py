"""Chunks of a sequence that a recurrence is computed by, and what documents hide within and between them.

A recurrence in chunks multiplies matrices within a chunk and takes one state from chunk to chunk. A state of one
document must not reach the next: everything that it would do there is hidden by masks, so that a document's bits do not
depend on what is before it.

Shapes: B sequences, S positions, n chunks, Q positions of one; several leading dimensions where they are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.mixers.recurrent_spec import CHUNK

LEAST = -60.0
"""Logarithm of a decay, at least: 1e-26 is nothing beside a sum in fp32, and far less is computed slowly on a CPU."""


def share(logarithm: Tensor, seen: Tensor | None = None) -> Tensor:
    """A decay, or 0."""
    # Differences between documents are of either sign, and hidden.
    decay = logarithm.clamp(LEAST, 0).exp_()
    return decay if seen is None else decay.mul_(seen)


@dataclass(frozen=True)
class Chunks:
    """Chunks of sequences of one length.

    A position is in a document that begins in the sequence, or in one that began before it and whose state enters. The
    last chunk is filled up with positions that do nothing, see `cut`.
    """

    length: int
    """Positions of a sequence."""
    bounds_BS: Tensor | None = None
    """First position of the document of every position, counted from the sequence's first; below 0 where the document
    began before. None: one document, which did."""
    same_BnQQ: Tensor | None = None
    """With bounds: position j (the last dimension) is not after i and in its document. None: see `causal`."""
    enters_BnQ: Tensor | None = None
    """With bounds: the document of a position began before its chunk, whose entering state it reads."""
    leaves_BnQ: Tensor | None = None
    """With bounds: a position is in the document of its chunk's last one, whose state leaves."""
    passes_Bn: Tensor | None = None
    """With bounds: the state that enters a chunk also leaves it."""

    @classmethod
    def of(cls, length: int, bounds_BS: Tensor | None = None) -> Chunks:
        """Chunks of sequences with these bounds."""
        if bounds_BS is None:
            return cls(length)
        padding = -length % CHUNK
        # What fills up the last chunk continues its document.
        of_all_BS = F.pad(bounds_BS, (0, padding), mode="replicate") if padding else bounds_BS
        starts_n1 = torch.arange(0, length, CHUNK, device=bounds_BS.device)[:, None]
        bounds_BnQ = torch.unflatten(of_all_BS, 1, (-1, CHUNK)) - starts_n1
        place_Q = torch.arange(CHUNK, device=bounds_BS.device)
        last_Bn1 = bounds_BnQ[..., -1:]
        same_BnQQ = (place_Q <= place_Q[:, None]) & (place_Q >= bounds_BnQ[..., None])
        return cls(length, bounds_BS, same_BnQQ, bounds_BnQ < 0, place_Q >= last_Bn1, last_Bn1[..., 0] < 0)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.length // CHUNK)

    @staticmethod
    def causal(device: torch.device) -> Tensor:
        """[Q, Q]: what `same_BnQQ` is of one document."""
        return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril()

    def cut(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] -> [B, n, Q, ...], filled up with zeros."""
        padding = -self.length % CHUNK
        if padding:
            x_BS = F.pad(x_BS, (0, 0) * (x_BS.ndim - 2) + (0, padding))
        return torch.unflatten(x_BS, 1, (-1, CHUNK))

    def join(self, x_BnQ: Tensor) -> Tensor:
        """The reverse of `cut`."""
        return x_BnQ.flatten(1, 2)[:, : self.length]
