import json
import re
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.segments import Segment, Skip
from tests.data import reference
from tests.data.order.test_phases import of_reference, planned, rows, runs, sampler_of
from tests.data.order.test_phases import run_file as make
from tests.data.preprocess.memory import FlatDataset, MemoryDataset


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
    return plan_journal(run_file(weights, **keys), {name: FlatDataset(tokens) for name in weights})


def planned_run(sources, phases=(), **keys):
    return plan_journal(make(sources, phases, **keys), {"a": MemoryDataset([10] * 10), "b": MemoryDataset([5] * 20)})


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
    journal = plan_journal(config, {"a": FlatDataset(100), "b": FlatDataset(300)})
    assert journal.segments[0].sources["a"].weight == 2**30
    with pytest.raises(UserError, match="source 'a' has weight 8 of"):
        plan_journal(config, {"a": FlatDataset(8), "b": FlatDataset(10**12)})


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


def test_step_of_and_step_at_are_inverses():
    sources = {"a": {}}
    phases = [{"until": "7 steps"}, {"until": "900 tokens", "batch_size": 3, "sequence_length": 5}, {"batch_size": 1}]
    journal = planned_run(sources, phases)
    tokens = [journal.tokens(step) for step in range(120)]
    for step in range(119):
        assert {journal.step_of(sample) for sample in journal.samples(step)} == {step}
        assert tokens[step + 1] - tokens[step] == len(journal.samples(step)) * (
            journal.segments[journal.segment_number(step)].sequence_length
        )
    for wanted in range(tokens[100]):
        assert journal.step_at(wanted) == next(step for step, t in enumerate(tokens) if t >= wanted)
    far = journal.step_at(10**15)  # steps of 8 tokens
    assert journal.tokens(far - 1) < 10**15 <= journal.tokens(far) == journal.tokens(far - 1) + 8


# Skips


def test_skips_of_the_run_file():
    """The run file counts steps from 1 and includes the ends of ranges; the journal does neither."""
    skip = [
        {"steps": "3-5"},
        {"steps": 9, "from_step": 2},
        {"samples": "10-11"},
        {"source": "a"},
        {"source": "b", "documents": [7, "1-2"], "from_step": 7},
    ]
    journal = planned_run({"a": {}, "b": {}}, skip=skip)
    assert journal.skips == (
        Skip(steps=(2, 5), first_step=0),
        Skip(steps=(8, 9), first_step=1, given=True),
        Skip(samples=(10, 12), first_step=0),
        Skip(source="a", first_step=0),
        Skip(source="b", documents=((1, 3), (7, 8)), first_step=6, given=True),
    )
    assert [step for step in range(20) if journal.is_skipped(step)] == [2, 3, 4, 8]
    # Steps of 4 samples: 10 and 11 are in step 2.
    assert [journal.masks(step) for step in (1, 2, 3, 6)] == [
        [journal.skips[3]],
        [journal.skips[2], journal.skips[3]],
        [journal.skips[3]],
        [journal.skips[3], journal.skips[4]],
    ]
    again = Journal.from_json(json.loads(json.dumps(journal.to_json())))
    assert again.to_json() == journal.to_json() and again.fingerprint == journal.fingerprint
    # Skips are part of the journal, not of the order.
    assert again.fingerprint != planned_run({"a": {}, "b": {}}).fingerprint
    assert again.segments == planned_run({"a": {}, "b": {}}).segments


def held(journal, steps=40):
    """What is skipped in each step."""
    return [(journal.is_skipped(step), [skip.what for skip in journal.masks(step)]) for step in range(steps)]


