import heapq
from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.blend import UNIT, Order, integer_weights, keyed_offset
from pipeline.errors import UserError

relaxed = settings(deadline=None, max_examples=50)

names_of_sources = st.lists(st.text("abcxyz019._-", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)
plain_weights = st.one_of(st.integers(1, 10**6), st.floats(1e-3, 1e3), st.sampled_from([1, 1.0, 0.5, 2]))


@st.composite
def blends(draw, capped=False):
    """names, integer weights, offsets, caps"""
    names = draw(names_of_sources)
    weights = integer_weights({name: draw(plain_weights) for name in names})
    # Offsets at the ends and far above a unit, as a carried one may be; and many equal ones, for ties.
    offset = st.one_of(st.integers(0, UNIT - 1), st.sampled_from([0, 1, UNIT // 2, UNIT - 1]), st.integers(0, 3 * UNIT))
    caps = [draw(st.one_of(st.none(), st.integers(0, 40))) if capped else None for _ in names]
    return names, [weights[name] for name in names], [draw(offset) for _ in names], caps


def enumerated(names, weights, offsets, caps, count):
    """The definition: a heap of exact due times, one sample after the other. Ends early when all are exhausted."""
    heap = [
        (Fraction(v, w), name, k, 0)
        for k, (name, w, v, cap) in enumerate(zip(names, weights, offsets, caps, strict=True))
        if cap is None or cap > 0
    ]
    heapq.heapify(heap)
    result = []
    while heap and len(result) < count:
        _, name, k, m = heapq.heappop(heap)
        result.append((k, m))
        if m + 1 < (inf if caps[k] is None else caps[k]):
            heapq.heappush(heap, (Fraction((m + 1) * UNIT + offsets[k], weights[k]), name, k, m + 1))
    return result


def pairs(order, start, count):
    source, draw = order.at(start, count)
    assert source.dtype == draw.dtype == np.int64
    return list(zip(source.tolist(), draw.tolist(), strict=True))


# Weights


@relaxed
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), plain_weights, min_size=1, max_size=12), st.randoms())
def test_integer_weights_are_nearest_and_sum_to_the_unit(weights, random):
    integers = integer_weights(weights)
    assert sum(integers.values()) == UNIT
    total = sum(Fraction(str(weight)) for weight in weights.values())
    for name, weight in weights.items():
        assert abs(integers[name] - Fraction(str(weight)) * UNIT / total) < 1
    shuffled = list(weights)
    random.shuffle(shuffled)
    assert integer_weights({name: weights[name] for name in shuffled}) == integers


def test_decimal_weights_mean_what_they_say():
    assert integer_weights({"a": 0.1, "b": 0.3}) == integer_weights({"a": 1, "b": 3}) == {"a": 2**30, "b": 3 * 2**30}
    assert integer_weights({"a": 0.1, "b": 0.2, "c": 0.7}) == integer_weights({"a": 10, "b": 20, "c": 70})
    # 2**32 = 3 * 1431655765 + 1: the name that sorts first has the rest.
    assert integer_weights({"z": 1, "y": 1, "x": 1}) == {"x": 1431655766, "y": 1431655765, "z": 1431655765}


def test_big_ratios():
    assert integer_weights({"tiny": 1, "huge": 10**6}) == {"tiny": 4295, "huge": UNIT - 4295}
    with pytest.raises(UserError, match="source 'tiny' has weight 1 of 1e\\+10"):
        integer_weights({"tiny": 1, "huge": 10**10 - 1})
    with pytest.raises(UserError, match="positive"):
        integer_weights({"a": 0.0})


def test_offsets_are_keyed_by_seed_and_name():
    offsets = {(seed, name): keyed_offset(seed, name) for seed in range(20) for name in ("a", "b", "c")}
    assert len(set(offsets.values())) == 60
    assert all(0 <= offset < UNIT for offset in offsets.values())
    assert max(offsets.values()) > UNIT * 0.8 and min(offsets.values()) < UNIT * 0.2


# Order


@relaxed
@given(blend=blends(), start=st.integers(0, 400), count=st.integers(0, 300))
def test_equal_to_the_enumeration(blend, start, count):
    order = Order(*blend)
    assert pairs(order, start, count) == enumerated(*blend, start + count)[start:]


@relaxed
@given(blend=blends(capped=True), start=st.integers(0, 200), count=st.integers(1, 100))
def test_equal_to_the_enumeration_with_exhausted_sources(blend, start, count):
    caps = blend[3]
    order = Order(*blend)
    expected = enumerated(*blend, start + count)
    if None not in caps and start + count > sum(caps):
        with pytest.raises(UserError, match=f"exhausted at sample {sum(caps):,} "):
            order.at(start, count)
    else:
        assert pairs(order, start, count) == expected[start:]
        for position in (start, start + count):
            counts = [0] * len(caps)
            for k, _ in expected[:position]:
                counts[k] += 1
            assert order.counts(position) == counts


def test_the_last_sample_of_exhausted_sources_is_reached():
    order = Order(["a", "b"], [UNIT - 1, 1], [0, 5], [3, 4])
    assert pairs(order, 0, 7) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert order.counts(7) == [3, 4]
    with pytest.raises(UserError):
        order.at(7, 1)


@relaxed
@given(blend=blends(), start=st.integers(0, 10**15), cuts=st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_random_access_equals_iteration(blend, start, cuts):
    order = Order(*blend)
    whole = pairs(order, start, sum(cuts))
    position, pieces = start, []
    for count in cuts:
        pieces += pairs(order, position, count)
        position += count
    assert pieces == whole
    # Each source counts its draws without a gap, from what `counts` says.
    seen = order.counts(start)
    assert sum(seen) == start
    for k, m in whole:
        assert m == seen[k]
        seen[k] += 1
    assert order.counts(position) == seen


@relaxed
@given(blend=blends(), random=st.randoms(), start=st.integers(0, 10**9))
def test_order_of_the_list_does_not_matter(blend, random, start):
    names, weights, offsets, caps = blend
    rows = list(zip(names, weights, offsets, caps, strict=True))
    random.shuffle(rows)
    shuffled = [list(column) for column in zip(*rows, strict=True)]
    one = [(names[k], m) for k, m in pairs(Order(*blend), start, 200)]
    two = [(shuffled[0][k], m) for k, m in pairs(Order(*shuffled), start, 200)]
    assert one == two


def assert_shares(weights, start, source, before):
    """|count - i p| < 1 + p K at every position, and the sharper bound of docs/sampler.md, in exact integers."""
    sources = len(weights)
    position = np.arange(start + 1, start + 1 + len(source))
    for k, weight in enumerate(weights):
        if sources > 50 and k % 37:
            continue  # of many sources, some
        count = before[k] + np.cumsum(source == k)
        error = np.abs(count * UNIT - position * weight)
        assert (error < UNIT + weight * sources).all()
        assert (error <= UNIT + weight * (sources - 2)).all()


@settings(deadline=None, max_examples=25)
@given(
    sources=st.one_of(st.integers(1, 20), st.sampled_from([100, 1000])),
    skew=st.sampled_from([0, 1, 3]),
    start=st.sampled_from([0, 0, 17, 10**6]),
    seed=st.integers(0, 100),
)
def test_shares_are_within_bounds_at_every_position(sources, skew, start, seed):
    generator = np.random.default_rng(seed)
    weights = integer_weights({f"s{k}": float(w) for k, w in enumerate(generator.random(sources) ** skew + 1e-5)})
    order = Order(list(weights), list(weights.values()), [keyed_offset(seed, name) for name in weights])
    source, _ = order.at(start, 4000)
    assert_shares(list(weights.values()), start, source, order.counts(start))


@relaxed
@given(blends())
def test_shares_are_within_bounds_with_ties(blend):
    names, weights, _, _ = blend
    offsets = [0] * len(names)
    source, _ = Order(names, weights, offsets).at(0, 1000)
    assert_shares(weights, 0, source, offsets)


@pytest.mark.parametrize("sources", [1, 5, 1000])
def test_far_positions_are_as_easy_as_near_ones(sources):
    """10**13 samples into the run; an algorithm that scans would never come back."""
    weights = integer_weights({f"s{k}": k + 1 for k in range(sources)})
    order = Order(list(weights), list(weights.values()), [keyed_offset(3, name) for name in weights])
    start = 10**13
    source, draw = order.at(start, 1024)
    before = order.counts(start)
    for k in range(min(sources, 5)):
        assert draw[source == k].tolist() == list(range(before[k], before[k] + int((source == k).sum())))
        assert abs(before[k] * UNIT - start * list(weights.values())[k]) < UNIT * (1 + sources)


def test_order_version_1():
    """These numbers never change: the order of every run rests on them."""
    assert keyed_offset(1234, "web") == GOLDEN_OFFSET
    weights = integer_weights({"books": 1, "code": 2.5, "web": 6.5})
    order = Order(list(weights), list(weights.values()), [keyed_offset(1234, name) for name in weights])
    source, draw = order.at(10**12, 12)
    assert source.tolist() == GOLDEN_SOURCES
    assert draw.tolist() == GOLDEN_DRAWS


GOLDEN_OFFSET = 1414546619
GOLDEN_SOURCES = [2, 2, 1, 0, 2, 2, 1, 2, 2, 2, 1, 2]
GOLDEN_DRAWS = [
    649999999907,
    649999999908,
    250000000000,
    100000000093,
    649999999909,
    649999999910,
    250000000001,
    649999999911,
    649999999912,
    649999999913,
    250000000002,
    649999999914,
]
