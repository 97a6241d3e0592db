import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.instances import Windows
from pipeline.data.objectives import Causal, sample_key
from pipeline.errors import UserError
from tests.data.memory import EOD, FlatDataset, MemoryDataset

relaxed = settings(deadline=None, max_examples=60)
laps = st.integers(0, 5)


@st.composite
def windows(draw):
    """A dataset of a few documents, some of them empty or a bare end-of-document token, and windows over it."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum))
    dataset = MemoryDataset(lengths, draw(st.sampled_from([np.uint16, np.int32, np.int64])))
    length = draw(st.integers(1, dataset.tokens))
    return dataset, length, Windows(dataset, length, draw(st.integers(0, 2**63 - 1)), "web")


def offsets(dataset, instances, lap, position):
    """Offsets in the dataset of the window's tokens, from its pieces of documents."""
    result = []
    for document, start, length in instances.at(lap, position):
        assert length > 0 and start + length <= dataset.lengths[document]
        result += range(dataset.document_start(document) + start, dataset.document_start(document) + start + length)
    return result


@relaxed
@given(windows(), laps)
def test_a_lap_has_every_window_once_and_every_target_at_most_once(drawn, lap):
    dataset, length, instances = drawn
    assert instances.count == dataset.tokens // length
    assert sorted(instances.window(lap, p) for p in range(instances.count)) == list(range(instances.count))
    seen = np.zeros(dataset.tokens, int)
    for position in range(instances.count):
        place = offsets(dataset, instances, lap, position)
        assert len(place) == length + 1
        assert all(b == (a + 1) % dataset.tokens for a, b in itertools.pairwise(place))
        seen[place[1:]] += 1
    assert seen.max() == 1
    assert (seen == 0).sum() == dataset.tokens % length < length


@relaxed
@given(windows(), laps)
def test_tokens_and_bounds_equal_a_scan(drawn, lap):
    """A document begins after each end-of-document token, and where the text wraps around."""
    dataset, length, instances = drawn
    if 0 in dataset.lengths:
        dataset = MemoryDataset([n for n in dataset.lengths if n])
        instances = Windows(dataset, length, 5, "web")
    for position in range(instances.count):
        ids, bounds = instances.read(lap, position)
        assert ids.dtype == bounds.dtype == np.int64
        assert ids.tolist() == [int(dataset.ids[place]) for place in offsets(dataset, instances, lap, position)]
        begin, expected = 0, []
        for index in range(length + 1):
            if index and ids[index - 1] == EOD:
                begin = index
            expected.append(begin)
        assert bounds.tolist() == expected == instances.bounds(lap, position).tolist()


@relaxed
@given(windows(), laps)
def test_bounds_equal_the_pieces(drawn, lap):
    _, _, instances = drawn
    for position in range(instances.count):
        expected = []
        for _, _, count in instances.at(lap, position):
            expected += [len(expected)] * count
        assert instances.bounds(lap, position).tolist() == expected


@relaxed
@given(windows(), laps)
def test_containing_finds_the_windows_that_a_scan_finds(drawn, lap):
    dataset, _, instances = drawn
    scanned = {document: set() for document in range(dataset.documents)}
    for position in range(instances.count):
        for place in offsets(dataset, instances, lap, position)[1:]:
            scanned[dataset.owner[place]].add(position)
    for document in range(dataset.documents):
        found = instances.containing(lap, document).tolist()
        assert len(found) == len(set(found))
        assert set(found) == scanned[document]
        if dataset.lengths[document]:
            # In the document's order: each next window has later tokens of it (the last may be the first again).
            first = dataset.document_start(document)
            starts = [min((o - first) % dataset.tokens for o in offsets(dataset, instances, lap, p)[1:]) for p in found]
            assert starts == sorted(starts)


