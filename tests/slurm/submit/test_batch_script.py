"""What the script of a job does before and after its batch process, run by bash with a `scontrol` of the test's own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.common import storage
from pipeline.common.run_files import RunFiles
from pipeline.common.run_identity import read_id, take_id
from slurm.record import launch_log
from slurm.record.planned_job import Chain
from slurm.submit.batch_script import lines_after, lines_before

KILLED = "kill -9 $BASHPID"
LIMIT = 2


def launch(run: Path, restarts: int = 0) -> launch_log.Launch:
    values = {"restarts": restarts, "number": 1, "link": 1, "nodes": ("n1",), "processes_per_node": 1}
    return launch_log.begin(run, "train", "77", **values, logs="logs/x", checkpoint=5)


def script(run: Path, process: str, chain: Chain = "requeue", state: str = "RUNNING", refuses: int = 0) -> list[str]:
    """A command for a job's script with this line of bash as its batch process; requeues are in the file `asked`."""
    tools = run.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "scontrol").write_text(
        f'#!/bin/bash\ncase "$*" in\n*show*) echo "JobId=77 JobState={state} Reason=None";;\n'
        f'requeue*) echo "$*" >> {run.parent}/asked; exit {refuses};;\nesac\n'
    )
    (tools / "scontrol").chmod(0o755)
    before = lines_before([(run, read_id(run) or "")], private=False)
    after = lines_after(chain, LIMIT, f"echo >> '{run.parent}/told'")
    return ["bash", "--norc", "-c", "\n".join([*before, "set -- 'a file' digest", f"({process})", *after])]


def environment(run: Path, restarts: int = 0) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restarts), "SLURMD_NODENAME": "n1"}
    return {"PATH": f"{run.parent / 'bin'}:{os.environ['PATH']}", **job}


def run_script(run: Path, process: str, *, restarts: int = 0, **more: object) -> int:
    command = script(run, process, **more)  # type: ignore[arg-type]
    return subprocess.run(command, env=environment(run, restarts), check=False).returncode


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run's folder"
    folder.mkdir()
    take_id(folder)
    return folder


@pytest.mark.parametrize(
    ("process", "chain", "state", "code", "following"),
    [
        (KILLED, "requeue", "RUNNING", 137, "requeue"),
        ("kill -ABRT $BASHPID", "requeue", "RUNNING", 134, "requeue"),
        (KILLED, "singleton", "RUNNING", 137, "next link"),
        (KILLED, "afterany", "RUNNING", 137, "next link"),
        (KILLED, "none", "RUNNING", 137, "end"),
        (KILLED, "requeue", "COMPLETING", 137, None),
        *((f"exit {code}", "requeue", "RUNNING", code, None) for code in (0, 1, 2, 75, 79, 130)),
    ],
)
def test_a_killed_batch_process_is_requeued_where_the_chain_does_so(
    run: Path, process: str, chain: Chain, state: str, code: int, following: str | None
) -> None:
    launch(run)
    assert run_script(run, process, chain=chain, state=state) == code
    (found,) = launch_log.launches(run)
    assert (found.end and found.end.next) == following
    assert (run.parent / "asked").exists() == (following == "requeue")
    assert (run.parent / "told").exists() == (following == "end")
    if found.end is not None:
        assert (found.end.code, found.end.checkpoint, found.end.node, found.crashed) == (1, 5, "n1", True)


def test_kills_in_a_row_are_bounded(run: Path) -> None:
    """By those since a launch has ended in another way; where the ledger cannot be written to, none is followed."""
    following = []
    for restarts in range(LIMIT + 1):
        launch(run, restarts)
        run_script(run, KILLED, restarts=restarts)
        end = launch_log.launches(run)[-1].end
        following.append(end and end.next)
    assert following == ["requeue"] * LIMIT + ["end"]
    assert (run.parent / "told").read_text() == "a file digest\n"
    assert (run.parent / "asked").read_text().splitlines() == ["requeue 77"] * LIMIT
    how = launch_log.LaunchEnd(75, "stopped", "requeue", 6, time.time())
    launch_log.end(run, launch(run, LIMIT + 1), how)
    run_script(run, KILLED, restarts=LIMIT + 2)
    assert len((run.parent / "asked").read_text().splitlines()) == LIMIT + 1
    ledger = RunFiles(run).ledger
    ledger.unlink()
    ledger.mkdir()
    run_script(run, KILLED, restarts=LIMIT + 3)
    assert len((run.parent / "asked").read_text().splitlines()) == LIMIT + 1


