"""Sides of an encoder-decoder's sequence: the encoder's positions come first, the decoder's after them.

Both are one residual stream, so that a pipeline passes one tensor wherever it is cut.

Shapes: B batch, S positions of the sequence, of which E are the encoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.train.model.context import Context
from pipeline.train.model.kernels.attention_mask import Documents
from pipeline.train.model.part_spec import Side


@dataclass(frozen=True)
class SideSpan:
    """Positions of a sequence whose layers attend to each other."""

    side: Side | None
    """None: all of the sequence, of a model without sides."""
    first: int
    """First position in the sequence."""
    length: int
    documents: Documents | None
    """Documents of this side, counted from its first position."""

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the tokens in their document or in this side, [1 or B, length]."""
        positions = torch.arange(self.length, device=device)[None]
        return positions if self.documents is None else positions - self.documents.bounds_BS


def documents_of(context: Context) -> Documents | None:
    """Documents of a sequence without sides."""
    return None if context.bounds_BS is None else Documents(context.bounds_BS, context.starts, context.prefix_BS)


def both_sides(context: Context, length: int) -> list[SideSpan]:
    """The encoder and the decoder of a sequence of a length."""
    encoder, bounds_BS, starts = context.encoder, context.bounds_BS, context.starts
    found: list[SideSpan] = []
    for side, first, end in _cuts(encoder, length):
        documents = None
        if bounds_BS is not None:
            own = None if starts is None else partial(_own_starts, starts, length, first, end)
            documents = Documents(bounds_BS[:, first:end] - first, own)
        found.append(SideSpan(side, first, end - first, documents))
    return found


def _own_starts(starts: Tensor, length: int, first: int, end: int) -> Tensor:
    """Flat positions of those documents that begin within some positions of each row, counted there."""
    row, place = starts // length, starts % length
    within = (place >= first) & (place < end)
    return row[within] * (end - first) + place[within] - first


def _cuts(encoder: int, length: int) -> list[tuple[Side, int, int]]:
    return [("encoder", 0, encoder), ("decoder", encoder, length)]


def padded_documents(counts: Sequence[int], length: int, device: torch.device) -> Documents:
    """Documents of rows of some tokens each, with padding after them that is a document of its own."""
    counts_B1 = torch.tensor(counts, device=device)[:, None]
    positions_S = torch.arange(length, device=device)
    bounds_BS = torch.where(positions_S < counts_B1, 0, counts_B1)
    starts = [
        row * length + place
        for row, count in enumerate(counts)
        for place in dict.fromkeys((0, count))
        if place < length
    ]
    return Documents(bounds_BS, torch.tensor(starts))


def order_by_shard(encoder: int, length: int, shards: int, device: torch.device) -> Tensor:
    """Positions [S] in an order of which equal pieces have a piece of each side, as many as there are shards."""
    assert encoder % shards == 0 and length % shards == 0, (encoder, length, shards)
    positions_S = torch.arange(length, device=device)
    sides = (positions_S[:encoder].view(shards, -1), positions_S[encoder:].view(shards, -1))
    return torch.cat(sides, dim=1).flatten()
