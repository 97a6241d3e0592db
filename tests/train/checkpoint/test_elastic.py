"""Runs in processes of their own, stopped and killed, that go on with another micro-batch and see the same data."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.cli.main import main
from pipeline.train.run.folder import read_metrics
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


@pytest.mark.slow
def test_a_plain_run(root: Path) -> None:
    file = tiny.write_run(root, {"train.precision": {"compute": "fp32"}, **PLAIN}, "plain.yaml")
    whole = train(root, "plain-whole", "train.micro_batch_size=4", file=file.name)
    run = root / "plain"
    stopped_at(4, file, run, micro_batch=4)
    killed_at(7, file, run, micro_batch=1)
    goes_on(6, file, run, micro_batch=3)
    assert_same_course(run, whole)


@pytest.mark.slow
def test_phases_ramp_long_windows_and_skips(root: Path) -> None:
    file = tiny.write_run(root, {"train.precision": {"compute": "fp32"}, **ALL_AT_ONCE}, "all.yaml")
    slices = [f'data.sources.{number}.slice=[0, "{documents} documents"]' for number, documents in ((0, 5), (1, 4))]
    whole = train(root, "all-whole", "train.micro_batch_size=4", *slices, file=file.name)
    assert max(row["sea"] for row in column(whole, "epochs_by_source") if row) > 1
    run = root / "all"
    stopped_at(2, file, run, *slices, micro_batch=4)  # in the ramp
    killed_at(8, file, run, *slices, micro_batch=1)  # behind the boundary of a phase and the step that is skipped
    stopped_at(10, file, run, *slices, micro_batch=4)  # at the boundary to the long windows
    killed_at(12, file, run, *slices, micro_batch=2)  # in the long windows
    goes_on(11, file, run, *slices, micro_batch=3)
    assert_same_course(run, whole)


def stopped_at(step: int, file: Path, run: Path, *overrides: str, micro_batch: int) -> None:
    """`pipeline train` until a `stop` file is there, which is made while the step before is being saved."""
    code, out = _train(file, run, overrides, micro_batch, f"step-{step - 1:08d}", "stop")
    assert code == 75, out
    assert f"stop file) at step {step} of " in out.replace("\n", " ")


def killed_at(step: int, file: Path, run: Path, *overrides: str, micro_batch: int) -> None:
    """`pipeline train`, killed while it saves this step: what is left is the step before."""
    code, out = _train(file, run, overrides, micro_batch, f"step-{step:08d}", "kill")
    assert code == -signal.SIGKILL, out
    assert read_metrics(run)[-1]["step"] == step


def goes_on(step: int, file: Path, run: Path, *overrides: str, micro_batch: int) -> None:
    """`pipeline train` from the checkpoint of `step` to the end."""
    code, out = _train(file, run, overrides, micro_batch)
    assert code == 0, out
    assert tiny.resumed_from(out) == step


def assert_same_course(run: Path, whole: Path) -> None:
    """Each step of both runs is made of the same tokens, and has the same loss up to rounding."""
    for key in ("step", "tokens", "order_hash", "data_hash", "passed_over", "lr", "tokens_by_source"):
        assert column(run, key) == column(whole, key), key
    losses, others = ([loss for loss in column(folder, "loss") if loss is not None] for folder in (run, whole))
    assert losses == pytest.approx(others, rel=1e-4)
    assert len({row["attempt"] for row in read_metrics(run)}) >= 3
    journals = [orjson.loads((folder / "journal.json").read_bytes()) for folder in (run, whole)]
    assert journals[0] == journals[1]


def _train(
    file: Path, run: Path, overrides: tuple[str, ...], micro_batch: int, name: str = "", hook: str = ""
) -> tuple[int | None, str]:
    """The command line in a process of its own: its exit code, and what it has printed."""
    words = ["pipeline", "train", str(file), f"run.dir={run}", f"train.micro_batch_size={micro_batch}"]
    # What is done while a step is being saved is done in this step.
    words += ["train.checkpoint.every_steps=1", "train.checkpoint.async_save=false", *overrides]
    out = run.with_suffix(".out")
    # Processes are forked from one that has done nothing but the imports, which take longer than such a run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.cli.main", "pipeline.train.loop.trainer"])
    process = context.Process(target=_command_line, args=(words, out, name, hook, run), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "still running"
    return process.exitcode, out.read_text()


def _command_line(words: list[str], out: Path, name: str, hook: str, run: Path) -> None:
    """In the process: `hook` is done right before a file or folder gets a final name that ends with `name`."""
    with out.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    rename = os.replace

    def replace(source: Any, final: Any, **folders: int) -> None:
        if hook and os.fspath(final).endswith(name):
            if hook == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            (run / "stop").touch()
        rename(source, final, **folders)

    os.replace = replace
    sys.argv = words
    main()
