import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Slice
from pipeline.data.loading.objectives.base import sample_key
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.windows import Windows
from tests.data.loading.test_loader import run_file
from tests.data.preprocess.memory import EOD, FlatDataset, MemoryDataset

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
@given(windows(), laps, st.booleans())
def test_containing_finds_the_windows_that_a_scan_finds(drawn, lap, shifts):
    dataset, length, instances = drawn
    targets = slice(shifts, length + shifts)
    scanned = {document: set() for document in range(dataset.documents)}
    for position in range(instances.count):
        for place in offsets(dataset, instances, lap, position)[targets]:
            scanned[dataset.owner[place]].add(position)
    for document in range(dataset.documents):
        found = instances.containing(lap, document, shifts=shifts).tolist()
        assert len(found) == len(set(found))
        assert set(found) == scanned[document]
        if dataset.lengths[document]:
            # In the document's order: each next window has later tokens of it (the last may be the first again).
            first = dataset.document_start(document)
            seen = [offsets(dataset, instances, lap, position)[targets] for position in found]
            starts = [min((place - first) % dataset.tokens for place in places) for places in seen]
            assert starts == sorted(starts)


@relaxed
@given(windows(), st.lists(st.tuples(laps, st.integers(0, 200)), max_size=20))
def test_many_at_once_are_as_one_by_one(drawn, draws):
    _, length, instances = drawn
    lap, position = np.array([(e, j % instances.count) for e, j in draws], np.int64).reshape(-1, 2).T
    places = instances.places(lap, position)
    rows, starts = instances.starts(places)
    assert sorted(zip(rows.tolist(), starts.tolist(), strict=True)) == list(
        zip(rows.tolist(), starts.tolist(), strict=True)
    )
    for row, (e, j) in enumerate(zip(lap.tolist(), position.tolist(), strict=True)):
        ids = np.empty(length + 1, np.int32)
        instances.fill(int(places[row]), ids)
        assert ids.tolist() == instances.read(e, j)[0].tolist()
        expected = sorted({int(bound) for bound in instances.bounds(e, j)})
        assert starts[rows == row].tolist() == expected


def test_far_positions_are_not_looked_up_in_blocks():
    instances = Windows(FlatDataset(10**9), 16, 3, "web")
    position = np.sort(np.random.default_rng(1).integers(0, instances.count, 3000))
    lap = np.repeat([4, 5, 6], 1000)
    expected = [int(instances.places(lap[i : i + 1], position[i : i + 1])[0]) for i in range(0, 3000, 500)]
    assert instances.places(lap, position)[::500].tolist() == expected


@relaxed
@given(windows(), laps, st.data())
def test_targets_of_documents_equal_the_pieces(drawn, lap, data):
    dataset, length, instances = drawn
    number = st.integers(0, dataset.documents)
    documents = [tuple(sorted(pair)) for pair in data.draw(st.lists(st.tuples(number, number), max_size=4))]
    ranges = instances.ranges_of(documents)
    chosen = {document for first, end in documents for document in range(first, end)}
    for position in range(instances.count):
        place = int(instances.places(np.array([lap]), np.array([position]))[0])
        found = np.zeros(length, int)
        for first, end in instances.targets_of(place, ranges):
            assert 0 <= first < end <= length
            found[first:end] += 1
        owners = [dataset.owner[offset] for offset in offsets(dataset, instances, lap, position)[1:]]
        assert found.tolist() == [int(owner in chosen) for owner in owners]


@relaxed
@given(windows(), laps, st.data())
def test_a_slice_is_a_text_of_its_own(drawn, lap, data):
    """Windows of a slice are those of a dataset with these documents alone; only the numbers are the dataset's."""
    dataset, length, _ = drawn
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, dataset.documents)] * 2)))
    part = Slice(dataset, first, end)
    alone = MemoryDataset(dataset.lengths[first:end])
    alone.ids = dataset.ids[dataset.document_start(first) : dataset.document_start(end)]
    assert part.tokens == alone.tokens
    if part.tokens < length:
        return
    ours, theirs = Windows(part, length, 3, "web"), Windows(alone, length, 3, "web")
    for position in range(ours.count):
        moved = [(document + first, start, count) for document, start, count in theirs.at(lap, position)]
        assert ours.at(lap, position) == moved
        for found, expected in zip(ours.read(lap, position), theirs.read(lap, position), strict=True):
            assert found.tolist() == expected.tolist()
    for document in range(dataset.documents):
        expected = theirs.containing(lap, document - first).tolist() if first <= document < end else []
        assert ours.containing(lap, document).tolist() == expected
    place = int(ours.places(np.array([lap]), np.array([0]))[0])
    everything = ours.targets_of(place, ours.ranges_of([(0, dataset.documents)]))
    assert sum(b - a for a, b in everything) == length


def test_segments_share_windows_where_they_can():
    datasets = {"a": MemoryDataset([10] * 20), "b": MemoryDataset([7] * 30)}
    phases = [
        {"until": "3 steps"},
        {"until": "6 steps", "batch_size": 2},
        {"until": "9 steps", "slices": {"a": [0, "5 documents"]}},
        {"until": "12 steps", "sequence_length": 4},
        {},
    ]
    journal = plan_journal(run_file({"a": 1, "b": 1}, blend={"phases": phases}), datasets)
    one, two, three, four, five = instances_of(journal, datasets)
    assert one == two == five
    assert three["b"] is one["b"] and three["a"] is not one["a"]
    assert three["a"].tokens == 50
    assert four["a"] is not one["a"] and four["b"].count == 210 // 4


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
    assert int(instances._order.positions(7, np.array([window]))[0]) == position
    ids, _ = instances.read(7, position)
    assert len(ids) == 4097


# Objectives


@relaxed
@given(windows(), laps, st.booleans())
def test_causal_masks_first_tokens_of_documents_if_asked(drawn, lap, mask):
    dataset, _, instances = drawn
    objective = Causal(mask_document_start=mask)
    assert (objective.fixed_valid(8) is None) == mask and not objective.arranges
    firsts = {start for start, n in zip(dataset._starts, dataset.lengths, strict=False) if n}
    for position in range(instances.count):
        place = offsets(dataset, instances, lap, position)
        bounds = instances.bounds(lap, position)
        begins = np.flatnonzero(bounds == np.arange(len(bounds)))
        weight = objective.weight(begins, len(bounds) - 1)
        assert objective.valid(begins, np.array([0, len(begins)]), len(weight), int) == np.count_nonzero(weight)
        assert weight.tolist() == [0.0 if mask and target in firsts else 1.0 for target in place[1:]]
        assert weight.dtype == np.float32


def test_sample_keys_differ():
    keys = {sample_key(seed, index) for seed in range(10) for index in range(1000)}
    assert len(keys) == 10_000
    assert all(0 <= key < 2**64 for key in keys)
    assert sample_key(2**63 - 1, 10**15) == sample_key(2**63 - 1, 10**15)