def test_laps_differ_in_order_and_in_cuts():
    dataset = FlatDataset(10_000)
    instances = Windows(dataset, 64, 1, "web")
    assert instances.phase(0) == 0
    assert len({instances.phase(lap) for lap in range(20)}) > 10
    assert all(0 <= instances.phase(lap) < 64 for lap in range(100))
    orders = [[instances.window(lap, p) for p in range(instances.count)] for lap in range(3)]
    assert orders[0] != orders[1] != orders[2]
    # Over the laps every token becomes a target, also those that one lap leaves unseen.
    unseen = set(range(10_000))
    for lap in range(4):
        for position in range(instances.count):
            start = instances.phase(lap) + instances.window(lap, position) * 64
            unseen -= {(start + q) % 10_000 for q in range(1, 65)}
    assert not unseen


def test_order_depends_on_seed_and_name_alone():
    dataset = FlatDataset(100_000)

    def order(seed, name):
        return [Windows(dataset, 10, seed, name).window(1, p) for p in range(50)]

    assert order(1, "web") == order(1, "web")
    assert order(1, "web") != order(2, "web") != order(1, "code") != order(1, "web")


def test_sequence_length_one():
    dataset = MemoryDataset([3, 1, 2])
    instances = Windows(dataset, 1, 0, "web")
    pairs = {tuple(instances.read(3, position)[0].tolist()) for position in range(instances.count)}
    ids = dataset.ids.tolist()
    assert pairs == set(zip(ids, ids[1:] + ids[:1], strict=True))


def test_a_window_as_long_as_the_source_wraps_once():
    dataset = MemoryDataset([4])
    instances = Windows(dataset, 4, 0, "web")
    assert instances.count == 1
    assert instances.read(0, 0)[0].tolist() == [1, 2, 3, 0, 1]
    assert instances.at(0, 0) == [(0, 0, 4), (0, 0, 1)]
    assert instances.bounds(0, 0).tolist() == [0, 0, 0, 0, 4]
    assert instances.containing(0, 0).tolist() == [0]


@pytest.mark.parametrize("lengths", [[], [3, 4]])
def test_a_source_shorter_than_a_window_is_named(lengths):
    with pytest.raises(UserError, match=rf"source 'web' has {sum(lengths)} tokens.*train.sequence_length 8"):
        Windows(MemoryDataset(lengths), 8, 0, "web")


def test_a_large_source_is_as_easy_as_a_small_one():
    instances = Windows(FlatDataset(2**50), 4096, 0, "web")
    assert instances.count == 2**38
    position = 123_456_789_012
    window = instances.window(7, position)
    # The document has all tokens, so asking for its windows would list them all; ask through the permutation instead.
    assert int(instances._permutation(7).inverse(np.array([window]))[0]) == position
    ids, _ = instances.read(7, position)
    assert len(ids) == 4097


# Objectives


@relaxed
@given(windows(), laps, st.booleans())
def test_causal_targets_are_the_next_tokens(drawn, lap, mask):
    dataset, length, instances = drawn
    objective = Causal(mask_document_start=mask)
    assert objective.masks == mask
    firsts = {start for start, n in zip(dataset._starts, dataset.lengths, strict=False) if n}
    for position in range(instances.count):
        ids, bounds = instances.read(lap, position)
        sample = objective.arrays(ids, bounds, key=0)
        assert {name: value.shape for name, value in sample.items()} == dict.fromkeys(
            ("tokens", "targets", "weight", "bounds"), (length,)
        )
        assert sample["targets"].tolist() == ids[1:].tolist() and sample["tokens"].tolist() == ids[:-1].tolist()
        place = offsets(dataset, instances, lap, position)
        expected = [0.0 if mask and target in firsts else 1.0 for target in place[1:]]
        assert sample["weight"].tolist() == expected == objective.weight(bounds, key=0).tolist()
        assert sample["weight"].dtype == np.float32


def test_sample_keys_differ():
    keys = {sample_key(seed, index) for seed in range(10) for index in range(1000)}
    assert len(keys) == 10_000
    assert all(0 <= key < 2**64 for key in keys)
    assert sample_key(2**63 - 1, 10**15) == sample_key(2**63 - 1, 10**15)
