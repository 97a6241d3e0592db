"""When to save and what to keep: closed forms, and what must hold whatever the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.checkpoint import CheckpointConfig, ExportConfig
from pipeline.train.checkpoint.policy import (
    due,
    exports_to_prune,
    is_exported,
    is_permanent,
    most_exports,
    to_export,
    to_prune,
)


def test_saves_are_due_at_both_rhythms_and_at_the_end() -> None:
    config = CheckpointConfig(every_steps=4, keep_every=6)
    assert [step for step in range(1, 18) if due(config, step, 17)] == [4, 6, 8, 12, 16, 17]
    assert [step for step in range(1, 18) if due(CheckpointConfig(every_steps=5), step, 17)] == [5, 10, 15, 17]


@pytest.mark.parametrize(
    ("keep", "keep_every", "steps", "latest", "good", "gone"),
    [
        (2, None, [10, 20, 30, 40], 40, [], [10, 20]),
        (2, 20, [10, 20, 30, 40], 40, [], [10]),
        (1, 20, [10, 20, 30, 40, 50], 50, [], [10, 30]),
        (1, None, [10, 20, 30], 30, [20], [10]),
        (5, None, [10, 20, 30], 30, [], []),
        (1, None, [], None, [], []),
        (1, None, [10, 20, 30], None, [], []),
        # What is newer than the one the run goes on from takes nobody's place.
        (1, None, [10, 20, 30], 20, [], [10]),
        (1, None, [10, 20, 30], 10, [], []),
    ],
)
def test_the_newest_and_the_permanent_ones_stay(
    keep: int, keep_every: int | None, steps: list[int], latest: int | None, good: list[int], gone: list[int]
) -> None:
    assert to_prune(CheckpointConfig(keep=keep, keep_every=keep_every), steps, latest, good) == gone


configs = st.builds(
    CheckpointConfig,
    every_steps=st.integers(1, 9),
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 12),
)


@given(configs, st.sets(st.integers(1, 60)), st.data())
def test_nothing_that_is_needed_is_ever_doomed(config: CheckpointConfig, steps: set[int], data: st.DataObject) -> None:
    latest = data.draw(st.sampled_from(sorted(steps)) if steps else st.none())
    good = data.draw(st.sets(st.sampled_from(sorted(steps)), max_size=2) if steps else st.just(set()))
    gone = to_prune(config, sorted(steps, reverse=True), latest, good)
    assert gone == sorted(set(gone))
    assert set(gone) <= steps - good - {latest}
    assert all(latest is not None and step < latest for step in gone)
    assert not any(is_permanent(config, step) for step in gone)
    stay = sorted(steps - set(gone))
    assert stay[-config.keep :] == sorted(steps)[-config.keep :]
    assert not to_prune(config, stay, latest, good)


@given(configs, st.integers(1, 80), st.sets(st.integers(1, 80)))
def test_a_run_never_holds_more_than_the_rolling_and_the_permanent_ones(
    config: CheckpointConfig, total: int, asked: set[int]
) -> None:
    """Saves at the due steps and whenever somebody asks, each followed by a removal, as a run does it."""
    there: list[int] = []
    permanent = 0
    for step in range(1, total + 1):
        if not (due(config, step, total) or step in asked):
            continue
        there.append(step)
        permanent += is_permanent(config, step)
        gone = to_prune(config, there, step)
        assert step not in gone
        there = [each for each in there if each not in gone]
        assert len(there) <= config.keep + permanent
    assert there[-1] == total
    if config.keep_every:
        assert set(range(config.keep_every, total + 1, config.keep_every)) <= set(there)


def test_exports_are_of_every_so_many_steps_and_of_the_last_one() -> None:
    config = CheckpointConfig(every_steps=4, export=ExportConfig(every_steps=6, keep=2))
    assert [step for step in range(1, 15) if due(config, step, 14)] == [4, 6, 8, 12, 14]
    assert [step for step in range(1, 15) if is_exported(config, step, 14)] == [6, 12, 14]
    # What would be removed at once is not made.
    assert to_export(config, [4, 6, 8, 12, 14], [], 14) == [12, 14]
    assert to_export(config, [6, 12], [12], 14) == [6]
    assert to_export(config, [6, 12, 14], [12, 14], 14) == []
    assert exports_to_prune(config, [18, 6, 12]) == [6]
    assert [most_exports(config, total) for total in (5, 12, 14, 90)] == [1, 2, 3, 3]


def test_without_the_key_nothing_is_exported_and_without_keep_all_stay() -> None:
    none, all_stay = CheckpointConfig(), CheckpointConfig(export=ExportConfig(every_steps=5))
    assert not is_exported(none, 10, 10) and to_export(none, [10], [], 10) == [] and most_exports(none, 10) == 0
    assert exports_to_prune(all_stay, range(100)) == [] and most_exports(all_stay, 51) == 11
