import heapq
import math
from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.data.order.blend import UNIT, Order, exact_number, integer_weights, keyed_offset, tempered

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


@relaxed
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 10**15), min_size=1, max_size=8))
def test_a_temperature_of_two_takes_roots(weights):
    """Against square roots of integers, which `math` has exactly."""
    scale = 10**30
    roots = {name: Fraction(math.isqrt(weight * scale**2), scale) for name, weight in weights.items()}
    total = sum(roots.values())
    for name, integer in integer_weights(tempered(weights, 2.0)).items():
        assert abs(integer - roots[name] * UNIT / total) < 1


def test_temperatures():
    weights = {"a": 0.1, "b": 0.3, "c": 0.6}
    assert integer_weights(tempered(weights, 1)) == integer_weights(weights)
    assert integer_weights(tempered({"a": 7, "b": 7}, 0.3)) == {"a": UNIT // 2, "b": UNIT // 2}
    # A third: a cube. Very hot is even, very cold leaves nothing to all but the largest.
    assert integer_weights(tempered({"a": 1, "b": 2}, 1 / 4)) == integer_weights({"a": 1, "b": 16})
    assert max(integer_weights(tempered(weights, 1e12)).values()) <= UNIT // 3 + 1
    for temperature in (0.02, 1e-300):
        with pytest.raises(UserError, match="less than the smallest share"):
            integer_weights(tempered(weights, temperature))


def test_epochs_mean_what_they_say():
    for epochs, exact in ((0.1, "1/10"), (0.7, "7/10"), (1.1, "11/10"), (2.5, "5/2"), (4.0, "4")):
        assert exact_number(epochs) == Fraction(exact)


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
    assert order.capacity == (None if None in caps else sum(caps))
    if order.capacity is not None and start + count > order.capacity:
        with pytest.raises(AssertionError):
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
    assert order.capacity == 7 and order.carry(7) == [None, None]


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
@given(blend=blends(capped=True), far=st.sampled_from([0, 0, 10**12]))
def test_position_of_is_the_inverse(blend, far):
    order = Order(*blend)
    start = far if order.capacity is None else 0
    found = pairs(order, start, 300 if order.capacity is None else min(300, order.capacity))
    for k, cap in enumerate(blend[3]):
        own = [(position, m) for position, (source, m) in enumerate(found, start) if source == k]
        positions = order.position_of(k, np.array([m for _, m in own], np.int64))
        assert positions.dtype == np.int64 and positions.tolist() == [position for position, _ in own]
        if cap is not None:
            assert order.position_of(k, np.array([cap, cap + 1, 10**15])).tolist() == [-1] * 3
        else:
            # What is drawn later lies behind all that, and in order.
            after = order.position_of(k, np.arange(5) + (own[-1][1] + 1 if own else order.counts(start)[k]))
            assert ((after >= start + len(found)).all() and (np.diff(after) > 0).all()) or (after == -1).any()


def test_position_of_a_tiny_share():
    order = Order(["a", "b"], [UNIT - 1, 1], [0, 5])
    assert order.position_of(1, np.array([0, 1])).tolist() == [5, UNIT + 5]
    assert order.position_of(1, np.array([2**40])).tolist() == [-1]


@relaxed
@given(blend=blends(capped=True), position=st.integers(0, 150), random=st.randoms())
def test_what_is_carried_over(blend, position, random):
    """The definition of the offsets, their bounds, and that a blend with them goes on as if nothing had been."""
    names, weights, offsets, caps = blend
    order = Order(*blend)
    if order.capacity is not None:
        position = min(position, order.capacity)
    drawn, carried = order.counts(position), order.carry(position)
    assert [v is None for v in carried] == [m == cap for m, cap in zip(drawn, caps, strict=True)]
    alive = [k for k, v in enumerate(carried) if v is not None]
    times = {Fraction(drawn[k] * UNIT + offsets[k] - carried[k], weights[k]) for k in alive}
    assert len(times) <= 1 and all(time.denominator == 1 for time in times)  # one whole time for all
    for time in times:
        # Everything due before it has come, and something due before the next one has not.
        due = [
            sum(
                m * UNIT + offsets[k] < (time + 1) * weights[k]
                for m in range(drawn[k] + 3 if caps[k] is None else caps[k])
            )
            for k in range(len(names))
        ]
        assert sum(due) > position
    for k in alive:
        assert 0 <= carried[k] < max(offsets[k] + 1, UNIT + weights[k])
    if alive:
        left = [None if cap is None else cap - m for cap, m in zip(caps, drawn, strict=True)]
        rest = Order(names, weights, [0 if v is None else v for v in carried], left)
        count = 60 if order.capacity is None else order.capacity - position
        expected = [(k, m - drawn[k]) for k, m in pairs(order, position, count)]
        assert pairs(rest, 0, count) == expected


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


@st.composite
def far_blends(draw):
    """Blends with caps in which the sources that are left may have tiny weights; one source has no cap."""
    names = draw(names_of_sources)
    weights = integer_weights({name: draw(st.sampled_from([1, 2, 1e4, 1e9])) for name in names})
    offsets = [draw(st.sampled_from([0, 1, UNIT // 3, 3 * UNIT])) for _ in names]
    caps = [draw(st.sampled_from([0, 1, 7, 150, None])) for _ in names]
    return names, [weights[name] for name in names], offsets, [*caps[1:], None]


@settings(deadline=None, max_examples=150)
@given(blend=st.one_of(blends(capped=True), far_blends()), positions=st.lists(st.integers(0, 300), max_size=5))
def test_times_are_those_of_the_definition(blend, positions):
    """At most i samples are due before a time if and only if the one at position i is due then or later."""
    _, weights, offsets, _ = blend
    order = Order(*blend)
    drawn = enumerated(*blend, 301)
    for position in positions:
        if position < len(drawn):
            k, m = drawn[position]
            assert order._time(position) == (m * UNIT + offsets[k]) // weights[k]


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
