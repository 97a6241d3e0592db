"""Runs on several processes that are ended again and again, at moments drawn by chance: they go on, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from tests import tiny
from tests.train.distributed.test_train_command import ranks_of, steps
from tests.train.parallel import layouts
from tests.train.runs import exact, weights_hash

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

STEPS = 12
LAYOUTS = {
    "zbv": ("launch.processes=2", "parallel.pp=2", "parallel.pipeline.schedule=zbv"),
    "fsdp2": ("launch.processes=2", "parallel.dp_shard=2"),
    "pp2-fsdp2": ("launch.processes=4", "parallel.pp=2", "parallel.dp_shard=2"),
}
ENDS = ("kill launcher", "kill rank", "kill rank", "SIGTERM", "SIGINT", "SIGUSR2")
MOMENTS = ("start", "step", "save", "save")
CODES = {"kill launcher": {-signal.SIGKILL}, "kill rank": {1}}
ASKED = {75, 130, -signal.SIGTERM, -signal.SIGUSR2, -signal.SIGINT}
"""What a signal comes to: saved, or ended before there was anything to save."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    keys: dict[str, Any] = {
        "launch.crash_loop": 100,  # several may end at the same step by chance
        "model.layers": 4,
        "train.duration": f"{STEPS} steps",
        "train.precision": {"compute": "fp32"},
        "train.batch_size": 8,
        "train.micro_batch_size": 1,
        "train.validation": {"every_steps": 3, "samples": 20},
        "train.checkpoint": {"every_steps": 1, "keep": 3},
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


def names(run: Path) -> set[str]:
    """What is being written among the checkpoints."""
    return {path.name for path in (run / "checkpoints").glob("*.tmp")}


def wait_for(moment: str, run: Path, process: subprocess.Popen[str], chance: random.Random) -> None:
    """Wait for it; a process that ends before is not killed any more."""
    done, old = steps(run), names(run)
    reached: dict[str, Callable[[], object]] = {
        "start": lambda: True,
        "step": lambda: steps(run) > done,
        "save": lambda: names(run) - old,
    }
    until = time.monotonic() + 200
    while not reached[moment]() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    time.sleep(chance.uniform(0, {"start": 8, "step": 0.2, "save": 0.02}[moment]))


def end(how: str, run: Path, process: subprocess.Popen[str], chance: random.Random) -> None:
    """End the run, if it has not ended."""
    target, number = process.pid, signal.SIGKILL
    if how == "kill rank":
        target = chance.choice([*ranks_of(run / "logs").values()] or [target])
    elif how != "kill launcher":
        number = signal.Signals[how]
    with suppress(ProcessLookupError):
        os.kill(target, number)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=layouts.trains(name)) for name in LAYOUTS])
def test_it_goes_on_with_the_same_bits(root: Path, layout: str) -> None:
    chance = random.Random(layout)
    run, whole = root / layout, root / f"{layout}-whole"
    done = tiny.pipeline("train", root / "run.yaml", f"run.dir={whole}", *LAYOUTS[layout], timeout=300)
    assert done.returncode == 0, done.stderr
    command = tiny.command("train", root / "run.yaml", f"run.dir={run}", *LAYOUTS[layout])
    for _ in range(5):
        how, moment = chance.choice(ENDS), chance.choice(MOMENTS)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(moment, run, process, chance)
        end(how, run, process, chance)
        _out, err = process.communicate(timeout=300)
        # Where no rank was there yet, the launcher was killed; and it may have been too late for any of them.
        allowed = CODES.get(how, ASKED) | {0} | ({-signal.SIGKILL} if how == "kill rank" else set())
        assert process.returncode in allowed, (how, moment, err)
        assert process.returncode < 0 or "Traceback" not in err, (how, moment, err)
        until = time.monotonic() + 20
        while ranks_of(run / "logs"):
            assert time.monotonic() < until, f"{how} at {moment} left ranks behind"
            time.sleep(0.05)
    done = tiny.pipeline("train", root / "run.yaml", f"run.dir={run}", *LAYOUTS[layout], timeout=300)
    assert done.returncode == 0, done.stderr
    assert exact(run) == exact(whole)
    assert weights_hash(run) == weights_hash(whole)
    assert names(run) == set()
    assert not (run / "lock").exists()
    ended = orjson.loads((run / "exit.json").read_bytes())
    assert (ended["code"], ended["step"]) == (0, STEPS)
