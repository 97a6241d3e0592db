import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.order.permutation import MAX_SIZE, Permutation

relaxed = settings(deadline=None, max_examples=60)
keys = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4096, 4097, 65537])
def test_bijection_with_inverse_exhaustively(n):
    permutation = Permutation(n, 12345 + n)
    image = permutation.forward(np.arange(n))
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(permutation.inverse(image), np.arange(n))


@relaxed
@given(n=st.one_of(st.integers(1, 2**40), st.integers(1, MAX_SIZE)), key=keys, data=st.data())
def test_round_trip_at_any_size(n, key, data):
    permutation = Permutation(n, key)
    values = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50)))
    image = permutation.forward(values)
    assert image.min() >= 0 and image.max() < n
    assert np.array_equal(permutation.inverse(image), values)
    assert np.array_equal(permutation.forward(permutation.inverse(values)), values)
    assert len(set(image.tolist())) == len(set(values.tolist()))


@relaxed
@given(n=st.one_of(st.integers(1, 300), st.integers(1, MAX_SIZE)), key=keys, data=st.data())
def test_equal_to_a_reference_in_python_integers(n, key, data):
    """Written from the definition in docs/sampler.md, with none of NumPy's arithmetic."""
    word = 2**64

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        return z ^ (z >> 31)

    def scale(z):
        # The last step of the finalizer is no part of F.
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        return (z >> 31) * side >> 33

    side = next(a for a in itertools.count(math.isqrt(n)) if a % 2 == 0 and a * a >= n)
    round_keys = [mix((key + r * 0x9E3779B97F4A7C15) % word) for r in range(1, 13)]
    position = data.draw(st.integers(0, n - 1))
    value = position
    while True:
        left, right = divmod(value, side)
        for round_key in round_keys:
            left, right = right, (left + scale(right ^ round_key)) % side
        value = left * side + right
        if value < n:
            break
    assert int(Permutation(n, key).forward(np.array([position]))[0]) == value


def test_shape_and_dtype_of_input_do_not_matter():
    permutation = Permutation(1000, 7)
    values = np.arange(24).reshape(2, 3, 4)
    expected = permutation.forward(values)
    assert expected.shape == values.shape
    for dtype in (np.uint8, np.int32, np.uint64):
        assert np.array_equal(permutation.forward(values.astype(dtype)), expected)
    assert permutation.forward(np.empty(0, np.int64)).shape == (0,)


def test_values_outside_are_refused():
    with pytest.raises(AssertionError):
        Permutation(10, 0).forward(np.array([10]))
    with pytest.raises(AssertionError):
        Permutation(10, 0).inverse(np.array([-1]))


def _excess(counts, expected):
    """Chi-square of equal frequencies, in standard deviations above its mean."""
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.guard
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_small_range_are_equally_likely(n):
    draws = 3000
    seen = Counter(tuple(Permutation(n, key).forward(np.arange(n)).tolist()) for key in range(draws))
    counts = np.array([seen[p] for p in itertools.permutations(range(n))])
    assert _excess(counts, draws / math.factorial(n)) < 4


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, 1000, 10_007])
def test_neighbours_land_anywhere(n):
    """Over many keys: the first element, and the difference of neighbours, are uniform."""
    draws = 3000
    image = np.array([Permutation(n, key).forward(np.arange(2)) for key in range(draws)])
    cells = 20
    first = np.bincount(image[:, 0] * cells // n, minlength=cells)
    step = np.bincount(((image[:, 1] - image[:, 0]) % n - 1) * cells // (n - 1), minlength=cells)
    assert _excess(first, draws / cells) < 4
    assert _excess(step, draws / cells) < 4


@pytest.mark.parametrize("n", [2**16, 10**6 + 3, 2**40, MAX_SIZE])
def test_a_range_is_well_mixed(n):
    """Within one key: elements, their differences and their order look like those of a random shuffle."""
    count = 40_000
    image = Permutation(n, 99).forward(np.arange(count))
    cells = 64
    assert _excess(np.bincount((image // (n // cells)).clip(max=cells - 1), minlength=cells), count / cells) < 5
    difference = (image[1:] - image[:-1]) % n
    assert _excess(np.bincount((difference // (n // cells)).clip(max=cells - 1), minlength=cells), count / cells) < 5
    assert abs(np.corrcoef(np.arange(count), image.astype(float))[0, 1]) < 5 / math.sqrt(count)
    ascents = (image[1:] > image[:-1]).sum()  # their variance is (n + 1) / 12
    assert abs(ascents - count / 2) < 5 * math.sqrt(count / 12)
    low = np.bincount(image % cells, minlength=cells)
    assert _excess(low, count / cells) < 5


def test_order_version_1():
    """These numbers never change: the order of every run rests on them."""
    assert Permutation(10, 1).forward(np.arange(10)).tolist() == GOLDEN_10
    assert Permutation(10**12, 2**63).forward(np.arange(4)).tolist() == GOLDEN_LARGE


GOLDEN_10 = [6, 9, 7, 5, 1, 0, 2, 4, 3, 8]
GOLDEN_LARGE = [182251638418, 836242444829, 616094464907, 519627066184]