def test_skips_of_a_run_that_goes_on():
    def now(*skip):
        return planned_run({"a": {}, "b": {}}, skip=skip)

    a, b, late = {"source": "a"}, {"source": "b"}, {"steps": "31-33"}
    start = now(a)
    # A new entry holds from here on, an old one as before, one that is gone has held.
    second = now(a, b, late).going_on(start, 10)
    assert [(skip.source, skip.first_step, skip.end_step) for skip in second.skips] == [
        ("a", 0, None),
        ("b", 10, None),
        (None, 10, None),
    ]
    assert held(second)[:10] == held(start)[:10]
    third = now(b).going_on(second, 20)
    assert [(skip.source, skip.first_step, skip.end_step) for skip in third.skips] == [
        ("a", 0, 20),
        (None, 10, 20),
        ("b", 10, None),
    ]
    assert held(third)[:20] == held(second)[:20]
    # Back again: the old entry is history, the new one begins here.
    fourth = now(a, b).going_on(third, 25)
    assert [(skip.source, skip.first_step, skip.end_step) for skip in fourth.skips if skip.source == "a"] == [
        ("a", 0, 20),
        ("a", 25, None),
    ]
    # The same again, at the same step and at another: nothing changes.
    for step in (25, 30):
        assert now(a, b).going_on(fourth, step) == fourth
    # Back to a checkpoint from before an entry: it begins there.
    assert now(a, b).going_on(start, 5).skips[1].first_step == 5
    # One that never held leaves nothing behind.
    future = now({**a, "from_step": 50}).going_on(now(), 10)
    assert [(skip.source, skip.first_step) for skip in future.skips] == [("a", 49)]
    assert now().going_on(future, 20).skips == ()
    assert now({**a, "from_step": 60}).going_on(future, 20).skips[0].first_step == 59
    assert now(a).going_on(future, 20).skips[0].first_step == 49


def test_an_explicit_from_step_cannot_change_the_past():
    def now(*skip):
        return planned_run({"a": {}, "b": {}}, skip=skip)

    with pytest.raises(UserError, match=r"from step 4 of the 10 .*: source 'a': skipped now, not then\.") as error:
        now({"source": "a", "from_step": 4}).going_on(now(), 10)
    assert "remove from_step, or set it to 11 or later" in str(error.value)
    with pytest.raises(UserError, match=r"from step 7 .*: the step: skipped now, not then\."):
        now({"steps": "7-8", "from_step": 1}).going_on(now(), 10)
    with pytest.raises(UserError, match=r"from step 3 .*: a sample of the step: skipped now, not then\."):
        now({"samples": "9-11", "from_step": 1}).going_on(now(), 10)
    with pytest.raises(UserError, match=r"from step 1 .*: documents 3-4 of 'b': skipped then, not now\."):
        now({"source": "b", "documents": ["3-4"], "from_step": 5}).going_on(
            now({"source": "b", "documents": ["3-4"]}), 10
        )
    # What would have held at nothing is no change, nor is another way of writing down the same.
    now({"steps": "11-12", "from_step": 1}).going_on(now(), 10)
    now({"samples": "40-41", "from_step": 1}).going_on(now(), 10)
    now({"steps": "3-5", "from_step": 1}, {"steps": 6, "from_step": 2}).going_on(now({"steps": "3-6"}), 10)


# Going on


SOURCES = {"a": {"weight": 1}, "b": {"weight": 3}}


