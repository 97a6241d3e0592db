"""The end of a training and of a check of nodes, as their job reads it."""

from __future__ import annotations

import io
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from pipeline.common import storage
from pipeline.common.console import Console
from pipeline.common.errors import EXIT_OTHER, EXIT_SUPERSEDED
from pipeline.common.run_files import RunFiles
from pipeline.train.run.lock import TAKEN_OVER
from slurm import jobs
from slurm.doctor.node import space
from slurm.doctor.report import NodeCheck, Report, failed
from slurm.job.batch_main import JobStart
from slurm.job.ending import Ending, exit_state, read_exit_file, too_few_nodes
from slurm.job.srun_step import SrunStep, rendezvous_env
from slurm.record import launch_log
from slurm.record.launch_log import LaunchEnd


def made(run: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SUBMITIT_LOCAL_JOB_ID", "7")
    site = SimpleNamespace(gpus_per_node=0, network_interface=None, health_command="", health_minutes=None)
    what = {"run": run, "stage": "train", "where": "local", "every_checkpoint": False, "packed": False}
    submission: Any = SimpleNamespace(**what, run_file=run / "run.yaml", site=site, folder_id=None)
    return JobStart(submission, 1, Console(file=io.StringIO()))


def test_a_job_whose_run_a_later_attempt_has_taken_over_starts_nothing_when_it_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = made(tmp_path, monkeypatch)

    def launched(job: str, code: int) -> None:
        more: dict[str, Any] = {
            "restarts": 0,
            "number": 1,
            "link": 1,
            "nodes": (),
            "processes_per_node": 1,
            "logs": "",
            "checkpoint": 0,
        }
        launch = launch_log.begin(tmp_path, "train", job, **more)
        launch_log.end(tmp_path, launch, LaunchEnd(code, "why", "end", 0, time.time()))

    launched("5", EXIT_SUPERSEDED)
    assert link._why_over() is None, "another job's: this one may have taken its place"
    launched("7", EXIT_SUPERSEDED)
    launched("5", EXIT_OTHER)
    assert "later attempt" in str(link._why_over())


def test_a_job_that_was_sent_before_a_take_over_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have lost its ranks before they could see the later attempt, and the lock may be free."""
    link = made(tmp_path, monkeypatch)
    RunFiles(tmp_path).slurm.mkdir()
    jobs.note(tmp_path, jobs.new_job("train", "7", "local", "train", "none.json"))
    assert link._why_over() is None
    storage.add_json_line(RunFiles(tmp_path).ledger, {"event": TAKEN_OVER, "time": time.time() + 1})
    assert "taken over" in str(link._why_over())
    jobs.note(tmp_path, replace(jobs.new_job("train", "7", "local", "train", "none.json"), time=time.time() + 2))
    assert link._why_over() is None


def test_processes_of_several_nodes_meet_at_the_first_over_the_network_that_is_named() -> None:
    """NCCL's variable and gloo's."""
    site = SimpleNamespace(network_interface="ib0")
    found = rendezvous_env(cast(Any, SimpleNamespace(site=site)), ["n1", "n2"])
    assert found.pop("MASTER_PORT").isdecimal()
    assert found == {"MASTER_ADDR": "n1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}


def noted(run: Path, reason: str) -> None:
    end = {"attempt": 1, "code": 79, "reason": reason, "agreed": True, "step": 3}
    storage.put_json(run / "exit.json", end)


@pytest.mark.parametrize("cached", [False, True])
def test_the_end_of_a_launch_is_told_from_that_of_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Also where a file system of the network answers `stat` from memory, and times are coarse."""
    file = tmp_path / "exit.json"
    assert exit_state(tmp_path, read_exit_file(tmp_path), 0) is None
    noted(tmp_path, "before")
    before, stat = read_exit_file(tmp_path), file.stat()
    assert exit_state(tmp_path, before, 0) is None
    if cached:
        noted(tmp_path, "new")
        monkeypatch.setattr(Path, "stat", lambda self, **keys: stat)
    else:
        file.write_bytes(file.read_bytes().replace(b"before", b"behind"))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert exit_state(tmp_path, before, 0) == Ending(79, "new" if cached else "behind", agreed=True)


@pytest.mark.parametrize(
    ("srun", "unhealthy", "told"),
    [
        ("n1: task 0: Killed", {"n1", "n2"}, set()),
        ("n1: task 0: User defined signal 2", set(), {signal.SIGUSR2}),
        ("n2: task 1: Exited with exit code 78\nsrun: error: n1: task 0: Terminated", set(), {signal.SIGUSR2}),
        ("Node failure on n2\nsrun: error: n1: task 0: Killed\nsrun: Force Terminated StepId=6.0", set(), set()),
    ],
)
def test_nodes_whose_check_was_interrupted_are_not_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, unhealthy: set[str], told: set[int]
) -> None:
    """The lines are those of srun 22.05; no process has left a report."""
    link = made(tmp_path, monkeypatch)
    link._allocation = SimpleNamespace(nodes=["n1", "n2"], down=list, unhealthy={})
    monkeypatch.setattr(SrunStep, "run", lambda step, *_: step.srun_output.write_text(f"srun: error: {srun}\n"))
    said = link._check_nodes(tmp_path)
    assert (set(link._allocation.unhealthy), link._signals) == (unhealthy, told)
    assert len(said) == (0 if told else len(unhealthy) or 1), "a node that is lost is named"


