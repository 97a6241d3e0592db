"""Runs that are stopped and killed, and go on with other numbers of processes and micro-batches: the same samples."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.checkpoint.test_elastic import ALL_AT_ONCE
from tests.train.distributed.faulty import KILLED, Fault, Instant, Start
from tests.train.runs import column

pytestmark = pytest.mark.parallel

COMMON: dict[str, Any] = {
    "train.precision": {"compute": "fp32"},
    "train.checkpoint": {"every_steps": 1, "keep": 3},
    "train.validation.samples": 0,
}
PLAIN = {"train.duration": "60 steps", "train.batch_size": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    preprocess(load(tiny.write_run(folder, {**COMMON, **PLAIN}, "plain.yaml")))
    tiny.write_run(folder, {**COMMON, **ALL_AT_ONCE}, "all.yaml")
    return folder


def data(degree: int, micro_batch: int) -> list[str]:
    """So many processes, each with its part of the batch."""
    return [f"parallel.dp_shard={degree}", f"train.micro_batch_size={micro_batch}"]


def whole(file: Path, run: Path, values: list[str], world: int) -> Path:
    """An uninterrupted run."""
    with Start(file, run, world, values) as start:
        assert start.wait() == [0] * world, start.said()
    return run


def assert_same_course(run: Path, other: Path) -> None:
    """Each step of both runs is made of the same tokens, and has the same loss up to rounding."""
    for key in ("step", "tokens", "order_hash", "data_hash", "passed_over", "lr", "tokens_by_source"):
        assert column(run, key) == column(other, key), key
    losses, others = ([loss for loss in column(folder, "loss") if loss is not None] for folder in (run, other))
    assert losses == pytest.approx(others, rel=1e-4)
    journals = [orjson.loads((folder / "journal.json").read_bytes()) for folder in (run, other)]
    assert journals[0] == journals[1]


def degrees(run: Path) -> list[int]:
    """How many processes the checkpoints that are left were written by."""
    states = [orjson.loads(file.read_bytes()) for file in sorted(run.glob("checkpoints/step-*/state.json"))]
    return [state["layout"]["dp"] for state in states]


@pytest.mark.slow
def test_four_then_two_then_three_processes_by_the_launcher(root: Path) -> None:
    file, run = root / "plain.yaml", root / "launched"
    uninterrupted = whole(file, root / "plain", data(4, 2), 4)
    for degree, micro_batch, end in ((4, 1, "stop file"), (2, 3, "SIGTERM"), (3, 2, "")):
        before = read_metrics(run)[-1]["step"] if run.exists() else 0
        words = [f"run.dir={run}", f"launch.processes={degree}", *data(degree, micro_batch)]
        process = subprocess.Popen(
            tiny.command("train", file, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 100
        while end and (not run.exists() or not read_metrics(run) or read_metrics(run)[-1]["step"] < before + 2):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.01)
        if end == "stop file":
            (run / "stop").touch()
        elif end:
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
        assert process.returncode == (75 if end else 0), err
        assert tiny.resumed_from(out) == (before or None), out
        assert set(degrees(run)[-2:]) == {degree}
    assert_same_course(run, uninterrupted)


@pytest.mark.slow
def test_phases_a_ramp_long_windows_and_skips(root: Path) -> None:
    """The numbers of processes do not divide the batches: samples that count for nothing fill them."""
    file, run = root / "all.yaml", root / "all"
    slices = ['data.sources.0.slice=[0, "5 documents"]', 'data.sources.1.slice=[0, "4 documents"]']
    uninterrupted = whole(file, root / "all-one", ["train.micro_batch_size=4", *slices], 1)
    assert max(row["sea"] for row in column(uninterrupted, "epochs_by_source") if row) > 1

    def stopped_after(step: int) -> Fault:
        # Asked for while a step is being made, and so at its end.
        return Fault(
            Instant(function="pipeline.train.optim.optimizers:Optimizers.step", number=step), touch=run / "stop"
        )

    turns: list[tuple[int, int, dict[int, Fault], list[int]]] = [
        (4, 1, {0: stopped_after(2)}, [75] * 4),
        (2, 3, {1: Fault(Instant(function="pipeline.train.optim.optimizers:Optimizers.step", number=6))}, [1, KILLED]),
        (3, 1, {0: stopped_after(2)}, [75] * 3),
        (2, 1, {}, [0, 0]),
    ]
    first = 1
    for degree, micro_batch, faults, codes in turns:
        with Start(file, run, degree, [*data(degree, micro_batch), *slices], faults) as start:
            assert start.wait() == codes, start.said()
        rows = read_metrics(run)
        assert rows[-1]["step"] > first
        first = rows[-1]["step"]
    assert_same_course(run, uninterrupted)
    assert {row["attempt"] for row in read_metrics(run)} == {1, 2, 3, 4}