def test_what_follows_may_change():
    start = planned_run(SOURCES)
    other = {"weights": {"a": 1, "b": 1}, "batch_size": 9}
    # Closed where the run stands, or later; appended to; and changed again before it is reached.
    closed = planned_run(SOURCES, [{"until": "10 steps"}, other]).going_on(start, 10)
    assert len(closed.segments) == 2
    later = planned_run(SOURCES, [{"until": "20 steps"}, other]).going_on(start, 10)
    moved = planned_run(SOURCES, [{"until": "15 steps"}, {"until": "30 steps"}, other]).going_on(later, 12)
    assert [segment.first_step for segment in moved.segments] == [0, 15, 30]
    planned_run(SOURCES).going_on(moved, 15)
    # At the boundary itself nothing of the next phase has been seen; one step on, it has.
    planned_run(SOURCES, [{"until": "10 steps"}, {"sources": ["a"]}]).going_on(closed, 10)
    with pytest.raises(UserError, match=r"from step 11 of the 11 .*batch size 9 -> 4; source 'b' is no longer there"):
        planned_run(SOURCES, [{"until": "10 steps"}, {"sources": ["a"]}]).going_on(closed, 11)
    # Phases that change nothing are only another way of writing it down.
    planned_run(SOURCES, [{"until": "3 steps", "name": "x"}, {"until": "64 steps"}, {}]).going_on(start, 50)
    start.going_on(planned_run(SOURCES, [{"until": "3 steps", "name": "x"}, {}]), 50)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {},
            {"phases": [{"weights": {"a": 1, "b": 1}}]},
            r"from step 1 .*share of 'a' 0.25 -> 0.5; share of 'b' 0.75 -> 0.5",
        ),
        ({}, {"seed": 5}, r"from step 1 of the 30 .*run.seed 1 -> 5\. Set run.seed to 1 again"),
        (
            {},
            {"batch_size": 8},
            r"from step 1 .*batch size 4 -> 8.*batch_size=4 .*blend.phases=\[{until: 30 steps}, {batch_size: 8}\]",
        ),
        ({}, {"sequence_length": 9}, "from step 1 .*sequence length 8 -> 9"),
        ({}, {"phases": [{"slices": {"b": [0, 0.5]}}]}, r"documents of 'b' all -> \[0, 10\)"),
        ({}, {"phases": [{"sources": ["a"]}]}, "source 'b' is no longer there"),
        ({"phases": [{"sources": ["a"]}]}, {}, "source 'b' is new"),
        (
            {},
            {"phases": [{"until": "19 steps"}, {"batch_size": 5}]},
            r"from step 20 of the 30 .*\(sample 76, after 608 tokens\): batch size 4 -> 5.*`until: 30 steps`",
        ),
        (
            {"phases": [{"until": "10 steps"}, {"batch_size": 5}]},
            {"phases": [{"until": "12 steps"}, {"batch_size": 5}]},
            r"from step 11 .*batch size 5 -> 4",
        ),
        (
            {"batch_ramp": {"start": 2, "increment": 2, "tokens": 96}},
            {"batch_ramp": {"start": 2, "increment": 2, "tokens": 97}},
            r"from step 7 of the 30 that are done \(sample 12, after 96 tokens\): batch size 4 -> 2",
        ),
    ],
)
def test_what_was_trained_on_cannot_change(before, after, message):
    before, after = ({"phases": [], **keys} for keys in (before, after))
    with pytest.raises(UserError, match=message):
        planned_run(SOURCES, **after).going_on(planned_run(SOURCES, **before), 30)


def test_datasets_cannot_change():
    start = planned_run(SOURCES)
    changed = plan_journal(make(SOURCES), {"a": MemoryDataset([10] * 10), "b": MemoryDataset([5] * 19)})
    with pytest.raises(UserError, match="source 'b' has 100 -> 95 tokens"):
        changed.going_on(start, 1)
    assert changed.going_on(start, 0) == changed


def test_limits_can_change_until_they_are_reached():
    def limited(epochs, **keys):
        return planned_run({"a": {"weight": 1, "max_epochs": epochs, **keys}, "b": {"weight": 3}})

    # 12 samples are an epoch of a, and 3 of 4 steps' samples are b's: it is reached in step 12 or about it.
    journal = limited(1)
    order = journal.segments[0].order()
    step = next(step for step in range(99) if order.counts(4 * step)[0] == 12)
    limited(2).going_on(journal, step - 1)
    limited(2, on_exhausted="stop").going_on(journal, step - 1)
    planned_run(SOURCES).going_on(journal, step - 1)
    limited(1).going_on(journal, 50)
    for changed in (limited(2), planned_run(SOURCES), limited(1, on_exhausted="repeat")):
        with pytest.raises(
            UserError, match=rf"from step {step} .*'a' reached its max_epochs after 12 .* and later now"
        ):
            changed.going_on(journal, 50)
    with pytest.raises(UserError, match=r"from step \d .*reached its max_epochs later then and after 6 samples .* now"):
        limited(0.5).going_on(journal, 50)
    # The end of a run is no part of what it has seen.
    stopping = limited(1, on_exhausted="stop")
    limited(2, on_exhausted="stop").going_on(stopping, step)
    limited(1.5).going_on(stopping, step)
    # A limit over two phases that write down the same.
    sources = {"a": {"weight": 1, "max_epochs": 1}, "b": {"weight": 3}}
    for until in (5, step + 5):
        planned_run(sources, [{"until": f"{until} steps"}, {}]).going_on(journal, 50)


