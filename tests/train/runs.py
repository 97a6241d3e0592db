"""Tiny training runs in this process, and what is compared between two of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics

EXACT = ("loss", "loss_by_source", "grad_norm", "lr", "tokens", "order_hash", "data_hash", "validation_loss")


def start(root: Path, name: str, *overrides: str, file: str = "run.yaml") -> tuple[int, str]:
    """Train in `root / name`; returns the exit code that the command line would leave with, and what was printed."""
    out = io.StringIO()
    try:
        trainer.train(load(root / file, [f"run.dir={root / name}", *overrides]), Console(file=out, width=500))
    except UserError as error:
        return error.exit_code, out.getvalue() + str(error)
    return 0, out.getvalue()


def train(root: Path, name: str, *overrides: str, file: str = "run.yaml") -> Path:
    """`start` that must end well; returns the run folder."""
    code, out = start(root, name, *overrides, file=file)
    assert code == 0, out
    return root / name


def exact(run: Path) -> list[dict[str, Any]]:
    """What must not differ between two runs."""
    return [{key: row.get(key) for key in ("step", *EXACT)} for row in read_metrics(run)]


def column(run: Path, key: str) -> list[Any]:
    """A value of each step; None where a step does not have it."""
    return [row.get(key) for row in read_metrics(run)]


def weights_hash(run: Path, step: int | None = None) -> dict[str, Any]:
    """Size and hash of the tensors of a checkpoint, by default of the last one."""
    checkpoints = run / "checkpoints"
    name = f"step-{step:08d}" if step is not None else (checkpoints / "latest").read_text().strip()
    files = orjson.loads((checkpoints / name / "COMMIT").read_bytes())["files"]
    return {name: value for name, value in files.items() if name.endswith(".distcp")}
