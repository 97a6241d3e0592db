"""Ends of training jobs that nobody wants, on a real controller: what is lost, and how the run goes on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import orjson
import pytest

from pipeline.common import storage
from pipeline.train.run.lock import Lock
from slurm import jobs, scheduler
from slurm.status.command import status
from tests import tiny
from tests.slurm.notify.receivers import received, to_file
from tests.slurm.training import Run, profile_with

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


def test_a_rank_crashes(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_saved(10)
    train.kill(3)
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert (second.job, second.restarts, second.number) == (job, 0, 2)
    assert first.end is not None and first.end.next == "relaunch"
    assert (first.end.rank, first.end.node) == (3, first.nodes[1])
    assert "SIGKILL" in first.end.reason
    assert second.checkpoint >= 10
    files = {file.name for file in (train.folder / first.logs).iterdir()}
    assert files == {"srun.log", "rank-0000.log", "node-0000.log", "node-0001.log", "errors.jsonl"}
    assert len(list((train.folder / "heartbeats").iterdir())) == 2, "one for each node"
    log = tiny.pipeline("logs", train.folder, "--attempt", "1", "--rank", "2")
    assert "error: rank 2 has lost another process of the run" in log.stdout, log.stdout
    assert "SIGKILL" in tiny.pipeline("logs", train.folder, "--attempt", "1", "--first-error").stdout


def batch_process(job: str) -> int | None:
    """The Python of the batch process of a job."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, given = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            if b"slurm.job.batch_entry" in words and f"SLURM_JOB_ID={job}".encode() in given.split(b"\0"):
                return int(entry.name)
    return None


def kill_batch_process(job: str) -> None:
    pid = batch_process(job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_the_batch_process_is_killed(train: Run, whole: Path, tmp_path: Path) -> None:
    """As the kernel does where memory runs out; its script requeues the job, which is told of at the next start."""
    seen = tmp_path / "seen"
    train.overrides += [f"notify={orjson.dumps([to_file(seen)]).decode()}"]
    (job,) = train.submit()
    train.until_saved(10)
    ranks = [train.pid(rank) for rank in range(4)]
    kill_batch_process(job)
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), "no rank of the first start is left by then"
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert first.end is not None and (first.end.code, first.end.next) == (1, "requeue")
    assert "signal 9" in first.end.reason and first.end.node == first.nodes[0]
    assert (second.job, second.restarts) == (job, 1) and second.checkpoint >= 10
    (told,) = [each for each in received(seen) if each["event"] == "requeued"]
    assert first.end.reason in told["reason"], told


@pytest.mark.parametrize("train", [("slurm.max_restarts=1", "train.checkpoint.every_steps=1000")], indirect=True)
@pytest.mark.slow
def test_a_batch_process_that_is_killed_again_and_again_is_not_started_for_ever(train: Run) -> None:
    (job,) = train.submit()
    for number in (1, 2):
        train.until(partial(train.beats, number, 1), why=f"signs of life of launch {number}")
        kill_batch_process(job)
    train.until_over()
    assert [launch.end and launch.end.next for launch in train.launches()] == ["requeue", "end"]
    assert scheduler.jobs([job])[job].state == "FAILED"
    train.check_left()


@pytest.mark.slow
@pytest.mark.parametrize("train", [("slurm.chain=afterany", "slurm.links=2")], indirect=True)
def test_the_batch_process_of_a_chain_job_is_killed(train: Run, whole: Path) -> None:
    first, second = train.submit()
    train.until_saved(10)
    kill_batch_process(first)
    train.until_over()
    train.check(whole)
    one, two = train.launches()
    assert one.end is not None and one.end.next == "next link"
    assert two.job == second and two.checkpoint >= 10


@pytest.mark.slow
def test_a_rank_hangs(train: Run, whole: Path) -> None:
    train.submit()
    train.until_saved(10)
    train.kill(2, signal.SIGSTOP)
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert first.end is not None and (first.end.code, first.end.next) == (76, "relaunch"), first.end
    assert second.checkpoint >= 10
    hang = sorted((train.folder / "logs" / "hang-0001").iterdir())
    assert [file.name for file in hang] == ["flight-recorder-node-0000.jsonl", "flight-recorder-node-0001.jsonl"]
    assert {row["rank"] for row in storage.read_json_lines(hang[0])} == {0, 1}


