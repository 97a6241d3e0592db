"""What follows the end of a job's processes, case by case, and which nodes are blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm.job.restart_policy import Situation, choose_nodes, crashes_in_a_row, decide, stops_in_a_row, suspects
from slurm.record.launch_log import Launch, LaunchEnd

WELL = Situation(
    stage="train",
    code=75,
    chain="requeue",
    cancelled=False,
    asked_to_stop=False,
    terminated=False,
    running=True,
    over_time=False,
    crashes=0,
    max_restarts=2,
    nodes=2,
    needed=2,
)


@pytest.mark.parametrize(
    ("change", "following"),
    [
        ({}, "requeue"),
        ({"stops": 19}, "requeue"),
        ({"stops": 20}, "end"),
        ({"chain": "singleton"}, "next link"),
        ({"chain": "afterany"}, "next link"),
        ({"chain": "none"}, "end"),
        ({"code": 0}, "done"),
        ({"code": 0, "cancelled": True}, "done"),
        ({"cancelled": True}, "end"),
        ({"asked_to_stop": True}, "end"),
        ({"terminated": True}, "scheduler"),
        ({"running": False}, "scheduler"),
        ({"terminated": True, "running": False, "over_time": True}, "requeue"),
        ({"code": 2}, "end"),
        ({"code": 77}, "end"),
        ({"code": 79, "crashes": 1}, "end"),
        ({"code": 80, "crashes": 1}, "end"),
        ({"code": 80, "crashes": 1, "chain": "requeue", "nodes": 1}, "end"),
        ({"code": 130}, "end"),
        ({"code": 1, "crashes": 1}, "relaunch"),
        ({"code": 76, "crashes": 2}, "relaunch"),
        ({"code": 1, "crashes": 3}, "end"),
        ({"code": 1, "crashes": 1, "nodes": 1}, "requeue"),
        ({"code": 1, "crashes": 1, "nodes": 1, "chain": "afterany"}, "next link"),
        ({"code": 78, "crashes": 1, "nodes": 1}, "requeue"),
        ({"code": 1, "crashes": 1, "terminated": True}, "scheduler"),
        ({"code": 1, "crashes": 1, "over_time": True, "running": False}, "requeue"),
        ({"code": 1, "crashes": 1, "cancelled": True}, "end"),
        ({"stage": "eval", "code": 1, "crashes": 1}, "end"),
        ({"stage": "preprocess"}, "requeue"),
        ({"stage": "preprocess", "chain": "none"}, "end"),
    ],
)
def test_what_follows(change: dict[str, Any], following: str) -> None:
    assert decide(replace(WELL, **change))[0] == following


def launch(
    number: int, nodes: str, code: int | None = 1, *, node: str | None = None, checkpoint: int = 10, failed: str = ""
) -> Launch:
    began = Launch("train", "7", 0, number, 1, tuple(nodes.split()), 2, f"logs/{number}", checkpoint, "head", 1, number)
    if code is None:
        return began
    end = LaunchEnd(code, "", "relaunch", checkpoint, number + 1.0, node=node, failed_nodes=tuple(failed.split()))
    return replace(began, end=end)


def test_crashes_are_counted_from_the_last_progress() -> None:
    row = [launch(1, "a b", checkpoint=5), launch(2, "a b"), launch(3, "a b"), launch(4, "a b")]
    assert crashes_in_a_row(row, checkpoint=10) == 3
    assert crashes_in_a_row(row, checkpoint=11) == 0, "a newer checkpoint begins a new count"
    assert crashes_in_a_row([*row, launch(5, "a b", 75)], checkpoint=10) == 0, "so does a stop that was asked for"
    assert crashes_in_a_row([*row, launch(5, "a b", None)], checkpoint=10) == 4, "one without a word is a crash"
    assert crashes_in_a_row([], checkpoint=0) == 0


def test_nodes_that_crashes_have_in_common_are_suspected() -> None:
    assert suspects([launch(1, "a b")], 10) == [], "once is nothing"
    assert suspects([launch(1, "a b", node="b"), launch(2, "b c", node="b")], 10) == ["b"]
    assert suspects([launch(1, "a b"), launch(2, "b c")], 10) == ["b"]
    assert suspects([launch(1, "a b"), launch(2, "a b")], 10) == [], "all that there were: no reason to blame one"
    assert suspects([launch(1, "a b", node="a"), launch(2, "a b", node="b")], 10) == [], "now this, now that"
    assert suspects([launch(1, "a b", failed="a"), launch(2, "a c", failed="a")], 10) == ["a"]
    assert suspects([launch(1, "a b", node="b"), launch(2, "b c", node="b"), launch(3, "b c", 75)], 10) == []


def test_nodes_are_chosen_in_order_and_suspects_last() -> None:
    assert choose_nodes(["a", "b", "c", "d"], 2, [], []) == ["a", "b"]
    assert choose_nodes(["a", "b", "c", "d"], 2, ["a"], ["b"]) == ["c", "d"]
    assert choose_nodes(["a", "b", "c"], 2, ["c"], ["a"]) == ["a", "b"], "better a suspect than none"
    assert choose_nodes(["a", "b"], 2, ["b"], []) == ["a"]


def test_stops_without_a_newer_checkpoint_are_counted() -> None:
    def launch(code: int, checkpoint: int, following: Any = "requeue") -> Launch:
        end = LaunchEnd(code, "", following, checkpoint, 0.0)
        return Launch("train", "1", 0, 1, 1, (), 1, "", checkpoint, "n", 1, 0.0, end)

    past = [launch(75, 5), launch(75, 10), launch(75, 10, "scheduler"), launch(75, 10, "next link")]
    assert [stops_in_a_row(past, checkpoint) for checkpoint in (10, 11)] == [2, 0]
    assert stops_in_a_row([*past, launch(1, 10)], 10) == 0