def checked(run: Path, monkeypatch: pytest.MonkeyPatch, checks: dict[str, NodeCheck]) -> Any:
    """A job whose nodes were checked, with a problem of each (none where the check is good)."""
    link = made(run, monkeypatch)
    nodes = list(checks)
    allocation = SimpleNamespace(nodes=nodes, unhealthy={})
    allocation.down = lambda: list(allocation.unhealthy)
    link._allocation, link._submission.nodes = allocation, len(nodes)

    def run_step(step: SrunStep, *_: Any) -> None:
        for node, check in checks.items():
            (step.logs / f"{node}.json").write_bytes(orjson.dumps(asdict(Report(node, checks=(check,)))))

    monkeypatch.setattr(SrunStep, "run", run_step)
    return link


def test_a_full_disk_that_all_nodes_share_is_not_held_against_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm.doctor.node._FREE_BYTES", 2**80)
    full, good = space("run.dir", tmp_path), NodeCheck("memory", True, "8 GiB")
    link = checked(tmp_path, monkeypatch, {"n1": full, "n2": full})
    assert (link._check_nodes(tmp_path), link._allocation.unhealthy) == ([], {})
    assert link._full_disk == full.message and "are needed" in full.message
    for key, value in {"doctor": True, "processes_per_node": 1, "spare_nodes": 0, "chain": "requeue"}.items():
        setattr(link._submission, key, value)
    link._submission.max_restarts = 5
    link._allocation.is_running, link._allocation.is_over_time = (lambda: True), (lambda: False)
    how = link._launch(1)
    assert (how.code, how.next, how.failed_nodes) == (79, "end", ()) and full.message in how.reason
    (tmp_path / "one").mkdir()
    link = checked(tmp_path, monkeypatch, {"n1": full, "n2": good})
    link._check_nodes(tmp_path / "one")
    assert link._full_disk is None and link._allocation.unhealthy == {"n1": [full.message]}, "n2 sees another disk"


def test_nodes_that_cannot_be_used_are_told_with_their_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {f"n{place}": failed("memory", "low", f"memory: {place} GiB are free") for place in range(1, 6)}
    link = checked(tmp_path, monkeypatch, {**checks, "n6": NodeCheck("memory", True, "8 GiB")})
    link._check_nodes(tmp_path)
    ending = too_few_nodes(link._allocation, 6)
    assert (ending.code, ending.failed_nodes) == (78, tuple(checks))
    assert ending.reason == (
        "of the job's nodes n1, n2, n3, n4, n5 cannot be used, and 6 are needed: n1: memory: 1 GiB are free; "
        "n2: memory: 2 GiB are free; n3: memory: 3 GiB are free; and 2 more"
    )


def test_a_process_that_a_signal_ended_which_was_handed_on_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = made(tmp_path, monkeypatch)
    step: Any = SimpleNamespace(nodes=(), logs=tmp_path, srun_output=tmp_path / "srun.log")
    launch: Any = SimpleNamespace(nodes=(), processes_per_node=1)
    assert link._judge(step, -signal.SIGUSR2, launch, None).code == 1
    link._signals.add(signal.SIGUSR2)
    assert link._judge(step, -signal.SIGUSR2, launch, None).code == 75
