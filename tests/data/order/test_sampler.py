import json
import re
from pathlib import Path

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.hashing import key
from pipeline.data.order.blend import UNIT
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment, SourceState
from pipeline.data.order.windows import Windows
from tests.data import reference
from tests.data.order.test_journal import plan, run_file
from tests.data.order.test_phases import planned, runs, sampler_of
from tests.data.preprocess.memory import MemoryDataset

relaxed = settings(deadline=None, max_examples=40)


def sampler(journal, counts):
    return Sampler(journal, [counts] * len(journal.segments))


def samples(journal, counts, steps):
    """(source name, lap, position) of each sample of the steps, in order."""
    result, source = [], sampler(journal, counts)
    for step in steps:
        draws = source.step(step)
        result += [
            (journal.names[k], lap, position)
            for k, lap, position in zip(*(array.tolist() for array in draws), strict=True)
        ]
    return result


def two_segments():
    """Another batch size and sequence length in the second segment, and another source."""

    def state(**keys):
        return SourceState(**{"tokens": 1000, "weight": UNIT, "offset": 0, "lap": 0, "cursor": 0, **keys})

    return Journal(
        seed=1,
        segments=[
            Segment(first_step=0, first_sample=0, batch_size=4, sequence_length=10, sources={"a": state()}),
            Segment(
                first_step=3,
                first_sample=12,
                batch_size=2,
                sequence_length=20,
                sources={"b": state(lap=2, cursor=48)},
            ),
        ],
    )


def test_counters_over_two_segments():
    journal = two_segments()
    assert [journal.samples(step) for step in (2, 3, 4)] == [range(8, 12), range(12, 14), range(14, 16)]
    assert [journal.tokens(step) for step in (0, 3, 4, 6)] == [0, 120, 160, 240]
    source = Sampler(journal, [{"a": 100}, {"b": 50}])
    assert [journal.names[k] for k in source.step(2).source] == ["a"] * 4
    four = source.step(4)
    assert (four.source.tolist(), four.epoch.tolist(), four.position.tolist()) == ([1, 1], [3, 3], [0, 1])
    assert source.slots(5) == {"a": 120, "b": 80}
    assert source.find("a", 0, 0, np.array([0, 11, 12])).tolist() == [0, 11, -1]
    assert source.find("b", 1, 2, np.array([49, 48, 47])).tolist() == [13, 12, -1]
    assert source.find("b", 1, 3, np.array([1])).tolist() == [15]
    assert source.find("b", 0, 2, np.array([49])).tolist() == [-1]


# The order of the run


@relaxed
@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 3000))
def test_batch_size_only_cuts_the_order(one, two, first):
    weights, counts = {"a": 5, "b": 2, "c": 1}, {"a": 70, "b": 7, "c": 1}
    stop = first + 300
    a = samples(plan(weights, batch_size=one), counts, range(first // one, stop // one + 1))[first % one :]
    b = samples(plan(weights, batch_size=two), counts, range(first // two, stop // two + 1))[first % two :]
    assert a[:300] == b[:300]


def test_blocks_and_large_steps_agree():
    weights, counts = {"a": 5, "b": 2}, {"a": 1000, "b": 10}
    whole = samples(plan(weights, batch_size=5000), counts, [0])
    assert samples(plan(weights, batch_size=7), counts, range(714)) == whole[: 7 * 714]
    assert samples(plan(weights, batch_size=1500), counts, [2, 1, 0])[-1500:] == whole[:1500]


def test_steps_can_be_asked_for_in_any_order():
    journal, counts = plan({"a": 5, "b": 2}, batch_size=600), {"a": 1000, "b": 10}
    forwards = [samples(journal, counts, [step]) for step in range(8)]
    one = sampler(journal, counts)
    for step in (7, 0, 3, 3, 6, 1):
        draws = one.step(step)
        assert [(journal.names[k], e, p) for k, e, p in zip(*draws, strict=True)] == forwards[step]


@relaxed
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), min_size=1, max_size=6),
    st.integers(1, 100),
    st.integers(0, 2**63 - 1),
)
def test_adding_a_source_moves_no_draw_of_another(weights, weight, seed):
    counts = dict.fromkeys([*weights, "new"], 13)
    steps = range(40)
    before = samples(plan(weights, seed=seed), counts, steps)
    after = samples(plan({"new": weight, **weights}, seed=seed), counts, steps)
    for name in weights:
        old = [draw for draw in before if draw[0] == name]
        new = [draw for draw in after if draw[0] == name]
        shared = min(len(old), len(new))
        assert old[:shared] == new[:shared]
    # Taken out again, the new source leaves the others in the order of their own due times.
    assert {name for name, _, _ in after} <= counts.keys()


@relaxed
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), min_size=1, max_size=6),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9), min_size=8, max_size=8),
)
def test_each_source_goes_through_its_laps_in_order(weights, counts):
    journal = plan(weights)
    drawn = samples(journal, counts, range(30))
    source = sampler(journal, counts)
    for name in weights:
        own = [(lap, position) for n, lap, position in drawn if n == name]
        assert own == [divmod(m, counts[name]) for m in range(len(own))]
        assert source.slots(30)[name] == len(own) * 8
    assert sum(source.slots(30).values()) == journal.tokens(30)
    assert source.slots(0) == dict.fromkeys(sorted(weights), 0)


