"""The plan of a run that was forked: the parent's past, and the run file from there on."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import label, micro_batch_size, plan_journal
from tests.data.order.test_phases import of_reference, planned, rows, run_file, runs, sampler_of
from tests.data.preprocess.memory import MemoryDataset

DATA = {"a": MemoryDataset([10] * 10), "b": MemoryDataset([5] * 20), "c": MemoryDataset([7] * 30)}
SOURCES = {"a": {"weight": 1}, "b": {"weight": 3}}


def plan(phases=(), sources=SOURCES, saved=None, **keys):
    datasets = {name: DATA[name] for name in sources}
    return plan_journal(run_file(sources, phases, **keys), datasets, saved)


def order(journal, steps):
    return rows(journal, sampler_of(journal), range(steps))


def fork(parent, step, *args, **keys):
    """As `pipeline fork` plans, through JSON as in a checkpoint."""
    past = Journal.from_json(json.loads(json.dumps(parent.forked(step).to_json())))
    return plan(*args, saved=past, **keys).going_on(past, step)


@settings(deadline=None, max_examples=60)
@given(runs(), st.integers(1, 40))
def test_the_same_run_file_gives_the_continuation_of_the_parent(run, step):
    """Phases, slices, limits, ramps: the whole order is that of the run that was never forked."""
    parent = planned(run)
    end = sampler_of(parent).end()
    step = min([step, *([end.step] if end else [])])
    if step < 1:
        return
    config, datasets = of_reference(run)
    past = parent.forked(step)
    child = plan_journal(config, datasets, past).going_on(past, step)
    assert child.segments == parent.segments
    assert sampler_of(child).end() == end
    assert (child.fork_step, parent.fork_step) == (step, 0)


@pytest.mark.parametrize("step", [1, 7, 23])
def test_another_future_is_what_a_phase_at_that_step_would_be(step):
    """The parent could have had the new blend as a phase: each source goes on from where it stands."""
    future = {"weights": {"a": 5, "b": 1, "c": 2}, "sequence_length": 6, "batch_size": 3, "name": "cool"}
    sources = {**SOURCES, "c": {"weight": 1}}
    old = {"weights": {"a": 1, "b": 3}}
    whole = plan([{**old, "until": f"{step} steps"}, future], sources)
    child = fork(plan(), step, [future], sources)
    assert order(child, 40) == order(whole, 40)
    assert order(child, step) == order(plan(), step)
    # Written as the whole of the run file, without phases.
    flat = {"a": {"weight": 5}, "b": {"weight": 1}, "c": {"weight": 2}}
    assert order(fork(plan(), step, [], flat, sequence_length=6, batch_size=3), 40) == order(whole, 40)
    # The parent's part counts as no phase of the run file.
    config = run_file(sources, [future])
    assert [label(config, child, number) for number in range(2)] == ["parent", "1 cool"]
    assert micro_batch_size(config, child, 1, 1) == 3


def test_ends_of_phases_count_from_the_start_of_the_parent():
    phases = [{"until": "6 steps"}, {"until": "20 steps", "weights": {"a": 1}}, {"weights": {"b": 1}}]
    child = fork(plan(), 10, phases)
    assert [segment.first_step for segment in child.segments] == [0, 10, 20]
    assert [sorted(segment.sources) for segment in child.segments] == [["a", "b"], ["a"], ["b"]]


def test_a_forked_run_goes_on_and_is_forked_again():
    future = [{"weights": {"a": 5, "b": 1}}]
    child = fork(plan(), 10, future)
    # Resumed by the same run file and by one with another phase at its end.
    for step in (10, 15, 30):
        assert plan(future, saved=child).going_on(child, step) == child
    longer = [{**future[0], "until": "30 steps"}, {"weights": {"b": 1}}]
    later = plan(longer, saved=child).going_on(child, 15)
    assert order(later, 30) == order(child, 30) and later.segments[-1].first_step == 30
    with pytest.raises(UserError, match=r"from step 11 of the 15 .*share of 'a'"):
        plan([{"weights": {"a": 1, "b": 1}}], saved=child).going_on(child, 15)
    # Without its past it would be another run.
    with pytest.raises(UserError, match="now gives other data"):
        plan(future).going_on(child, 15)
    grandchild = fork(child, 20, [{"weights": {"a": 1, "b": 9}}])
    assert [segment.first_step for segment in grandchild.segments] == [0, 10, 20]
    assert order(grandchild, 20) == order(child, 20)
    assert plan([{"weights": {"a": 1, "b": 9}}], saved=grandchild).going_on(grandchild, 35) == grandchild
    # A fork of the same file is the child's own continuation.
    assert fork(child, 20, future).segments == child.segments


def test_a_phase_of_the_parent_that_begins_at_the_fork_stays_one():
    """Also one that changes nothing: the plan is written down as the parent's is."""
    phases = [{"until": "10 steps", "weights": {"a": 1, "b": 3}}, {}]
    parent = plan(phases)
    assert [segment.first_step for segment in parent.segments] == [0, 10]
    child = fork(parent, 10, phases)
    assert child.segments == parent.segments
    assert plan(phases, saved=child).going_on(child, 15) == child
    # Within a phase there is nothing to note.
    assert [segment.first_step for segment in fork(parent, 5, phases).segments] == [0, 10]


def test_epochs_of_the_parent_count():
    """A source that may give one epoch more gives what the parent has left of it."""
    limited = {"a": {"weight": 1, "max_epochs": 1}, "b": {"weight": 1}}
    child = fork(plan(), 10, [], limited)
    drawn = sum(1 for row in order(plan(), 10) if row[2] == "a")
    assert child.segments[1].sources["a"].cap == (100 - 8 * drawn) // 8
    assert sum(1 for row in order(child, 60) if row[2] == "a") == drawn + (100 - 8 * drawn) // 8


def test_skips_of_the_parent_end_with_the_fork_and_faults_do_not():
    parent = plan(skip=[{"source": "a"}]).passing_over((14, 16), 8)
    child = fork(parent, 10, [{"weights": {"a": 1, "b": 1}}], skip=[{"steps": 30}])
    assert [(skip.source, skip.steps, skip.first_step, skip.end_step, skip.fault) for skip in child.skips] == [
        ("a", None, 0, 10, False),
        (None, (29, 30), 10, None, False),
        (None, (14, 16), 8, None, True),
    ]


def test_what_cannot_be_forked():
    with pytest.raises(UserError, match=r"source 'b' was read in the 10 steps .*not in data.sources"):
        fork(plan(), 10, [], {"a": {"weight": 1}})
    with pytest.raises(UserError, match=r"run.seed 1 -> 2\. Set run.seed to 1"):
        fork(plan(), 10, seed=2)
