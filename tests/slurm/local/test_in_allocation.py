"""Training in an allocation that exists: `--in-allocation` in a shell of salloc, and plain `srun pipeline train`."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common import storage
from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.run.attempts import attempts
from pipeline.train.run.folder import read_metrics
from pipeline.train.run.lock import holder, number_of
from pipeline.train.run.lock_holder import identity
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.jobs import StageName
from slurm.local.in_allocation import _refuse_other_start, run_in_allocation
from slurm.local.srun_rank import join_step
from slurm.record.launch_log import launches
from tests import tiny
from tests.slurm.training import STEPS
from tests.train.runs import exact
from tests.waiting import runs, until

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def salloc(*command: object, time: str = "10") -> list[str]:
    """A command in an allocation of two nodes, with two tasks on each."""
    options = ["--nodes=2", "--ntasks-per-node=2", f"--time={time}", "--signal=USR2@1"]
    return ["salloc", *options, "--quiet", *map(str, command)]


def test_outside_of_an_allocation_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = load(tiny.write_run(tmp_path))
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set here; get one with `salloc") as error:
        run_in_allocation(config, ["train"], Console(quiet=True))
    assert error.value.exit_code == 2 and not config.run.dir.exists()


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Variables of an allocation of two nodes with four CPUs each; the folder of a run."""
    values = {"JOB_ID": "77", "JOB_NODELIST": "n[1-2]", "JOB_CPUS_PER_NODE": "4(x2)", "TASKS_PER_NODE": "2(x2)"}
    for name in [*RANKS, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(scheduler, "hostnames", lambda compact: ["n1", "n2"])
    return tmp_path


def previewed(root: Path, stages: list[StageName], **changes: Any) -> str:
    """Text of a dry run of a run with these changes."""
    console = Console(file=io.StringIO(), width=300)
    config = load(tiny.write_run(root, {"launch.device": "cpu", **changes}))
    run_in_allocation(config, stages, console, dry_run=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_dry_run_shows_the_stages_that_are_missing_and_writes_nothing(allocation: Path) -> None:
    whole: list[StageName] = ["preprocess", "train", "eval"]
    text = previewed(allocation, whole)
    assert "preprocess: one process on n1 (pipeline preprocess)" in text
    assert "train: 2 nodes x 2 processes on n1, n2 (pipeline train)" in text
    assert text.splitlines()[-1] == "no problem was found; nothing was started and nothing was written (--dry-run)"
    assert not (allocation / "run").exists()
    preprocess(load(allocation / "run.yaml"))
    text = previewed(allocation, whole)
    assert "preprocess: complete, so it is left out" in text and "(pipeline preprocess)" not in text


@pytest.mark.parametrize(
    ("cpus", "changes", "message"),
    [
        ("2", {}, ""),
        ("3", {}, r"needs 2 x 3 CPUs per node \(slurm.processes_per_node x SLURM_CPUS_PER_TASK\), and .* has 4 "),
        ("", {"slurm.train": {"cpus_per_task": 3}}, r"2 x 3 CPUs per node .* x slurm.train.cpus_per_task"),
        ("", {"slurm.processes_per_node": 8, "train.batch_size": 32}, r"8 x 1 CPUs per node"),
    ],
)
def test_more_cpus_than_the_allocation_has_are_refused(
    allocation: Path, monkeypatch: pytest.MonkeyPatch, cpus: str, changes: dict[str, Any], message: str
) -> None:
    if cpus:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    with pytest.raises(UserError, match=f"(?s)nothing was started.*{message}") if message else nullcontext():
        previewed(allocation, ["preprocess", "train"], **changes)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Variables of a task of srun, the fourth of four on two nodes."""
    values = {"JOB_ID": "77", "STEP_ID": "2", "STEP_NUM_TASKS": "4", "STEP_NUM_NODES": "2", "NTASKS": "4"}
    values |= {"PROCID": "3", "LOCALID": "1", "STEP_NODELIST": "n[1-2]", "JOB_END_TIME": "5"}
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    yield values
    for name in RANKS:
        os.environ.pop(name, None)


def test_a_task_of_srun_is_a_rank(step: dict[str, str]) -> None:
    join_step()
    *place, port = (os.environ[name] for name in RANKS)
    assert place == ["3", "4", "1", "2", "n1"]
    assert 10_000 <= int(port) < 30_000


@pytest.mark.parametrize("task", [0, 3])
def test_what_a_shell_still_has_of_another_launcher_does_not_count(
    step: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], task: int
) -> None:
    """But for the port: it is the same for all tasks, and whose own port is taken sets one."""
    for name, value in {"RANK": "9", "MASTER_ADDR": "old", "MASTER_PORT": "29500", "SLURM_PROCID": str(task)}.items():
        monkeypatch.setenv(name, value)
    join_step()
    assert [os.environ[name] for name in RANKS] == [str(task), "4", "1", "2", "n1", "29500"]
    assert ("MASTER_ADDR=old" in "".join(capfd.readouterr())) == (task == 0)


@pytest.mark.parametrize(
    "change", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": None}, {"WORLD_SIZE": "1", "RANK": "0"}]
)
def test_other_processes_are_what_they_were(
    step: dict[str, str], monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None]
) -> None:
    for name, value in change.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    before = dict(os.environ)
    join_step()
    assert dict(os.environ) == before


def test_a_training_of_the_same_allocation_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its process has ended; of one on another node its step says so."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    monkeypatch.setattr(scheduler, "steps", lambda job: {"7.2"})
    mine = identity()
    for held, refused in (
        (mine, True),
        ({**mine, "started": "0"}, False),
        ({**mine, "host": "elsewhere"}, True),
        ({**mine, "host": "elsewhere", "step": 1}, False),
    ):
        RunFiles(tmp_path).lock.write_bytes(orjson.dumps(held))
        with pytest.raises(UserError, match=r"in this allocation.*scancel 7\.2") if refused else nullcontext():
            _refuse_other_start(tmp_path, ["train"], Console(quiet=True), take_over=False)


@pytest.mark.slurm
def test_a_run_trains_in_an_allocation_stops_at_its_end_and_resumes_in_the_next(
    cluster: DevCluster, run_file: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = tiny.command("train", run_file, f"run.dir={run}", "--in-allocation", "launch.max_minutes=1000")
    with (tmp_path / "log").open("wb") as log:
        # The stop is that of the training: a file, as `pipeline cancel` and the end of the time have it.
        process = subprocess.Popen(salloc(*words), stdout=log, stderr=log)
        until(
            lambda: (
                any(row["step"] >= 10 for row in storage.read_json_lines(RunFiles(run).metrics))
                if RunFiles(run).metrics.exists()
                else False
            ),
            process,
        )
        RunFiles(run).stop.touch()
        assert process.wait(300) == 75, (tmp_path / "log").read_text()
    (first,) = attempts(run)
    assert (first.code, first.layout["world_size"]) == (75, 4)
    assert jobs.sent(run) == []  # nothing waits or was requeued
    srun = ["srun", *tiny.command("train", run_file, f"run.dir={run}")]
    done = subprocess.run(salloc(*srun), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(each.code, each.layout["world_size"]) for each in attempts(run)] == [(75, 4), (0, 4)]
    assert exact(run) == exact(whole) and len(exact(run)) == STEPS


@pytest.mark.slurm
def test_signals_to_the_command_stop_and_kill_its_ranks(cluster: DevCluster, run_file: Path, tmp_path: Path) -> None:
    """The first one as in a run without a scheduler; a second Ctrl-C does not wait for a rank that hangs."""
    run, pid, log = tmp_path / "run", tmp_path / "pid", tmp_path / "log"
    words = tiny.command("train", run_file, f"run.dir={run}", "--in-allocation")
    script = f"echo $$ > {pid}; exec {shlex.join(words)}"

    def begun(ready: Callable[[], Any]) -> tuple[subprocess.Popen[bytes], int]:
        with log.open("ab") as file:
            process = subprocess.Popen(salloc("bash", "-c", script), stdout=file, stderr=file)
        until(ready, process)
        return process, int(pid.read_text())

    process, command = begun(lambda: RunFiles(run).metrics.exists() and read_metrics(run))
    os.kill(command, signal.SIGTERM)
    assert process.wait(300) == 75, log.read_text()
    (first,) = attempts(run)
    (end,) = (each.end for each in launches(run))
    assert end is not None and (first.code, end.next) == (75, "end") and end.checkpoint == first.step > 0
    process, command = begun(lambda: number_of(holder(run)) == 2)
    hung = holder(run)
    assert hung is not None
    os.kill(hung["pid"], signal.SIGSTOP)
    os.kill(command, signal.SIGINT)
    until(lambda: "once more ends all processes at once" in log.read_text(), process)
    os.kill(command, signal.SIGINT)
    assert process.wait(300) == 130, log.read_text()
    until(lambda: not runs(hung["pid"]))


@pytest.mark.slow
@pytest.mark.slurm
def test_a_whole_run_leaves_out_what_is_complete(cluster: DevCluster, run_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = tiny.command("run", run_file, f"run.dir={run}", "--in-allocation", "train.duration=10 steps")

    def called(*more: str) -> str:
        done = subprocess.run(salloc(*words, *more), capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "(pipeline preprocess)" not in called("--dry-run") and not run.exists()
    assert "preprocess: complete, so it is left out" in called()
    assert [each.stage for each in launches(run)] == ["train", "eval"]
    assert called().splitlines()[-1] == f"nothing to do: all stages of {run} are complete"