@settings(deadline=None, max_examples=60)
@given(runs(), st.data())
def test_a_plan_is_accepted_only_if_the_past_is_the_same(run, data):
    """Whatever is changed: where `going_on` accepts it, all samples of the steps that are done are the same."""
    saved = planned(run)
    done = data.draw(st.integers(0, 30))
    config, _ = of_reference(run)
    assert plan_journal(config, of_reference(run)[1]).going_on(saved, done) == saved
    changed = deepcopy(run)
    last = changed.phases[-1]
    what = data.draw(st.sampled_from(["append", "close", "weights", "batch", "limits", "drop"]))
    if what == "append":
        last.until = (done + data.draw(st.integers(1, 9)) + 1000, "steps")
        changed.phases.append(reference.Phase(length=3, batch=2))
    elif what == "close":
        last.until = (data.draw(st.integers(1, 40)), "steps")
        changed.phases.append(replace(last, until=None, batch=data.draw(st.integers(1, 9))))
    elif what == "weights":
        last.weights = {name: data.draw(st.integers(1, 3)) for name in run.sources}
        last.sources = None
    elif what == "batch":
        last.batch += 1
    elif what == "limits":
        for source in changed.sources.values():
            source.max_epochs = 2.5
    else:
        changed.phases[:] = [replace(changed.phases[0], until=None)]
    try:
        now = planned(changed)
    except (UserError, ValidationError):
        return  # phases that end before they begin
    one, two = sampler_of(saved), sampler_of(now)
    done = min([done, *(end.step for end in (one.end(), two.end()) if end)])
    past = [rows(journal, sampler, range(done)) for journal, sampler in ((saved, one), (now, two))]
    lengths = [
        [journal.segments[journal.segment_number(step)].sequence_length for step in range(done)]
        for journal in (saved, now)
    ]
    try:
        now.going_on(saved, done)
    except UserError as error:
        step = int(re.search(r"from step (\d+) of", str(error))[1])
        # Everything before the step that is named is the same.
        assert [row for row in past[0] if row[0] < step - 1] == [row for row in past[1] if row[0] < step - 1]
        assert lengths[0][: step - 1] == lengths[1][: step - 1]
    else:
        assert past[0] == past[1] and lengths[0] == lengths[1]
    if what == "append":
        now.going_on(saved, done)


# What the run decided to pass over


def test_what_was_passed_over_because_of_a_fault_stays_so():
    def now(*skip):
        return planned_run({"a": {}, "b": {}}, skip=skip)

    rewound = now({"source": "a"}).going_on(now(), 10).passing_over((12, 15), 11)
    again = Journal.from_json(json.loads(json.dumps(rewound.to_json())))
    assert again == rewound
    assert [step for step in range(40) if again.is_skipped(step)] == [12, 13, 14]
    # The run file names none of it, and may change.
    for file in (now({"source": "a"}), now(), now({"steps": "13-15"}), now({"steps": "2-30"})):
        for step in (11, 13, 30):
            later = file.going_on(again, step)
            assert all(later.is_skipped(s) for s in (12, 13, 14))
            assert later.why_skipped(12).fault == (
                file.skips == now().skips or file.skips[0].steps is None or step > 12
            )
            assert later.seen(step) == again.seen(step)
    # An entry that names the same steps does not take the decision with it when it leaves the run file.
    named = now({"steps": "13-15"}).going_on(again, 11)
    assert named.why_skipped(12).fault is False
    assert now().going_on(named, 11).why_skipped(12).fault is True


def test_what_another_plan_of_the_run_passes_over_is_taken_over_for_the_steps_to_come():
    start = planned_run({"a": {}, "b": {}}, skip=[{"steps": 4}])
    written = start.passing_over((12, 15), 8).passing_over((20, 22), 18)
    # The checkpoint was written before either was decided.
    known = start.with_faults(written, 8)
    assert known == written
    assert known.with_faults(written, 8) == known
    # What is done stays done, whatever the other plan says of it.
    late = start.with_faults(written, 14)
    assert late.seen(14) == start.seen(14)
    assert [step for step in range(40) if late.is_skipped(step)] == [3, 14, 20, 21]


def test_a_run_without_forks_and_faults_is_written_down_as_ever():
    value = planned_run({"a": {}, "b": {}}, skip=[{"steps": 4}]).to_json()
    assert sorted(value) == ["order_version", "seed", "segments", "skips"]
    assert sorted(value["skips"][0]) == ["documents", "end_step", "first_step", "samples", "source", "steps"]
