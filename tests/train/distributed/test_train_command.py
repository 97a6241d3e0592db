"""`pipeline train` on several processes, as a user starts it: it ends well, is stopped, killed, hung, and goes on."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed.ranks import free_port
from tests.train.runs import exact
from tests.waiting import until

pytestmark = pytest.mark.parallel

STEPS = 40
TWO = ("launch.processes=2", "parallel.pp=2", "parallel.pipeline.schedule=interleaved_1f1b")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    keys: dict[str, Any] = {
        "model.layers": 4,
        "train.duration": f"{STEPS} steps",
        "train.precision": {"compute": "fp32"},
        "train.validation.samples": 0,
        "train.checkpoint.every_steps": 10,
        "train.checkpoint.keep": 9,
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """An uninterrupted run on two processes."""
    done = tiny.pipeline("train", root / "run.yaml", f"run.dir={root / 'whole'}", *TWO)
    assert done.returncode == 0, done.stderr
    assert f"train: done, {STEPS} steps" in done.stdout
    assert done.stdout.startswith("train: starting 2 processes; logs of ranks from 1 on are in "), done.stdout
    assert "on 2 x cpu (pp 2), 1 thread each, " in done.stdout
    return root / "whole"


def start(root: Path, name: str, *values: str) -> subprocess.Popen[str]:
    command = tiny.command("train", root / "run.yaml", f"run.dir={root / name}", *TWO, *values)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps(run: Path) -> int:
    rows = read_metrics(run) if (run / "metrics.jsonl").exists() else []
    return rows[-1]["step"] if rows else 0


def ranks_of(run: Path) -> dict[int, int]:
    """Process ids by rank, from the environments of all processes that work in a run folder."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            if ranks and str(run).encode() in words:
                found[ranks[0]] = int(folder.name)
    return found


def goes_on(root: Path, name: str, whole: Path) -> None:
    """The same command ends the run, which has the bits of an uninterrupted one."""
    done = tiny.pipeline("train", root / "run.yaml", f"run.dir={root / name}", *TWO)
    assert done.returncode == 0, done.stderr
    assert tiny.resumed_from(done.stdout) is not None
    assert exact(root / name) == exact(whole)


@pytest.mark.slow
def test_it_trains_as_one_process_does(root: Path, whole: Path) -> None:
    done = tiny.pipeline("train", root / "run.yaml", f"run.dir={root / 'one'}")
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(read_metrics(whole), read_metrics(root / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert (ours["order_hash"], ours["data_hash"]) == (theirs["order_hash"], theirs["data_hash"])
    assert orjson.loads((whole / "exit.json").read_bytes())["code"] == 0
    state = orjson.loads((whole / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_bytes())
    assert state["layout"] == {
        "pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "dp": 1, "world_size": 2
    }  # fmt: skip
    assert [path.name for path in (whole / "logs").glob("*/rank-*.log")] == ["rank-0001.log"]
    assert not (whole / "lock").exists()


@pytest.mark.guard
def test_files_of_the_working_directory_are_not_run(root: Path, tmp_path: Path) -> None:
    """Ranks find our packages as the command did, not a script of the user that has the name of one."""
    for name in ("pipeline", "slurm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the script of a user')\n")
    words = tiny.command("train", root / "run.yaml", f"run.dir={root / 'scripts'}", "train.duration=2 steps", *TWO)
    done = subprocess.run([words[0], "-P", *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert steps(root / "scripts") == 2


@pytest.mark.slow
@pytest.mark.parametrize("who", ["launcher", "rank 1"])
def test_a_stop_is_agreed_on_and_saved(root: Path, whole: Path, who: str) -> None:
    name = f"stopped-{who[-1]}"
    process = start(root, name)
    until(lambda: steps(root / name) >= 3, process)
    os.kill(process.pid if who == "launcher" else ranks_of(root / name)[1], signal.SIGTERM)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert err.count("stopped:") == 1, err
    stopped = steps(root / name)
    assert f"at step {stopped} of {STEPS}; saved" in err
    assert (root / name / "checkpoints" / "latest").read_text().strip() == f"step-{stopped:08d}"
    assert orjson.loads((root / name / "exit.json").read_bytes())["code"] == 75
    assert ranks_of(root / name) == {}
    goes_on(root, name, whole)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_which_goes_on(root: Path, whole: Path, rank: int) -> None:
    name = f"killed-{rank}"
    process = start(root, name)
    saved = root / name / "checkpoints" / "latest"  # it is written while training goes on
    until(lambda: steps(root / name) >= 12 and saved.exists(), process)
    os.kill(ranks_of(root / name)[rank], signal.SIGKILL)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"rank {rank}" in err and "SIGKILL" in err, err
    assert orjson.loads((root / name / "exit.json").read_bytes())["code"] == 1
    assert ranks_of(root / name) == {}
    goes_on(root, name, whole)


@pytest.mark.slow
def test_a_folder_in_use_is_told_once(root: Path) -> None:
    process = start(root, "used", "train.duration=4000 steps", "train.checkpoint.every_steps=1000")
    until(lambda: steps(root / "used") >= 1, process)
    second = tiny.pipeline("train", root / "run.yaml", f"run.dir={root / 'used'}", *TWO)
    assert second.returncode == 2
    assert second.stderr.count("in use by") == 1, second.stderr
    assert "Traceback" not in second.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == 75


@pytest.mark.slow
def test_torchrun(root: Path, whole: Path) -> None:
    run = root / "torchrun"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
        "-m",
    ]
    command += ["pipeline", "train", str(root / "run.yaml"), f"run.dir={run}", *TWO[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert exact(run) == exact(whole)


@pytest.mark.slow
def test_out_of_memory_names_rank_step_and_key(root: Path) -> None:
    command = tiny.command("train", root / "run.yaml", f"run.dir={root / 'memory'}", "launch.processes=2")
    command += ["train.batch_size=40000", "train.micro_batch_size=20000"]
    limit = 5 * 2**30  # of addresses: torch alone takes some of them
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"out of memory: rank \d in step 1: lower train.micro_batch_size", done.stderr), done.stderr
    assert "20000 now" in done.stderr
