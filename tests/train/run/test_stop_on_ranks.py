"""Stops and saves on four ranks: whoever is asked, all agree at a step boundary."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed import ranks
from tests.train.distributed.test_train_command import ranks_of, steps
from tests.waiting import until

pytestmark = pytest.mark.parallel

FOUR = ("launch.processes=4", "parallel.tp=2", "parallel.dp_shard=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    keys: dict[str, Any] = {
        "train.duration": "100000 steps",
        "train.precision": {"compute": "fp32"},
        "train.validation.samples": 0,
        "train.checkpoint": {"every_steps": 100_000, "keep": 99},
        "launch.device": "cpu",
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


def committed(run: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (run / "checkpoints").glob("step-????????/COMMIT"))


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_same_step(root: Path) -> None:
    run = root / "stopped"
    command = tiny.command("train", root / "run.yaml", f"run.dir={run}", *FOUR)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: steps(run) >= 3, process)
    (run / "save").touch()
    until(lambda: not (run / "save").exists() and committed(run), process)
    (saved,) = committed(run)
    until(lambda: steps(run) > saved + 1, process)

    pids = ranks_of(run / "logs")
    assert pids.keys() == {0, 1, 2, 3}
    os.kill(pids[3], signal.SIGUSR2)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    step = steps(run)
    assert step > saved
    assert f"a stop request at step {step} of 100,000; saved" in err
    (logs,) = (run / "logs").iterdir()
    for rank, reason in {1: "a stop request", 2: "a stop request", 3: "SIGUSR2"}.items():
        record = json.loads((logs / f"rank-{rank:04d}.error.json").read_bytes())
        assert re.match(rf"{reason} at step {step} of ", record["message"]["message"]), record
    assert committed(run) == [saved, step]
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"
    assert json.loads((run / "exit.json").read_bytes())["code"] == 75
    assert ranks_of(run / "logs") == {}


def _train_with_a_straggler(file: Path, seconds: float) -> str:
    """Train; rank 1 has more to do in each step than its part. Returns what was printed."""
    import io

    from rich.console import Console

    from pipeline.train.loop import trainer
    from pipeline.train.loop.step import Stepper

    if os.environ["RANK"] == "1":
        step = Stepper.step

        def slow(*args: Any, **kwargs: Any) -> Any:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
            return step(*args, **kwargs)

        Stepper.step = slow  # type: ignore[method-assign]
    out = io.StringIO()
    trainer.train(load(file), Console(file=out, width=500))
    return out.getvalue()


@pytest.mark.slow
def test_a_rank_that_works_longer_than_the_others_is_named(root: Path) -> None:
    import socket

    run = root / "straggler"
    changes = {
        "run.dir": str(run), "train.duration": "60 steps", "parallel.dp_shard": 2, "launch.processes": 2,
        "train.validation.samples": 0, "launch.device": "cpu", "train.precision": {"compute": "fp32"},
    }  # fmt: skip
    file = tiny.write_run(root, changes, name="straggler.yaml")
    out, _ = ranks.run(2, _train_with_a_straggler, file, 0.1, connect=False)
    assert re.search(
        rf"warning: rank 1 on {socket.gethostname()} works [\d.]+ times as long as the median rank", out
    ), out
    slowest = [row["work"]["slowest"] for row in read_metrics(run)]
    assert slowest[1:].count(1) > 0.9 * len(slowest), "told of the step before"
