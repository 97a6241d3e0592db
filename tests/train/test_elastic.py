"""Runs in processes of their own, stopped and killed, that go on with another micro-batch and see the same data."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.train.run_folder import read_metrics
from tests import tiny
from tests.train.runs import column, train

PLAIN: dict[str, Any] = {"train.duration": "9 steps"}
ALL_AT_ONCE: dict[str, Any] = {
    "train.duration": "14 steps",
    "train.batch_size": 8,
    "train.batch_ramp": {"start": 4, "increment": 2, "tokens": 512},
    "blend": {
        "phases": [
            {"name": "start", "until": "6 steps"},
            {"name": "even", "until": "10 steps", "weights": {"sea": 1, "land": 1}, "batch_size": 6},
            {"name": "long", "weights": {"sea": 1, "land": 2}, "sequence_length": 64, "batch_size": 4},
        ],
        "skip": [{"steps": 7}, {"samples": "9-11"}, {"source": "sea", "documents": ["1-2"]}],
    },
}
"""A ramp, three phases, the last with longer windows, and a skip list. The sources are short: laps end on the way."""


def test_a_plain_run(root: Path) -> None:
    file = tiny.write_run(root, {"train.precision": {"compute": "fp32"}, **PLAIN}, "plain.yaml")
    whole = train(root, "plain-whole", "train.micro_batch_size=4", file=file.name)
    run = root / "plain"
    stopped_at(4, file, run, micro_batch=4)
    killed_at(7, file, run, micro_batch=1)
    goes_on(6, file, run, micro_batch=3)
    assert_same_course(run, whole)


def test_phases_ramp_long_windows_and_skips(root: Path) -> None:
    file = tiny.write_run(root, {"train.precision": {"compute": "fp32"}, **ALL_AT_ONCE}, "all.yaml")
    slices = [f'data.sources.{number}.slice=[0, "{documents} documents"]' for number, documents in ((0, 5), (1, 4))]
    whole = train(root, "all-whole", "train.micro_batch_size=4", *slices, file=file.name)
    assert max(row["sea"] for row in column(whole, "epochs_by_source") if row) > 1
    run = root / "all"
    stopped_at(2, file, run, *slices, micro_batch=4)  # in the ramp
    killed_at(9, file, run, *slices, micro_batch=1)  # behind the boundary of a phase and the step that is skipped
    stopped_at(11, file, run, *slices, micro_batch=3)  # in the long windows
    goes_on(11, file, run, *slices, micro_batch=4)
    assert_same_course(run, whole)


def stopped_at(step: int, file: Path, run: Path, *overrides: str, micro_batch: int) -> None:
    """`pipeline train` until a `stop` file is there, which is made while the step before is being saved."""
    hook = f"open({str(run / 'stop')!r}, 'w').close()"
    done = _hooked(f"step-{step - 1:08d}", hook, file, run, *overrides, micro_batch=micro_batch)
    assert done.returncode == 75, done.stdout + done.stderr
    assert f"stop file at step {step} of " in done.stderr.replace("\n", " ")


def killed_at(step: int, file: Path, run: Path, *overrides: str, micro_batch: int) -> None:
    """`pipeline train`, killed while it saves this step: what is left is the step before."""
    hook = "os.kill(os.getpid(), signal.SIGKILL)"
    done = _hooked(f"step-{step:08d}", hook, file, run, *overrides, micro_batch=micro_batch)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert read_metrics(run)[-1]["step"] == step


def goes_on(step: int, file: Path, run: Path, *overrides: str, micro_batch: int) -> None:
    """`pipeline train` from the checkpoint of `step` to the end."""
    done = tiny.pipeline("train", file, *_overrides(run, overrides, micro_batch))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on from step-{step:08d}" in done.stdout


def assert_same_course(run: Path, whole: Path) -> None:
    """Each step of both runs is made of the same tokens, and has the same loss up to rounding."""
    for key in ("step", "tokens", "order_hash", "data_hash", "passed_over", "lr", "tokens_by_source"):
        assert column(run, key) == column(whole, key), key
    losses, others = ([loss for loss in column(folder, "loss") if loss is not None] for folder in (run, whole))
    assert losses == pytest.approx(others, rel=1e-4)
    assert len({row["attempt"] for row in read_metrics(run)}) >= 3
    journals = [orjson.loads((folder / "journal.json").read_bytes()) for folder in (run, whole)]
    assert journals[0] == journals[1]


def _hooked(
    name: str, hook: str, file: Path, run: Path, *overrides: str, micro_batch: int
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with `hook` done right before a file or folder gets its final name."""
    words = ["pipeline", "train", str(file), *_overrides(run, overrides, micro_batch)]
    script = f"""
import os, signal, sys
rename = os.replace
def replace(source, final):
    if os.fspath(final).endswith({name!r}):
        {hook}
    rename(source, final)
os.replace = replace
sys.argv = {words!r}
from pipeline.cli import main
main()
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)


def _overrides(run: Path, overrides: tuple[str, ...], micro_batch: int) -> list[str]:
    return [
        f"run.dir={run}", f"train.micro_batch_size={micro_batch}", "train.checkpoint.every_steps=1", *overrides
    ]  # fmt: skip
