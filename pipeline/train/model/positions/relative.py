"""Relative positions in buckets (Raffel et al. 2020): a bias of attention that layers of a side share.

Shapes: S queries, T keys, H heads; B rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.train.model.part_spec import RelativeSpec


def buckets_of(distance: Tensor, spec: RelativeSpec) -> Tensor:
    """Buckets of distances, the position of a key minus that of a query; int64 of the same shape.

    Half of the buckets of a direction are for one distance each, the others for ranges that grow up to `max_distance`.
    """
    count, first = spec.buckets, torch.zeros_like(distance)
    if spec.two_sided:
        count //= 2
        first = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = count // 2
    growth = torch.log(distance.float().clamp(min=1) / exact) / math.log(spec.max_distance / exact)
    ranged = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distance < exact, distance, ranged)


def relative_bias(table: Tensor, queries: Tensor, keys: int, spec: RelativeSpec) -> Tensor:
    """The bias of queries at some positions, [S] or [B, S], and keys from 0 on: [1 or B, H, S, T].

    Args:
        table: [buckets, H], of the heads that this process has.
        queries: Positions.
        keys: Number of keys.
        spec: See `RelativeSpec`.
    """
    distance = torch.arange(keys, device=queries.device) - queries[..., None]
    bias = table[buckets_of(distance, spec)].movedim(-1, -3)
    return bias if bias.ndim == 4 else bias[None]