def test_a_requeue_that_is_refused_is_an_end(run: Path) -> None:
    launch(run)
    run_script(run, KILLED, refuses=1)
    assert [row["next"] for row in storage.read_json_lines(RunFiles(run).ledger)[1:]] == ["requeue", "end"]
    assert (run.parent / "told").exists()
    (found,) = launch_log.launches(run)
    assert found.end is not None and found.end.next == "end"


def test_a_job_that_the_scheduler_ends_is_not_brought_back(run: Path) -> None:
    """TERM comes to bash and to the batch process, which may be killed while it saves."""
    launch(run)
    ready = run.parent / "ready"
    process = subprocess.Popen(
        script(run, f"trap '' TERM; touch {shlex.quote(str(ready))}; sleep 60; {KILLED}"), env=environment(run)
    )
    while not ready.exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=True)  # the batch process: a subshell here
    assert process.wait(60) == 137
    assert not (run.parent / "asked").exists()
    assert launch_log.launches(run)[0].end is None


@pytest.mark.guard
def test_a_script_waits_for_its_run_folder(run: Path) -> None:
    """Neither an empty folder nor another one will do."""
    command, given = script(run, f"touch {shlex.quote(f'{run}/begun')}"), environment(run)
    away = run.rename(run.with_name("away"))
    run.mkdir()
    process = subprocess.Popen(command, env=given)
    take_id(run)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert [path.name for path in run.iterdir()] == [RunFiles.folder_id]
    RunFiles(run).folder_id.unlink()
    run.rmdir()
    away.rename(run)
    assert process.wait(60) == 0 and (run / "begun").exists()


def test_the_log_of_a_job_with_private_code_is_in_the_run_folder_if_that_is_there(run: Path, tmp_path: Path) -> None:
    (run / "slurm" / "jobs").mkdir(parents=True)
    lines = "\n".join([*lines_before([(run, read_id(run) or "")], private=True), "echo here"])
    for place, printed in ((run, ""), (run.with_name("away"), "here\n")):
        if place != run:
            run.rename(place)
        done = subprocess.run(["bash", "-c", lines], env=environment(run), capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
        assert (place / "slurm" / "jobs" / "77_0_log.out").read_text() == "here\n"
    assert not run.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user")
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_job_writes_nothing_where_a_member_of_the_group_has_put_a_link_or_a_pipe(
    run: Path, tmp_path: Path, kind: str
) -> None:
    """Its log, and the line of a killed process."""
    launch(run)
    precious, jobs = tmp_path / "precious", run / "slurm/jobs"
    precious.mkdir()
    (precious / "77_0_log.out").write_text("precious\n")
    jobs.parent.mkdir()
    ledger = RunFiles(run).ledger
    ledger.rename(run / "aside")
    if kind == "pipe":
        jobs.mkdir()
        os.mkfifo(jobs / "77_0_log.out")
        os.mkfifo(ledger)
    else:
        at = jobs if kind == "folder" else jobs / "77_0_log.out"
        at.parent.mkdir(exist_ok=True)
        at.symlink_to(precious if kind == "folder" else precious / "77_0_log.out")
        os.lchown(at, 65534, 65534)
        ledger.symlink_to(precious / "77_0_log.out")
        os.lchown(ledger, 65534, 65534)
    before = lines_before([(run, read_id(run) or "")], private=True)
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([*before, "echo out"])],
        env=environment(run),
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "out\n")
    run_script(run, KILLED)
    assert not (tmp_path / "asked").exists()
    assert (precious / "77_0_log.out").read_text() == "precious\n"
