"""What is told of a run, by its files; and that nothing is told twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import storage
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.run.heartbeat import node_file
from slurm.notify import notices as module
from slurm.notify.job import JobNotices
from slurm.notify.notices import Notices
from slurm.record.launch_log import LaunchEnd, begin, end
from tests import tiny
from tests.slurm.notify.receivers import received, to_file


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = load(tiny.write_run(tmp_path, {"notify": [to_file(tmp_path / "seen")]}))
    found.run.dir.mkdir()
    return found


def fault(config: Config, step: int, action: str = "skip", kind: str = "spike") -> None:
    row = {"step": step, "attempt": 1, "time": time.time(), "kind": kind, "action": action}
    storage.add_json_line(config.run.dir / "faults.jsonl", row)


def seen(config: Config, *parts: Notices | JobNotices) -> list[tuple[Any, ...]]:
    """Event, step and reason of all notices so far."""
    for each in parts:
        assert each.close() is None if isinstance(each, Notices) else each.close(hurried=False) is None
    return [(each["event"], each["step"], each["reason"]) for each in received(config.run.dir.parent / "seen")]


def silent(*_: object) -> None:
    raise AssertionError(_)


def test_steps_that_went_wrong_are_told_of_once(config: Config) -> None:
    fault(config, 1)  # before anybody was to be told
    first = Notices(config, "train", silent)
    first.remember()
    first.look(0, running=True)
    fault(config, 5)
    for _ in range(3):
        first.look(0, running=True)
    fault(config, 6, kind="nonfinite")
    fault(config, 7)
    first.look(0, running=True)  # too soon after the last notice
    told = seen(config, first)
    assert [each[:2] for each in told] == [("spike", 5)]
    second = Notices(config, "train", silent)  # of the next start of the job
    second.look(0, running=True)
    fault(config, 8, action="rewind")
    second.look(0, running=True)
    fault(config, 9)
    second.look(0, running=False)
    told = seen(config, second)
    assert [each[:2] for each in told] == [("spike", 5), ("spike", 7), ("spike", 8), ("spike", 9)]
    assert told[1][2].startswith("2 steps went wrong") and "goes back" in told[2][2]
    third = Notices(config, "train", silent)
    third.look(0, running=False)
    assert seen(config, third) == told


def test_saves_that_fail_are_told_of_once_for_each_checkpoint(config: Config) -> None:
    def saves(attempt: int, step: int, failed: int) -> None:
        values = {"attempt": attempt, "limit_minutes": 60, "since": time.time() - 120, "step": step, "failed": failed}
        more = {"failed_step": step + 10, "failed_at": time.time(), "reason": "No space left on device"}
        storage.put_json(config.run.dir / "saves.json", {**values, **more})

    for attempt, step, failed in ((1, 10, 1), (2, 10, 0), (2, 10, 1), (2, 10, 2), (3, 10, 1), (3, 20, 0), (3, 20, 1)):
        saves(attempt, step, failed)
        notices = Notices(config, "train", silent)
        notices.look(1, running=True)  # attempt 1 is older than what is watched
        told = seen(config, notices)
    assert [each[:2] for each in told] == [("saves_failing", 20), ("saves_failing", 30)]
    assert "No space left on device" in told[0][2]


def test_a_mirror_that_fails_is_told_of_once_for_each_checkpoint_in_it(config: Config) -> None:
    def mirror(attempt: int, step: int, failed: int, age: float) -> None:
        values = {"attempt": attempt, "to": "s3://b/r", "step": step, "time": 1.0, "waiting": step + 10, "behind": 1}
        more = {"failed": failed, "since": time.time() - age, "reason": "no answer", "is_lost": False}
        storage.put_json(config.run.dir / "mirror.json", {**values, **more})

    states = ((1, 10, 1, 900), (2, 10, 1, 30), (2, 10, 2, 900), (2, 10, 3, 1000), (3, 20, 0, 0), (3, 20, 1, 900))
    for attempt, step, failed, age in states:
        mirror(attempt, step, failed, age)
        notices = Notices(config, "train", silent)
        notices.look(1, running=True)
        told = seen(config, notices)
    assert [each[:2] for each in told] == [("mirror_failing", 10), ("mirror_failing", 20)]
    assert "no answer" in told[0][2] and "15 min" in told[0][2]


def test_an_export_that_failed_is_told_of_once(config: Config) -> None:
    def exported(attempt: int, step: int, failed: str | None) -> None:
        row = {"step": step, "attempt": attempt, "time": time.time(), "seconds": 1.0, "failed": failed}
        storage.add_json_line(config.run.dir / "exports.jsonl", row)

    for attempt, step, failed in ((1, 10, "old"), (2, 20, "No space left on device"), (2, 20, None), (3, 20, "again")):
        exported(attempt, step, failed)
        for _ in range(2):
            notices = Notices(config, "train", silent)
            notices.look(1, running=True)  # attempt 1 is older than what is watched
            told = seen(config, notices)
    assert [each[:2] for each in told] == [("export_failed", 20), ("export_failed", 20)]
    assert "No space left on device" in told[0][2]


def test_a_training_without_a_sign_of_life_has_stalled(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def beat(age: float, phase: str = "step", attempt: int = 2) -> None:
        place = {"rank": 0, "host": "n1", "pid": 1, "attempt": attempt, "step": 12, "phase": phase}
        file = node_file(config.run.dir, 0)
        file.parent.mkdir(exist_ok=True)
        storage.put(file, storage.json_bytes({**place, "time": now - age}).replace(b"\n", b"") + b"\n")

    now = time.time()
    notices = Notices(config, "train", silent)
    for age, phase, attempt, looks in (
        (500, "step", 1, 3),  # of an attempt before
        (500, "end", 2, 3),
        (100, "step", 2, 3),
        (500, "step", 2, 1),
        (100, "step", 2, 1),  # it lives, and was suspended
        (400, "save", 2, 4),
        (300, "step", 2, 2),
    ):
        beat(age, phase, attempt)
        for _ in range(looks):
            notices.look(1, running=True)
    told = seen(config, notices)
    assert [each[:2] for each in told] == [("stalled", 12)] * 2
    assert "rank 0 on n1" in told[0][2] and "save" in told[0][2]


def test_a_start_after_the_scheduler_ended_the_job_is_told_of(config: Config) -> None:
    run = config.run.dir

    def start(restarts: int, how: LaunchEnd | None) -> None:
        job = JobNotices(run, "train", silent, job="7", restarts=restarts)
        job.begin(config, 1)
        place: Any = {"number": 1, "link": 1, "nodes": (), "processes_per_node": 1, "logs": "", "checkpoint": 4}
        launch = begin(run, "train", "7", restarts=restarts, **place)
        if how is not None:
            end(run, launch, how)
            job.ended(how, 0, continued=how.next == "requeue")
        seen(config, job)

    def saved(step: int) -> None:
        (run / f"checkpoints/step-{step:08d}").mkdir(parents=True)

    start(0, LaunchEnd(75, "told to stop", "requeue", 4, 1.0))
    start(1, LaunchEnd(75, "the scheduler ends this job", "scheduler", 6, 2.0))  # preempted
    saved(6)
    start(2, None)  # its node was lost
    saved(9)
    start(3, LaunchEnd(77, "diverged", "end", 4, 3.0))
    for step in (8, 8, 9):  # submitted again when it is done, and with a longer duration
        storage.put_json(run / "exit.json", {"attempt": 1, "code": 0, "reason": "done", "agreed": True, "step": step})
        start(4 + step, LaunchEnd(0, "done", "done", step, 3.0))
    told = seen(config)
    assert [each[0] for each in told] == ["requeued", "requeued", "requeued", "failed", "done", "done"]
    assert [each[1] for each in told[1:3]] == [6, 9]
    assert [each[1] for each in told[-2:]] == [8, 9]
    assert told[0][2] == "told to stop" and "the scheduler ends this job" in told[1][2]
    assert "no end was recorded" in told[2][2] and told[3][2] == "diverged"


def test_a_job_that_has_nothing_to_do_continues_nothing(config: Config) -> None:
    place: Any = {"number": 1, "link": 1, "nodes": (), "processes_per_node": 1, "logs": "", "checkpoint": 4}
    begin(config.run.dir, "train", "7", restarts=0, **place)
    job = JobNotices(config.run.dir, "train", silent, job="7", restarts=1)
    job.begin(config, 1, continues=False)
    assert seen(config, job) == []
    job.begin(config, 1, continues=True)
    assert [each[0] for each in seen(config, job)] == ["requeued"]


def test_no_error_of_any_kind_ends_a_job(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    said, end = list[str](), LaunchEnd(77, "diverged", "end", 4, 3.0)
    job = JobNotices(config.run.dir, "train", said.append, job="7", restarts=0)
    job.begin(config, 1)

    def fails(*_: object) -> None:
        raise RuntimeError("can't do https://user:hunter2@host/")

    for part in ("slurm.notify.job.end_of", "threading.Thread.start"):
        with monkeypatch.context() as patch:
            patch.setattr(part, fails)
            job.ended(end, 0, continued=False)
    job.ended(end, 0, continued=False)
    assert [each[0] for each in seen(config, job)] == ["failed"]
    assert len(said) == 2 and "RuntimeError" in said[0] and "no thread" in said[1] and "hunter2" not in str(said)


def test_stages_before_training_are_told_of_where_they_fail(config: Config) -> None:
    for stage in ("preprocess", "finish"):  # a task of an array, and the job that makes what they have lost
        job = JobNotices(config.run.dir, stage, silent, job="8", restarts=0)  # type: ignore[arg-type]
        job.begin(config, 1)
        for how in (LaunchEnd(0, "done", "done", 0, 1.0), LaunchEnd(1, "3 files are damaged", "end", 0, 1.0)):
            job.ended(how, 0, continued=False)
    assert seen(config, job) == [("failed", None, "3 files are damaged")]


def test_without_notifications_nothing_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tiny.write_run(tmp_path))
    config.run.dir.mkdir()
    fault(config, 1)
    monkeypatch.setattr(module, "read_beat", silent)
    notices = Notices(config, "train", silent)
    notices.remember()
    notices.look(0, running=True)
    notices.send("done", reason="done", key="x")
    notices.close()
    assert [path.name for path in config.run.dir.iterdir()] == ["faults.jsonl"]


def test_hardware_errors_are_told_of_once_for_each_counter_and_attempt(config: Config) -> None:
    def rise(attempt: int, host: str, counter: str, *, minor: bool = False) -> None:
        row = {"time": 1.0, "attempt": attempt, "host": host, "counter": counter, "by": 1, "minor": minor}
        (config.run.dir / "hardware").mkdir(exist_ok=True)
        storage.add_json_line(config.run.dir / "hardware/node-0000.jsonl", row)

    link = "mlx5_0 port 1: link_downed"
    for attempt, host, minor in ((1, "a", False), (2, "a", True), (2, "a", False), (2, "a", False), (3, "a", False)):
        rise(attempt, host, link, minor=minor)
        notices = Notices(config, "train", silent)
        notices.look(1, running=True)  # attempt 1 is older than what is watched
        told = seen(config, notices)
    assert [each[0] for each in told] == ["hardware"] * 2
    rise(3, "b", link)
    rise(3, "c", link)
    notices.look(1, running=True)
    (*_, last) = seen(config, notices)
    assert f"b: {link} +1; c: {link} +1" in last[2]


def test_many_hardware_errors_are_told_of_once_and_evict_nothing(config: Config) -> None:
    (config.run.dir / "hardware").mkdir()
    for node in range(300):
        row = {"time": 1.0, "attempt": 2, "host": f"n{node}", "counter": "x: y", "by": 1, "minor": False}
        storage.add_json_line(config.run.dir / "hardware/node-0000.jsonl", row)
    for _ in range(3):
        notices = Notices(config, "train", silent)
        notices.look(1, running=True)
        told = seen(config, notices)
    assert [each[0] for each in told] == ["hardware"] and "295 other counters" in told[0][2]
