"""Runs that several modules look at, and the reports on them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common.errors import EXIT_NUMERICAL
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.perplexity import evaluate
from pipeline.eval.report.command import report
from tests import tiny
from tests.eval.report.reading import Report, read
from tests.train.poison import poison
from tests.train.runs import start, train

FAULTS = [
    "train.faults.on_spike=skip",
    "train.faults.max_in_a_row=2",
    "train.faults.spike_window=8",
    "train.faults.spike_zscore=20",
]
SPIKES = dict.fromkeys(range(14, 20), 1000.0)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`done`: 24 steps, evaluated twice. `again`: diverged behind a checkpoint and went on. `failed`: diverged."""
    root = tmp_path_factory.mktemp("runs")
    file = tiny.write_run(root, {"train.duration": "24 steps", "train.metrics.windows": True})
    preprocess(load(file))
    done = train(root, "done")
    for step in (21, 24):
        evaluate(load(file, [f"run.dir={done}"]), step, Console(quiet=True))
    wild = [*FAULTS, "train.optimizer.lr=0.05", "train.batch_size=8"]
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, SPIKES)  # whether a training diverges by itself depends on the processor
        assert start(root, "failed", *wild)[0] == EXIT_NUMERICAL
    shutil.copytree(root / "failed", root / "again")
    train(root, "again", *wild[1:])
    return root


@pytest.fixture(scope="session")
def seen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """The reports on each of the runs, and on two of them together."""
    folder = tmp_path_factory.mktemp("reports")
    found = {name: read(root / name, out=folder / f"{name}.html") for name in ("done", "again", "failed")}
    report([root / "done", root / "failed"], Console(quiet=True), out=folder / "two.html", picture=True)
    return found | {"two": Report(folder / "two.html")}


@pytest.fixture(scope="session")
def picture(seen: dict[str, Report]) -> Path:
    return seen["two"].file.with_suffix(".png")
