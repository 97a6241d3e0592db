"""Where the time of a run went: sums by hand, and of a run that was killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common.run_files import RunFiles
from pipeline.common.storage import JsonLines
from pipeline.train.run.attempts import append_entry, attempts
from pipeline.train.run.folder import open_run, read_metrics
from pipeline.train.run.goodput import Goodput, goodput
from tests import tiny

PARTS = (
    *("productive", "lost", "waiting", "saving", "validating", "queued", "importing", "starting", "suspended", "down"),
    "other",
)


def begin(run: Path, number: int, time: float, first_step: int, stage: float | None = None) -> None:
    if stage is not None:
        append_entry(run, {"stage": "train", "host": "h", "pid": 1, "start": stage, "event": "start"})
    line = {"event": "attempt", "attempt": number, "time": time, "host": "h", "pid": 1, "layout": {}, "config": ""}
    append_entry(run, {**line, "first_step": first_step})


def end(run: Path, number: int, seconds: float, step: int, code: int | None = 0) -> None:
    line = {"event": "attempt end", "attempt": number, "time": 0.0, "seconds": seconds}
    append_entry(run, {**line, "step": step, "code": code, "reason": ""})


def rows(run: Path, *rows: dict[str, Any]) -> None:
    lines = JsonLines(RunFiles(run).metrics)
    for row in rows:
        lines.write(row)
    lines.close()


def step(attempt: int, number: int, time: float, seconds: float, wait: float = 0.0) -> dict[str, Any]:
    return {
        "step": number,
        "attempt": attempt,
        "time": time,
        "tokens": number,
        "step_seconds": seconds,
        "data_wait": wait,
    }


def parts(found: Goodput | None) -> dict[str, float]:
    assert found is not None
    values = {name: getattr(found, name) for name in PARTS}
    assert sum(values.values()) == pytest.approx(found.wall, rel=1e-9, abs=1e-6)
    assert all(value >= -1e-9 for value in values.values()), values
    return values


def test_before_the_first_attempt_there_is_none(tmp_path: Path) -> None:
    assert goodput(tmp_path) is None


def test_a_run_of_two_attempts_by_hand(tmp_path: Path) -> None:
    """The first starts at 1000, is in its first step from 1010 on, saves step 2, and is killed in step 5."""
    begin(tmp_path, 1, 1004.0, 0, stage=1000.0)
    rows(
        tmp_path,
        step(1, 1, 1012.0, 2.0, 0.5),
        step(1, 2, 1014.0, 2.0, 0.5),
        {"step": 2, "attempt": 1, "time": 1015.0, "save_blocked": 1.0},
        step(1, 3, 1017.0, 2.0),
        {"step": 2, "attempt": 1, "time": 1017.0, "save_seconds": 2.5},
        step(1, 4, 1019.0, 2.0, 0.25),
        {"step": 4, "attempt": 1, "time": 1022.0, "validation_seconds": 3.0, "validation_loss": 1.0},
    )
    end(tmp_path, 1, 20.0, 4, code=None)  # from 1004 until 1024, 2 s in a step that never ended
    begin(tmp_path, 2, 1064.0, 2, stage=1060.0)
    rows(
        tmp_path,
        step(2, 3, 1074.0, 4.0),
        step(2, 4, 1076.0, 2.0),
        step(2, 5, 1078.0, 2.0),
        {"step": 5, "attempt": 2, "time": 1081.0, "save_blocked": 3.0},
    )
    end(tmp_path, 2, 18.0, 5)  # until 1082
    found = goodput(tmp_path)
    assert parts(found) == pytest.approx(
        {
            "productive": 1.5 + 1.5 + 4 + 2 + 2,
            "lost": 2.0 + 1.75,
            "waiting": 0.5 + 0.5 + 0.25,
            "saving": 1.0 + 3.0,
            "validating": 3.0,
            "queued": 0.0,
            "importing": 4.0 + 4.0,
            "starting": 6.0 + 6.0,
            "suspended": 0.0,
            "down": 1060.0 - 1024.0,
            "other": 2.0 + 1.0,
        }
    )
    assert found is not None and found.wall == pytest.approx(82.0)
    assert found.share == pytest.approx(11.0 / 82.0)
    text = str(found)
    assert text.startswith("13.4 % of 1 min wall time (2 attempts); lost 4.6 %")
    assert orjson.loads(orjson.dumps(found.to_json()))["share"] == found.share


def launch(run: Path, event: str, time: float, **more: Any) -> None:
    append_entry(run, {"event": event, "time": time, "stage": "train", "job": "77", **more})


def test_a_job_that_waits_in_the_queue_imports_and_is_suspended(tmp_path: Path) -> None:
    launch(tmp_path, "launch", 1000.0)
    begin(tmp_path, 1, 1030.0, 0, stage=1020.0)
    rows(
        tmp_path,
        step(1, 1, 1042.0, 2.0),
        step(1, 2, 1144.0, 2.0) | {"suspended": 100.0},
        {"step": 2, "attempt": 1, "time": 1145.0, "save_blocked": 1.0},
    )
    end(tmp_path, 1, 115.0, 2, code=75)  # until 1145; its launch ends before its ranks have left
    launch(tmp_path, "launch end", 1144.0, next="requeue")
    launch(tmp_path, "launch", 1200.0)
    begin(tmp_path, 2, 1210.0, 2, stage=1208.0)
    rows(tmp_path, step(2, 3, 1215.0, 1.0))
    end(tmp_path, 2, 5.0, 3, code=1)  # until 1215, within the job it is launched again
    launch(tmp_path, "launch end", 1216.0, next="relaunch")
    launch(tmp_path, "launch", 1217.0)
    begin(tmp_path, 3, 1225.0, 2, stage=1220.0)
    rows(tmp_path, step(3, 3, 1229.0, 1.0))
    end(tmp_path, 3, 4.0, 3)
    found = goodput(tmp_path)
    assert parts(found) == pytest.approx(
        {
            "productive": 2.0 + 2.0 + 1.0,
            "lost": 1.0,
            "waiting": 0.0,
            "saving": 1.0,
            "validating": 0.0,
            "queued": 1200.0 - 1145.0,
            "importing": 30.0 + 10.0 + 8.0,
            "starting": 10.0 + 4.0 + 3.0,
            "suspended": 100.0,
            "down": 2.0,
            "other": 0.0,
        }
    )
    assert found is not None and found.wall == pytest.approx(229.0)
    assert "suspended 43.7 %" in str(found) and "queued 24.0 %" in str(found)


def test_what_an_older_version_has_noted_can_be_read() -> None:
    values = dict.fromkeys((*PARTS, "wall"), 1.0)
    old = {key: value for key, value in values.items() if key not in ("queued", "importing", "suspended")}
    assert Goodput(**old, attempts=1).suspended == 0.0


def test_an_attempt_that_dies_before_its_first_step_has_lost_what_was_not_saved(tmp_path: Path) -> None:
    begin(tmp_path, 1, 0.0, 0)
    rows(tmp_path, *(step(1, number, 10.0 + number, 1.0) for number in range(1, 11)))
    end(tmp_path, 1, 20.0, 10, code=1)
    begin(tmp_path, 2, 30.0, 4)
    end(tmp_path, 2, 5.0, 4, code=1)
    begin(tmp_path, 3, 40.0, 8)  # somebody has brought back a newer checkpoint: it does not make steps 5 to 8 count
    end(tmp_path, 3, 5.0, 8, code=1)
    found = parts(goodput(tmp_path))
    assert (found["productive"], found["lost"], found["starting"]) == (4.0, 6.0, 10.0 + 5.0 + 5.0)
    assert found["down"] == pytest.approx(10.0 + 5.0)


def test_rows_of_a_process_that_had_lost_the_lock_count_for_nothing(tmp_path: Path) -> None:
    begin(tmp_path, 1, 0.0, 0)
    rows(tmp_path, step(1, 1, 2.0, 1.0), step(1, 2, 3.0, 1.0))
    end(tmp_path, 1, 5.0, 2)
    begin(tmp_path, 2, 10.0, 1)
    rows(tmp_path, step(2, 2, 12.0, 1.0), step(1, 3, 12.5, 9.0), step(2, 3, 13.0, 1.0), step(7, 4, 14.0, 5.0))
    end(tmp_path, 2, 5.0, 3)
    found = parts(goodput(tmp_path))
    assert (found["productive"], found["lost"]) == (3.0, 1.0)


def test_a_clock_that_is_set_back_makes_no_part_larger_than_the_whole(tmp_path: Path) -> None:
    begin(tmp_path, 1, 1000.0, 0)
    rows(tmp_path, step(1, 1, 500.0, 10.0), step(1, 2, 510.0, 10.0))
    end(tmp_path, 1, 3.0, 2)
    begin(tmp_path, 2, 600.0, 2)
    end(tmp_path, 2, 3.0, 2)
    assert parts(goodput(tmp_path))["productive"] == 20.0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_adds_up_and_equals_a_count_step_by_step(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    now, saved = 1000.0, 0
    made: dict[int, float] = {}
    spent = dict.fromkeys(PARTS, 0.0)

    def spend(what: str, seconds: float) -> float:
        nonlocal now
        spent[what] += seconds
        now += seconds
        return seconds

    for number in range(1, 8):
        began = now
        begin(tmp_path, number, now, saved)
        for later in [each for each in made if each > saved]:
            spent["lost"] += made.pop(later)
        spend("starting", chance.uniform(0, 5))
        steps = chance.choice([0, chance.randint(1, 12)])
        for each in range(saved + 1, saved + 1 + steps):
            wait, own = spend("waiting", chance.uniform(0, 1)), chance.uniform(1, 2)
            now += own
            made[each] = own
            rows(tmp_path, step(number, each, now, own + wait, wait))
            if chance.random() < 0.3:
                blocked = spend("saving", chance.uniform(0, 1))
                rows(tmp_path, {"step": each, "attempt": number, "time": now, "save_blocked": blocked})
                saved = each
            if chance.random() < 0.3:
                validating = spend("validating", chance.uniform(0, 1))
                rows(tmp_path, {"step": each, "attempt": number, "time": now, "validation_seconds": validating})
        if steps:
            spend("other", chance.uniform(0, 2))
        end(tmp_path, number, now - began, saved)
        if number < 7:
            spend("down", chance.uniform(0, 50))
    spent["productive"] = sum(made.values())
    assert parts(goodput(tmp_path)) == pytest.approx(spent, abs=1e-6)


def test_an_attempt_that_still_runs_counts_until_now(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.begin(0, layout={}, config="")
        before = goodput(tmp_path)
        time.sleep(0.05)
        after = goodput(tmp_path)
        assert before is not None and after is not None and after.wall >= before.wall + 0.05
    ended = goodput(tmp_path)
    time.sleep(0.05)
    assert goodput(tmp_path) == ended


@pytest.mark.slow
def test_a_run_that_was_killed_adds_up(root: Path) -> None:
    run = root / "killed"
    keys = (f"run.dir={run}", "train.duration=4000 steps", "train.checkpoint.every_steps=7", "train.checkpoint.keep=50")
    command = tiny.command("train", root / "run.yaml", *keys)
    first = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 100
        # Past a checkpoint, and not just at one: then some steps are lost.
        while not any(row["step"] > 7 and row["step"] % 7 == 3 for row in read_metrics(run)[-1:]):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.002)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    reached = read_metrics(run)[-1]["step"]
    seen = goodput(run)
    (killed,) = attempts(run)
    assert killed.step == reached and killed.outcome == "killed"
    assert parts(seen)["down"] == 0.0 and parts(seen)["lost"] == 0.0
    done = tiny.pipeline("train", root / "run.yaml", *keys[:1], f"train.duration={reached + 3} steps", *keys[2:])
    last = time.time()
    assert done.returncode == 0, done.stderr
    saved = attempts(run)[1].first_step
    assert saved % 7 == 0 and saved <= reached
    every = [orjson.loads(line) for line in RunFiles(run).metrics.read_bytes().splitlines()]
    trained = [row for row in every if "step_seconds" in row]
    lost = [row for row in trained if row["attempt"] == 1 and row["step"] > saved]
    counts = [row for row in trained if row not in lost]
    assert [row["step"] for row in counts] == list(range(1, reached + 4))

    def own(rows: list[dict[str, Any]]) -> float:
        return sum(row["step_seconds"] - row["data_wait"] for row in rows)

    found = goodput(run)
    sums = parts(found)
    assert sums["productive"] == pytest.approx(own(counts))
    assert sums["lost"] == pytest.approx(own(lost))
    assert sums["waiting"] == pytest.approx(sum(row["data_wait"] for row in trained))
    assert sums["saving"] == pytest.approx(sum(row.get("save_blocked", 0.0) for row in every))
    assert sums["validating"] == pytest.approx(sum(row.get("validation_seconds", 0.0) for row in every))
    assert found is not None and 0 < found.wall <= last - first
    (line,) = [line for line in done.stdout.splitlines() if "wall time (2 attempts)" in line]
    assert line.startswith("train: goodput ")


def test_many_rows_take_little_memory_and_are_read_once(tmp_path: Path) -> None:
    """A row a step, from a file that is much larger than what is kept."""
    import tracemalloc

    steps = 20_000
    begin(tmp_path, 1, 0.0, 0)
    rows(tmp_path, *({**step(1, each, float(each), 1.0), "text": "x" * 500} for each in range(1, steps + 1)))
    end(tmp_path, 1, float(steps), steps)
    tracemalloc.start()
    try:
        found = goodput(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None and found.productive == steps
    assert peak < RunFiles(tmp_path).metrics.stat().st_size / 10


def test_rows_that_make_no_sense_count_for_nothing_and_take_no_memory(tmp_path: Path) -> None:
    begin(tmp_path, 1, 0.0, 0)
    odd: list[dict[str, Any]] = [
        {**step(1, 1, 1.0, 1.0), "time": None},
        {**step(1, 2, 2.0, 1.0), "time": "late"},
        {**step(1, 3, 3.0, 1.0), "step_seconds": None},
        {**step(1, 4, 4.0, 1.0), "data_wait": "x"},
        {**step(1, 5, 5.0, 1.0), "step_seconds": 1e300},
        step(1, 10**12 + 1, 6.0, 1.0),
        step(1, -3, 6.0, 1.0),
        {**step(1, 7, 7.0, 1.0), "step": True},
        {**step(1, 7, 7.0, 1.0), "attempt": [1]},
        step(1, 10**12, 8.0, 1.0),  # the steps between have no row, and take no room
    ]
    rows(tmp_path, *odd, *(step(1, number, 10.0 + number, 1.0) for number in range(6, 11)))
    end(tmp_path, 1, 30.0, 10)
    found = parts(goodput(tmp_path))
    # Of step 4 only the wait is not known; the step at 10^12 was gone back from.
    assert (found["productive"], found["waiting"], found["lost"]) == (1.0 + 5.0, 0.0, 1.0)
