"""Samples of a step on ranks, by what they cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.order.balance import rank_rows
from pipeline.data.order.locate import RankSamples


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7), st.integers(0, 100))
def test_every_sample_is_somewhere_once(batch, micro, ranks, seed):
    """Ranks and micro-batches keep their sizes; without costs, samples keep their order."""
    costs = np.random.default_rng(seed).integers(0, 1000, batch)
    found = []
    for rank in range(ranks):
        mine = RankSamples(batch, micro, rank, ranks)
        plain, balanced = rank_rows(mine, None), rank_rows(mine, costs)
        assert [rows.tolist() for rows in plain] == [list(rows) for rows in mine.micro_batches]
        assert [len(rows) for rows in balanced] == [len(rows) for rows in plain]
        assert all((np.diff(rows) > 0).all() for rows in balanced)
        sums = [(-len(rows), -costs[rows].sum()) for rows in balanced]
        assert sums == sorted(sums)
        found += [sample for rows in balanced for sample in rows.tolist()]
    assert sorted(found) == list(range(batch))


@pytest.mark.parametrize("costs", [[9, 1, 1, 1, 1, 1, 1, 3], [5] * 8, [1, 2, 4, 8, 16, 32, 64, 128]])
def test_the_rule(costs):
    """The dearest first, to the cheapest rank with room; ties by number and by rank."""
    got = [rank_rows(RankSamples(8, 4, rank, 2), np.array(costs))[0].tolist() for rank in range(2)]
    sums, rows = [0, 0], [[], []]
    for sample in sorted(range(8), key=lambda sample: (-costs[sample], sample)):
        rank = min((rank for rank in range(2) if len(rows[rank]) < 4), key=lambda rank: (sums[rank], rank))
        rows[rank].append(sample)
        sums[rank] += costs[sample]
    assert got == [sorted(each) for each in rows]
