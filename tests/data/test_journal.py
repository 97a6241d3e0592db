import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Config
from pipeline.data.blend import UNIT
from pipeline.data.instances import Windows
from pipeline.data.journal import Journal, Sampler, Segment, SourceState
from pipeline.errors import UserError
from tests.data.memory import FlatDataset, MemoryDataset

relaxed = settings(deadline=None, max_examples=40)


def run_file(weights, *, seed=1, batch_size=4, sequence_length=8, **train):
    return Config.model_validate(
        {
            "run": {"dir": "runs/none", "seed": seed},
            "data": {
                "sources": [
                    {"name": name, "paths": ["none"], **({} if weight is None else {"weight": weight})}
                    for name, weight in weights.items()
                ]
            },
            "tokenizer": {"path": "none"},
            "model": {"layers": 1, "dim": 8, "heads": 1},
            "train": {
                "duration": "10 steps",
                "batch_size": batch_size,
                "sequence_length": sequence_length,
                **train,
            },
        }
    )


def plan(weights, tokens=10_000, **keys):
    return Journal.plan(run_file(weights, **keys), {name: FlatDataset(tokens) for name in weights})


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


def test_plan_from_a_run_file():
    journal = plan({"web": 3, "code": 1}, batch_size=6, sequence_length=16)
    (segment,) = journal.segments
    assert (segment.first_step, segment.first_sample, segment.batch_size, segment.sequence_length) == (0, 0, 6, 16)
    assert {name: source.weight for name, source in segment.sources.items()} == {
        "web": 3 * 2**30,
        "code": 2**30,
    }
    assert all((s.lap, s.cursor, s.tokens) == (0, 0, 10_000) for s in segment.sources.values())
    assert journal.samples(0) == range(6) and journal.samples(7) == range(42, 48)
    assert journal.tokens(0) == 0 and journal.tokens(7) == 7 * 6 * 16
    assert journal.names == ["code", "web"]


def test_without_weights_shares_are_proportional_to_tokens():
    config = run_file({"a": None, "b": None})
    journal = Journal.plan(config, {"a": FlatDataset(100), "b": FlatDataset(300)})
    assert journal.segments[0].sources["a"].weight == 2**30
    with pytest.raises(UserError, match="source 'a' has weight 1 of"):
        Journal.plan(config, {"a": FlatDataset(1), "b": FlatDataset(10**11)})


def test_json_and_fingerprint():
    journal = plan({"web": 3, "code": 1})
    text = json.dumps(journal.to_json())
    assert Journal.from_json(json.loads(text)) == journal
    assert Journal.from_json(json.loads(text)).fingerprint == journal.fingerprint
    same = plan({"code": 1.0, "web": 3.0})
    assert same.fingerprint == journal.fingerprint
    others = [
        plan({"web": 3, "code": 1}, seed=2),
        plan({"web": 3, "code": 1}, batch_size=5),
        plan({"web": 3, "code": 1}, sequence_length=9),
        plan({"web": 3, "code": 2}),
        plan({"web": 3, "text": 1}),
        plan({"web": 3, "code": 1}, tokens=10_001),
    ]
    assert len({j.fingerprint for j in [journal, *others]}) == 7
    # The order does not depend on how long the run is, how it is cut, or anything else that is not listed above.
    assert plan({"web": 3, "code": 1}, duration="99 steps", micro_batch_size=2).fingerprint == journal.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"order_version": 2},
        {"unknown": 1},
        {"segments": []},
        {"seed": "x"},
    ],
)
def test_a_journal_that_is_not_understood_is_refused(change):
    with pytest.raises(UserError, match="journal"):
        Journal.from_json({**plan({"web": 1}).to_json(), **change})


def test_segments_must_follow_each_other():
    first = plan({"web": 1}).segments[0]
    good = first.model_copy(update={"first_step": 5, "first_sample": 20})
    assert Journal(seed=1, segments=[first, good])
    for update in ({"first_step": 5, "first_sample": 21}, {"first_step": 0, "first_sample": 0}):
        with pytest.raises(ValueError, match="does not start where"):
            Journal(seed=1, segments=[first, first.model_copy(update=update)])
    with pytest.raises(ValueError, match="step 0"):
        Journal(seed=1, segments=[good])
    with pytest.raises(ValueError, match="sum"):
        Segment.model_validate(
            {**first.model_dump(), "sources": {"web": {**first.sources["web"].model_dump(), "weight": 1}}}
        )


def test_counters_over_two_segments():
    """Steps, samples and tokens of a journal whose second segment has another batch size and sequence length."""

    def state(**keys):
        return SourceState(**{"tokens": 1000, "weight": UNIT, "offset": 0, "lap": 0, "cursor": 0, **keys})

    journal = Journal(
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
    assert [journal.samples(step) for step in (2, 3, 4)] == [range(8, 12), range(12, 14), range(14, 16)]
    assert [journal.tokens(step) for step in (0, 3, 4, 6)] == [0, 120, 160, 240]
    source = Sampler(journal, [{"a": 100}, {"b": 50}])
    assert [journal.names[k] for k in source.step(2).source] == ["a"] * 4
    four = source.step(4)
    assert (four.source.tolist(), four.lap.tolist(), four.position.tolist()) == ([1, 1], [3, 3], [0, 1])
    assert source.targets(5) == {"a": 120, "b": 80}


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
        assert source.targets(30)[name] == len(own) * 8
    assert sum(source.targets(30).values()) == journal.tokens(30)
    assert source.targets(0) == dict.fromkeys(sorted(weights), 0)


def test_far_steps():
    journal = plan({"a": 5, "b": 2, "c": 0.01}, batch_size=2048)
    source = sampler(journal, {"a": 10**9, "b": 10**7, "c": 3})
    draws = source.step(5 * 10**9)  # sample 1.024e13
    assert len(draws.source) == 2048
    before, after = source.targets(5 * 10**9), source.targets(5 * 10**9 + 1)
    for k, name in enumerate(journal.names):
        assert (after[name] - before[name]) // 8 == (draws.source == k).sum()
    assert np.all(draws.position[draws.source == 2] < 3)


def test_the_example_of_the_documentation():
    """The table in docs/sampler.md, cell by cell."""
    page = (Path(__file__).parents[2] / "docs" / "sampler.md").read_text()
    lines = page.split("## A small example")[1].split("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")][2:]
    datasets = {"books": MemoryDataset([5, 6]), "web": MemoryDataset([7, 3, 9, 6, 4])}
    config = run_file({"books": 1, "web": 3}, seed=7, batch_size=len(table), sequence_length=4)
    journal = Journal.plan(config, datasets)
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
