"""`sweep --per-node`: runs that share a job and its node, each with its own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.train.run.lock import holder
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.job import pack
from slurm.job.pack import Pack, device_variables, has_rocm, part_of
from slurm.record.launch_log import launches
from slurm.sweep import command
from slurm.sweep.command import sweep
from tests.slurm.sweep.test_command import do, fresh, run_file, states
from tests.waiting import until

__all__ = ["fresh", "run_file"]
PAUSE = "signal.pause()"


def test_parts_are_equal_and_have_nothing_in_common() -> None:
    assert [part_of(range(8), place, 3) for place in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [part_of(["4", "7"], place, 2) for place in range(2)] == [["4"], ["7"]]
    assert part_of([0, 1], 0, 3) == []


@pytest.mark.parametrize(
    ("rocm", "given", "expected"),
    [
        # SLURM may set all three without knowing the vendor. On NVIDIA's only CUDA's counts.
        (False, {"CUDA": "4,5,6,7", "ROCR": "4,5,6,7"}, {"CUDA": "6,7", "ROCR": "6,7"}),
        (True, {"ROCR": "4,5,6,7"}, {"ROCR": "6,7"}),
        (True, {"HIP": "4,5,6,7"}, {"HIP": "6,7"}),
        # The upper ones count what ROCR leaves.
        (True, {"ROCR": "4,5,6,7", "HIP": "0,1,2,3"}, {"ROCR": "6,7", "HIP": "0,1"}),
        (True, {"ROCR": "4,5,6,7", "HIP": "3,2,1,0", "CUDA": "0,1,2,3"}, {"ROCR": "5,4", "HIP": "0,1", "CUDA": "0,1"}),
        (True, {"ROCR": "4,5,6,7", "CUDA": "4,5,6,7"}, {"ROCR": "6,7", "CUDA": "0,1"}),
        (True, {"ROCR": "GPU-a,GPU-b", "HIP": "1,0"}, {"ROCR": "GPU-a", "HIP": "0"}),
    ],
)
def test_a_run_sees_its_devices(rocm: bool, given: dict[str, str], expected: dict[str, str]) -> None:
    """The second of two runs."""

    def named(values: dict[str, str]) -> dict[str, str]:
        return {f"{name}_VISIBLE_DEVICES": value for name, value in values.items()}

    assert device_variables(named(given), 1, 2, rocm=rocm) == named(expected)


def test_a_job_asks_for_what_all_of_its_runs_need(
    run_file: Path,
    fresh: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "is_verbose", lambda: True)
    words = [*fresh, "train.optimizer.lr=1e-3,2e-3,3e-3,4e-3,5e-3", "slurm.train.mem_gb=3", "slurm.gpus_per_node=1"]
    sweep_of_two = {"slurm": True, "local": False, "dry_run": True, "table": False, "as_json": False}
    sweep(run_file, words, Console(width=150), **sweep_of_two, per_node=2)
    said = capfd.readouterr().out
    assert "an array of 3 jobs, each of 2 runs with 1 node x 2 processes" in said
    for line in ("--array=0-2", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=6G"):
        assert f"\n#SBATCH {line}" in said
    with pytest.raises(UserError, match="--per-node 2 puts runs of one node together, but each has 2"):
        sweep(run_file, [*words, "slurm.nodes=2"], Console(quiet=True), **sweep_of_two, per_node=2)
    with pytest.raises(UserError, match="--container-image=a: they would run outside of the container"):
        (tmp_path / "site.yaml").write_text("{gpus_per_node: 8, srun_options: [--container-image=a]}")
        sweep(
            run_file, [*words, f"slurm.profile={tmp_path}/site.yaml"], Console(quiet=True), **sweep_of_two, per_node=2
        )
    with pytest.raises(UserError, match="add --slurm"):
        sweep(run_file, words, Console(quiet=True), **sweep_of_two | {"slurm": False}, per_node=2)


def test_rocm_is_what_drives_the_devices_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for device, rocm in (("nvidia0", False), ("kfd", True), ("nvidiactl", False)):
        (tmp_path / "dev" / device).touch()
        assert has_rocm(tmp_path) == rocm


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_while_runs_are_started_stops_all(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handlers: None
) -> None:
    """It comes when the second one was started and is not known yet; the third one is not started any more."""
    listens = tmp_path / "listens"
    stop = f"signal.signal({int(number)}, lambda *_: sys.exit(75))\nopen({str(listens)!r}, 'w').close()\n{PAUSE}"
    started = []

    def start(self: Pack, file: Path, place: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", f"import signal, sys\n{stop if place == 0 else PAUSE}"])
        started.append(place)
        if place == 1:
            until(listens.exists)
            os.kill(os.getpid(), number)
        return process

    monkeypatch.setattr(Pack, "_start", start)
    monkeypatch.setattr(pack, "is_done", lambda file: False)
    monkeypatch.setattr(pack, "read_submission", lambda file: SimpleNamespace(run=file))
    asked: list[str] = []
    allocation = SimpleNamespace(is_over_time=lambda: True, requeue=lambda: asked.append("requeue"))
    monkeypatch.setattr(pack.Allocation, "of_environment", lambda *_: allocation)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job: Any = SimpleNamespace(beside=("a", "b", "c"), chain="requeue", packed=False)
    # One that does not listen yet is ended by the signal, which counts as a stop.
    assert Pack(job, 1, lambda text: None).run() == 0
    assert (started, asked) == ([0, 1], ["requeue"])


@pytest.mark.slurm
def test_runs_of_a_job_end_by_themselves_and_are_requeued_together(
    run_file: Path, fresh: list[str], tmp_path: Path, cluster: DevCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["slurm.profile=devcluster", "slurm.max_restarts=0", "train.duration=100 steps"]
    words = [*fresh, "train.optimizer.lr=1e-3,2e-3,3e-3", *more, "train.validation.every_steps=100"]
    folder = tmp_path / "run/sweeps/lr,duration=100_steps,every_steps=100"
    names = ["lr=1e-3", "lr=2e-3", "lr=3e-3"]
    do(run_file, words, slurm=True, per_node=3)
    (number,) = {jobs.sent(folder / name)[0].job for name in names}

    def trains(name: str) -> bool:
        return RunFiles(folder / name).metrics.exists()

    until(lambda: all(map(trains, names)))
    killed = holder(folder / names[1])
    assert killed is not None
    os.kill(killed["pid"], signal.SIGKILL)
    until(lambda: any(each.end for each in launches(folder / names[1])))
    # The others are told to stop, as before the end of the job's time: the job goes back into the queue once.
    scheduler.ask(["scancel", "--full", "--signal=USR2", number])
    until(lambda: states(run_file, words, capfd) == {names[0]: "done", names[1]: "failed", names[2]: "done"})
    for name in (names[0], names[2]):
        ends = [(each.restarts, each.stage, each.end.next) for each in launches(folder / name) if each.end]
        assert ends == [(0, "train", "requeue"), (1, "train", "done"), (1, "eval", "done")]
    (end,) = (each.end for each in launches(folder / names[1]))
    assert end is not None and (end.next, end.code != 0) == ("end", True)
