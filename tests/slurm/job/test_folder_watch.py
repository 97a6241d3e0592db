"""A batch process whose run folder is gone: it waits, says so where it can, and makes nothing."""

from __future__ import annotations

import io
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import storage
from pipeline.common.errors import EXIT_OTHER, MachineError
from pipeline.common.run_files import RunFiles
from pipeline.common.run_identity import LostRunFolder, environment
from pipeline.config.load import load
from slurm.job import folder_watch
from slurm.job.batch_main import run_submission, tell_killed
from slurm.job.folder_watch import FolderWatch, read_note
from slurm.local import stages
from slurm.record import integrity, launch_log
from slurm.record.submission import Submission, read_submission
from slurm.site.site_profile import load_site
from slurm.status.command import status
from slurm.submit import job_plan, permissions
from slurm.submit.submit import write_submission
from tests import tiny
from tests.slurm.notify.receivers import received, to_file


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_watch, "FOLDER_SECONDS", 0.3)
    monkeypatch.setattr(folder_watch, "_LOOK", 0.02)
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "77")


def sent(root: Path, **changes: Any) -> tuple[Any, Path]:
    """The config of a run, and a submission of its training."""
    config = load(tiny.write_run(root, {"slurm.private_dir": str(root / "private"), **changes}))
    config.run.dir.mkdir()
    site = load_site("generic")
    (planned,) = job_plan.plan(config, site, ["train"], "local")
    return config, write_submission(config.run.dir, config, site, planned, "local", None)


@pytest.mark.usefixtures("handlers")
def test_a_job_whose_run_folder_never_comes_back_tells_so_and_makes_none(tmp_path: Path) -> None:
    config, file = sent(tmp_path, notify=[to_file(tmp_path / "seen")])
    run, private = config.run.dir, permissions.private_folder(config, config.run.dir)
    assert private is not None
    away = run.rename(tmp_path / "away")
    with pytest.raises(SystemExit) as left:
        run_submission(str(file), 1, integrity.sha256(file.read_bytes()))
    assert left.value.code == EXIT_OTHER and not run.exists()
    (told,) = received(tmp_path / "seen")
    assert (told["event"], told["code"]) == ("failed", 1) and str(run) in told["reason"]
    for back in (False, True):
        if back:
            away.rename(run)
        shown = status({run: config})[0]
        assert (shown.state, shown.stage) == ("failed", "train") and str(run) in shown.why, shown
    FolderWatch(read_submission(file), "78", set(), print).wait()
    assert read_note(private) is None and status({run: config})[0].state == "nothing known"


def test_the_end_of_a_killed_batch_process_is_told(tmp_path: Path) -> None:
    """By the script of its job, where no other start follows."""
    config, file = sent(tmp_path, notify=[to_file(tmp_path / "seen")])
    values = {"restarts": 0, "number": 1, "link": 1, "nodes": (), "processes_per_node": 1, "logs": "", "checkpoint": 5}
    launch_log.begin(config.run.dir, "train", "77", **values)
    killed = {"event": "batch killed", "job": "77", "restarts": 0, "signal": 9, "node": "n1", "next": "end"}
    storage.add_json_line(RunFiles(config.run.dir).ledger, {**killed, "time": time.time()})
    tell_killed(str(file), integrity.sha256(file.read_bytes()))
    (told,) = received(tmp_path / "seen")
    assert (told["event"], told["code"]) == ("failed", 1) and "was killed (signal 9)" in told["reason"]


def watch(submission: Submission, signals: set[int], said: list[str]) -> FolderWatch:
    return FolderWatch(submission, "77", signals, said.append)


def test_a_run_folder_that_comes_back_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_watch, "FOLDER_SECONDS", 60.0)
    config, file = sent(tmp_path)
    run, submission, said = config.run.dir, read_submission(file), list[str]()
    watched = watch(submission, set(), said)
    watched.wait()
    assert not said
    away = run.rename(tmp_path / "away")
    waiting = threading.Thread(target=watched.wait)
    waiting.start()
    while not said:
        time.sleep(0.01)
    shown = status({run: config})[0]
    assert shown.state == "stalled" and "job 77 waits" in shown.why, shown
    run.mkdir()  # a mount point
    waiting.join(0.2)
    assert waiting.is_alive() and not list(run.iterdir())
    run.rmdir()
    away.rename(run)
    waiting.join()
    assert watched.is_lost() is False and len(said) == 2
    run.rename(away)
    with pytest.raises(LostRunFolder):
        watch(submission, {signal.SIGTERM}, said).wait()


@pytest.mark.parametrize("stage", [stages.preprocess, stages.train, stages.evaluate])
def test_a_stage_of_a_job_does_not_make_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Any
) -> None:
    config, file = sent(tmp_path)
    for name, value in environment(config.run.dir, read_submission(file).folder_id).items():
        monkeypatch.setenv(name, value)
    config.run.dir.rename(tmp_path / "away")
    with pytest.raises(MachineError, match="is not there"):
        stage(config)
    assert not config.run.dir.exists()


def test_commands_that_name_a_run_folder_which_is_not_there_make_none(tmp_path: Path) -> None:
    from pipeline.common.console import Console
    from pipeline.common.errors import UserError
    from slurm.control import cancel
    from slurm.run_argument import run_folder

    gone, console = tmp_path / "gone", Console(file=io.StringIO())
    with pytest.raises(UserError, match="gone"):
        run_folder(gone)
    config = load(tiny.write_run(tmp_path))
    assert str(config.run.dir) in status({config.run.dir: config})[0].why
    with suppress(UserError):
        cancel(tmp_path / "run.yaml", console, now=False, chain=False, wait=0.0)
    assert not gone.exists() and not config.run.dir.exists()
