"""Samples of a step on ranks and in micro-batches so that all take about as long.

Attention within documents costs the sum of the squared lengths of a pack's chunks: one document that fills a pack costs
many times as much as short ones that fill it. Only which rank computes a sample changes. Its number, what it is made of
and all hashes stay, and so do sums over the step, but for rounding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from pipeline.data.order.locate import RankSamples
from pipeline.data.order.permutation import IntArray


def rank_rows(mine: RankSamples, costs: IntArray | None) -> list[IntArray]:
    """Numbers in the step of the samples of each of a rank's micro-batches, ascending; what is missing is padding.

    Args:
        mine: Of the rank; its sizes stay.
        costs: [count] of each sample, whole numbers; None to leave the samples in their order.
    """
    if costs is None:
        return [np.arange(rows.start, rows.stop) for rows in mine.micro_batches]
    samples = _spread(np.arange(mine.count), costs, _sizes(mine))[mine.rank]
    micro_batches = _spread(samples, costs, [len(rows) for rows in mine.micro_batches])
    # Ranks compute their micro-batches side by side: the dearest of each at the same time.
    micro_batches.sort(key=lambda rows: (-len(rows), -int(costs[rows].sum())))
    return [np.sort(rows) for rows in micro_batches]


def _sizes(mine: RankSamples) -> list[int]:
    """Samples of each rank in a step."""
    pieces = np.arange(len(mine.micro_batches) * mine.ranks).reshape(-1, mine.ranks)
    sizes = np.clip(mine.count - pieces * mine.micro_batch_size, 0, mine.micro_batch_size)
    return [int(size) for size in sizes.sum(axis=0)]


def _spread(samples: IntArray, costs: IntArray, sizes: Sequence[int]) -> list[IntArray]:
    """Samples in bins of given sizes: the dearest first, each into the cheapest bin that has room; ties by number."""
    bins: list[list[int]] = [[] for _ in sizes]
    heap = [(0, number) for number, size in enumerate(sizes) if size]
    for sample in samples[np.argsort(-costs[samples], kind="stable")].tolist():
        cost, number = heapq.heappop(heap)
        bins[number].append(sample)
        if len(bins[number]) < sizes[number]:
            heapq.heappush(heap, (cost + int(costs[sample]), number))
    return [np.array(each, np.int64) for each in bins]
