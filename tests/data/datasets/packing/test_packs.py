"""Packs of a dataset, compared with best-fit decreasing over lists, and every token counted."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset, Slice
from pipeline.data.datasets.packing import best_fit, blocks
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.packing.make import PackMaker
from tests.data.datasets.packing.made import reference, some_lengths, write_lengths

LENGTH = 64


@pytest.fixture(scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "GROUP", 20)
        patch.setattr(blocks, "BLOCK", 60)
        yield


@pytest.fixture(scope="module")
def lengths():
    return some_lengths(LENGTH)


@pytest.fixture(scope="module", params=["mmap", "pread"])
def dataset(request, lengths, tmp_path_factory, small_blocks):
    """A dataset with its packs."""
    folder = write_lengths(tmp_path_factory.mktemp("s") / "train", lengths)
    dataset = Dataset.open(folder, request.param)
    PackMaker(dataset, LENGTH).make(Console(quiet=True), 1)
    return dataset


def as_lists(found, asked=None):
    """The packs as lists of (document, first token, tokens)."""
    asked = np.arange(found.count) if asked is None else asked
    result = [[] for _ in asked]
    for index, *chunk in zip(*(each.tolist() for each in found.chunks(asked)), strict=True):
        result[index].append(tuple(chunk))
    return result


@pytest.mark.parametrize("engine", [best_fit.place, best_fit.quickest(10**9)])
def test_as_over_lists(engine):
    chance = np.random.default_rng(0)
    for length in (1, 2, 7, 63, 64, 65, 130):
        for count in (0, 1, 2, 40):
            lengths = chance.integers(0, 3 * length + 1, count)
            found = best_fit.packed(lengths, length, engine)
            document, piece, tokens = (each.tolist() for each in found.chunks)
            chunks = list(zip(document, [number * length for number in piece], tokens, strict=True))
            got = [chunks[first:end] for first, end in pairwise(found.begins.tolist())]
            assert got == reference(lengths.tolist(), length, group=count + 1)


@pytest.mark.parametrize("length", [1024, 4096, 131_072])
def test_engines_agree(length):
    lengths = np.exp(np.random.default_rng(4).normal(6, 1.5, 10_000)).astype(np.int64)
    found, expected = (
        best_fit.packed(lengths, length, engine) for engine in (best_fit.quickest(10**9), best_fit.place)
    )
    for one, other in zip((found.begins, *found.chunks), (expected.begins, *expected.chunks), strict=True):
        assert np.array_equal(one, other)
    used = np.add.reduceat(found.chunks.tokens, found.begins[:-1])
    assert used.max() <= length and used.sum() == lengths.sum()


@pytest.mark.parametrize("make", [Packs.open, Packs.made])
def test_every_token_once(dataset, lengths, make):
    found = make(dataset, LENGTH)
    assert as_lists(found) == reference(lengths, LENGTH, group=20)
    seen = Counter(
        (document, token)
        for pack in as_lists(found)
        for document, first, tokens in pack
        for token in range(first, first + tokens)
    )
    assert seen == Counter((document, token) for document, length in enumerate(lengths) for token in range(length))
    targets = found.targets(np.arange(found.count))
    assert targets.max() <= LENGTH and targets.sum() == found.tokens == sum(lengths)


def test_in_any_order(dataset):
    found = Packs.open(dataset, LENGTH)
    asked = np.random.default_rng(2).integers(0, found.count, 50)
    everything = as_lists(found)
    assert as_lists(found, asked) == [everything[pack] for pack in asked]
    assert found.targets(asked).tolist() == [sum(c[2] for c in everything[pack]) for pack in asked]
    assert len(found.chunks(asked[:0])[0]) == len(found.targets(asked[:0])) == 0
    for outside in (-1, found.count):
        with pytest.raises(IndexError):
            found.chunks(np.array([0, outside]))


@pytest.mark.parametrize("first, end", [(0, 185), (20, 80), (3, 9), (19, 21), (5, 150), (60, 61), (40, 40), (181, 185)])
def test_slices(dataset, lengths, first, end):
    found = Packs.open(dataset, LENGTH, (first, end))
    everything = as_lists(found)
    assert everything == reference(lengths, LENGTH, 20, first, end)
    assert as_lists(Packs.made(Slice(dataset, first, end), LENGTH)) == everything
    assert found.tokens == sum(lengths[first:end])
    for document in range(185):
        expected = sorted((c[1], pack) for pack, chunks in enumerate(everything) for c in chunks if c[0] == document)
        assert found.packs_of(document).tolist() == [pack for _, pack in expected]


def test_starts_of_documents(dataset, lengths):
    asked = np.random.default_rng(3).permutation(186)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    assert dataset.starts_of(asked).tolist() == starts[asked].tolist()
    inside = np.clip(starts[asked], *starts[[20, 90]]) - starts[20]
    assert Slice(dataset, 20, 90).starts_of(asked).tolist() == inside.tolist()


def test_too_long(dataset, monkeypatch):
    with pytest.raises(UserError):
        Packs.made(dataset, 1 << 22)
    monkeypatch.setattr(blocks, "PIECE_BITS", 7)
    with pytest.raises(UserError):
        Packs.made(dataset, 1)
