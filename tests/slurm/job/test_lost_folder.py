"""A run folder that is gone while its job waits or runs, on a real controller: it is waited for and never made anew."""

from __future__ import annotations

import time
from pathlib import Path

import orjson
import pytest

from slurm import scheduler
from slurm.job.folder_watch import LostFolderNote, read_note
from slurm.status.command import status
from slurm.status.run import RunStatus
from slurm.submit.batch_script import FOLDER_SECONDS
from slurm.submit.permissions import private_folder
from tests.slurm.notify.receivers import received, to_file
from tests.slurm.training import Run, config_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


def apart(run: Run, folder: Path) -> Path:
    """Put code and notices of a run elsewhere; the file that gets the notices."""
    seen = folder / "seen"
    values = orjson.dumps([to_file(seen)]).decode()
    run.overrides += [f"slurm.private_dir={folder / 'private'}", f"notify={values}"]
    return seen


def note(run: Run) -> LostFolderNote | None:
    private = private_folder(config_of(run), run.folder)
    assert private is not None
    return read_note(private)


def described(run: Run) -> RunStatus:
    """Status by the run file."""
    return status({run.folder: config_of(run)})[0]


@pytest.mark.parametrize("train", [("slurm.train.options={hold: ''}",)], indirect=True)
@pytest.mark.slow
def test_it_is_gone_before_the_job_starts(train: Run, whole: Path, tmp_path: Path) -> None:
    apart(train, tmp_path)
    (job,) = train.submit()
    away = train.folder.rename(tmp_path / "away")
    scheduler.ask(["scontrol", "release", job])
    train.until(lambda: (found := note(train)) is not None and found.waits, why="the note that the job waits")
    assert not train.folder.exists()
    shown = described(train)
    assert shown.state == "stalled" and str(train.folder) in shown.why, shown
    away.rename(train.folder)
    train.until_over()
    train.check(whole)
    (launch,) = train.launches()
    assert (launch.job, launch.checkpoint) == (job, 0)
    assert note(train) is None
    log = (train.folder / "slurm" / "jobs" / f"{job}_0_log.out").read_text()
    assert "launch 1" in log, "it is where it always is"


@pytest.mark.parametrize("private", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_is_gone_for_a_while_in_the_middle_of_a_run(train: Run, whole: Path, tmp_path: Path, private: bool) -> None:
    if private:
        apart(train, tmp_path)
    (job,) = train.submit()
    train.until_saved(10)
    away = train.folder.rename(tmp_path / "away")
    log = away / "slurm" / "jobs" / f"{job}_0_log.out"  # it is written to wherever it is
    train.until(lambda: "is not there" in log.read_text(), why="the end of the ranks")
    assert not train.folder.exists()
    away.rename(train.folder)
    train.until_over()
    train.check(whole)
    first, second = train.launches()
    assert first.end is not None and (first.end.code, first.end.next) == (1, "relaunch")
    assert (second.job, second.restarts) == (job, 0) and second.checkpoint >= 10


@pytest.mark.slow
def test_it_never_comes_back(train: Run, whole: Path, tmp_path: Path) -> None:
    seen = apart(train, tmp_path)
    (job,) = train.submit()
    train.until_saved(10)
    away = train.folder.rename(tmp_path / "away")
    began = time.monotonic()
    train.until(lambda: not scheduler.jobs([job])[job].runs, why="the end of the job", seconds=FOLDER_SECONDS + 400)
    assert time.monotonic() - began > FOLDER_SECONDS
    assert not train.folder.exists()
    assert scheduler.details(job)["ExitCode"] == "1:0"
    (told,) = [each for each in received(seen) if each["event"] == "failed"]
    assert told["code"] == 1 and str(train.folder) in told["reason"]
    shown = described(train)
    assert shown.state == "failed" and f"job {job} has ended" in shown.why, shown
    away.rename(train.folder)
    assert status({train.folder: None})[0].state == "failed"
    train.submit()
    train.until_over()
    train.check(whole)
    assert train.launches()[-1].checkpoint >= 10