@pytest.mark.parametrize("train", [("slurm.max_restarts=1", "train.checkpoint.every_steps=1000")], indirect=True)
@pytest.mark.slow
def test_crashes_without_progress_end_the_chain(train: Run) -> None:
    (job,) = train.submit()
    for number in (1, 2):
        train.until(partial(train.beats, number, 1), why=f"signs of life of launch {number}")
        train.kill(1)
    train.until_over()
    first, second = (launch.end for launch in train.launches())
    assert first is not None and second is not None
    assert (first.next, second.next) == ("relaunch", "end")
    assert scheduler.jobs([job])[job].state == "FAILED"
    report = (train.folder / "slurm" / "report.txt").read_text()
    assert "slurm.max_restarts=1" in report and "rank 1 on" in report
    train.check_left()


@pytest.mark.parametrize("train", [("slurm.train.options={begin: now+10}",)], indirect=True)
def test_what_is_refused_is_not_started_again(train: Run) -> None:
    (job,) = train.submit()
    lock = Lock.take(train.folder)  # somebody trains by hand meanwhile
    train.until_over()
    lock.release()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (2, "end")
    assert f"run folder {train.folder} is in use" in launch.end.reason
    assert scheduler.jobs([job])[job].state == "FAILED"
    train.check_left()


@pytest.mark.parametrize("train", [("train.optimizer.lr=1e30", "train.faults.on_nonfinite=stop")], indirect=True)
def test_numbers_that_go_wrong_end_the_run(train: Run) -> None:
    train.submit()
    train.until_over()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (77, "end")
    train.check_left()


@pytest.mark.slow
def test_the_controller_is_away_when_the_job_has_to_decide(train: Run, whole: Path) -> None:
    (job,) = train.submit()
    train.until_step(12)
    controller = train.cluster.daemons()["slurmctld"]
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    for rank in range(4):
        train.kill(rank, signal.SIGUSR2)
    train.until((train.folder / "exit.json").exists, why="the end of the processes")
    time.sleep(3)
    train.cluster.restart()
    train.until(lambda: len(train.launches()) == 2, why="the second start")
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert first.end is not None and (first.end.code, first.end.next) == (75, "requeue")
    assert (second.job, second.restarts, second.checkpoint) == (job, 1, first.end.checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("train", [("train.duration=100000 steps",)], indirect=True)
def test_the_controller_is_away_for_a_minute_in_the_middle_of_a_run(train: Run) -> None:
    train.submit()
    train.until_step(12)
    controller = train.cluster.daemons()["slurmctld"]
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    before = train.step()
    time.sleep(60)
    assert train.step() > before, "training does not ask the controller"
    (found,) = status({train.folder: None})
    assert found.state == "running" and found.scheduler is not None
    train.cluster.restart()
    assert tiny.pipeline("cancel", train.folder).returncode == 0
    train.until_over()
    (launch,) = train.launches()
    assert launch.end is not None and (launch.end.code, launch.end.next) == (75, "end")
    assert launch.end.checkpoint > before
    train.check_left()


@pytest.mark.slow
def test_a_process_that_exits_with_1_is_started_again_only_so_often(train: Run, tmp_path: Path) -> None:
    profile = profile_with(tmp_path, '[ "$SLURM_PROCID" != 3 ] || exit 1')
    train.overrides += [f"slurm.profile={profile}", "slurm.max_restarts=1"]
    (job,) = train.submit()
    train.until_over()
    ends = [launch.end for launch in train.launches() if launch.end is not None]
    assert [(end.code, end.next, end.rank) for end in ends] == [(1, "relaunch", 3), (1, "end", 3)]
    assert train.until_accounted()[job].state == "FAILED"
    (found,) = status({train.folder: None})
    assert found.state == "failed" and "rank 3" in found.why
    train.check_left()


@pytest.mark.parametrize("train", [("slurm.preprocess.qos=tiny", "slurm.array.tasks=3")], indirect=True)
def test_an_array_that_its_qos_does_not_take_is_refused_as_a_whole(train: Run) -> None:
    """The QOS takes one job of a user."""
    done = tiny.pipeline("preprocess", train.file, *train.overrides, f"data.dir={train.folder}-data", "--slurm")
    assert done.returncode == 1 and "QOSMaxSubmitJobPerUserLimit" in done.stderr
    assert not jobs.sent(train.folder)