def test_far_steps():
    journal = plan({"a": 5, "b": 2, "c": 0.01}, batch_size=2048)
    source = sampler(journal, {"a": 10**9, "b": 10**7, "c": 3})
    draws = source.step(5 * 10**9)  # sample 1.024e13
    assert len(draws.source) == 2048
    before, after = source.slots(5 * 10**9), source.slots(5 * 10**9 + 1)
    for k, name in enumerate(journal.names):
        assert (after[name] - before[name]) // 8 == (draws.source == k).sum()
    assert np.all(draws.position[draws.source == 2] < 3)


# Hashes and the way back


@relaxed
@given(runs())
def test_order_hash_is_that_of_the_definition(run):
    expected, _ = reference.enumerate_run(run, 20)
    source = sampler_of(planned(run))
    for step in {sample.step for sample in expected}:
        content = b"".join(
            number.to_bytes(8, "little")
            for sample in expected
            if sample.step == step
            for number in (sample.index, xxhash.xxh3_64_intdigest(sample.source.encode()), sample.lap, sample.position)
        )
        assert source.order_hash(step) == xxhash.xxh3_64_intdigest(content)


@settings(deadline=None, max_examples=80)
@given(runs())
def test_find_is_the_inverse_of_step(run):
    """Every position of every lap that any segment could draw from, against the enumeration."""
    expected, _ = reference.enumerate_run(run, 30)
    journal = planned(run)
    source = sampler_of(journal)
    drawn = {(s.source, journal.segment_number(s.step), s.lap, s.position): s.index for s in expected}
    covered = expected[-1].index + 1 if expected else 0
    laps = {name: {lap for other, _, lap, _ in drawn if other == name} for name in journal.names}
    for name in journal.names:
        for number, segment in enumerate(journal.segments):
            positions = np.arange(segment.epoch_samples.get(name, 3))
            for lap in sorted(laps[name] | {0, 7})[:6]:
                found = source.find(name, number, lap, positions)
                assert found.dtype == np.int64
                for position, index in zip(positions.tolist(), found.tolist(), strict=True):
                    wanted = drawn.get((name, number, lap, position))
                    if wanted is not None:
                        assert index == wanted
                    else:
                        assert index == -1 or index >= covered


def test_find_far_away():
    journal = plan({"a": 5, "b": 2, "c": 0.01}, tokens=10**12, batch_size=2048)
    source = sampler_of(journal)
    step = 5 * 10**9
    first, draws = journal.samples(step).start, source.step(step)
    for k, name in enumerate(journal.names):
        (own,) = np.nonzero(draws.source == k)
        for lap in np.unique(draws.epoch[own]).tolist():
            rows = own[draws.epoch[own] == lap]
            assert source.find(name, 0, lap, draws.position[rows]).tolist() == (first + rows).tolist()


def test_there_is_no_end_without_limits():
    assert sampler_of(plan({"a": 5, "b": 2})).end() is None


def test_the_example_of_the_documentation():
    """The table in docs/sampler.md, cell by cell."""
    page = (Path(__file__).parents[3] / "docs" / "sampler.md").read_text()
    lines = page.split("## A small example")[1].split("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")][2:]
    datasets = {"books": MemoryDataset([5, 6]), "web": MemoryDataset([7, 3, 9, 6, 4])}
    config = run_file({"books": 1, "web": 3}, seed=7, batch_size=len(table), sequence_length=4)
    journal = plan_journal(config, datasets)
    windows = {name: Windows(dataset, 4, 7, name) for name, dataset in datasets.items()}
    counts = {name: instances.count for name, instances in windows.items()}
    drawn = dict.fromkeys(datasets, 0)
    for index, (row, (name, lap, position)) in enumerate(zip(table, samples(journal, counts, [0]), strict=True)):
        m, state = drawn[name], journal.segments[0].sources[name]
        drawn[name] += 1
        due = (m * UNIT + state.offset) / state.weight
        window = windows[name].window(lap, position)
        first = (windows[name].phase(lap) + window * 4) % datasets[name].tokens
        spans = windows[name].at(lap, position)
        pieces = ", ".join(f"{s.document}: {s.start}-{s.start + s.length - 1}" for s in spans)
        cells = (index, name, m, f"{due:.3f}", lap, position, window, first, pieces)
        assert row == [str(cell) for cell in cells]
    assert len(table) == 10


def test_keys_can_be_rebuilt_from_the_page():
    page = " ".join((Path(__file__).parents[3] / "docs" / "sampler.md").read_text().split())
    bytes, value = re.search(r'key\("offset", 7, "books"\) is the hash of the 20 bytes `(.*?)`, (\d+)\.', page).groups()
    assert len(bytes) == 20
    assert xxhash.xxh3_64_intdigest(bytes.encode()) == int(value) == key("offset", 7, "books")
    for parts in (("phase", 2**63 - 1, "a.b-c_D", 10**13), ("offset", 0, 'ü"\\\n')):
        written = json.dumps(parts, separators=(",", ":"), ensure_ascii=False)
        assert xxhash.xxh3_64_intdigest(written.encode()) == key(*parts)
