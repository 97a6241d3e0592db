"""The same steps on two sides: a GPU and a CPU, a run and a resumed one, our model and transformers' Llama."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from train_gpu_table import TOLERANCE

from evidence.child import pipeline
from evidence.corpus import make
from evidence.item import Result
from pipeline.common.errors import Stopped
from pipeline.config.load import load
from pipeline.train.run.folder import read_metrics

Rows = list[dict[str, Any]]

DATA = ("order_hash", "data_hash", "tokens")
"""Keys of metrics.jsonl that identify the data of a step."""
_BITS = ("step", "loss", "loss_by_source", "grad_norm", "lr", *DATA, "validation_loss")
"""Keys that are equal in two runs with the same bits."""
FALLS = 0.3
"""Nats that the loss has to fall, so that the optimizer counts, too."""
MULTIPLE = 2.0
"""In bf16 our losses may be this many times as far from fp32 as those of transformers, by root mean squares."""


def cpu(device: str, work: Path, *, sections: Mapping[str, Any], text_bytes: int, vocab_size: int) -> Result:
    """A run on the device and one on the CPU, of one run file.

    Args:
        device: Where the first run trains: cuda or cpu.
        work: Folder for corpus and runs.
        sections: Sections of the run file; in fp32.
        text_bytes: See `corpus.make`.
        vocab_size: See `corpus.make`.
    """
    corpus = make(work, sections, text_bytes=text_bytes, vocab_size=vocab_size)
    for name, kind in (("on-device", device), ("on-cpu", "cpu")):
        pipeline("train", corpus.file, f"run.dir={work / name}", f"launch.device={kind}")
    return {"corpus": corpus.about, **beside_cpu(read_metrics(work / "on-device"), read_metrics(work / "on-cpu"))}


def beside_cpu(mine: Rows, other: Rows) -> Result:
    """Compare the rows of a run with those of the same run on a CPU."""
    together = {"the runs have the same steps": len(mine) == len(other) > 0}
    compared = compare_rows(mine, other, DATA, TOLERANCE["fp32"], together)
    losses = [row["loss"] for row in mine]
    return {
        "steps": [len(mine), len(other)],
        **compared,
        "losses": losses,
        "losses_cpu": [row["loss"] for row in other],
        "checks": compared["checks"] | {"the loss falls": falls(losses)},
    }


def compare_rows(
    mine: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    limit: float,
    together: Mapping[str, bool],
) -> Result:
    """`largest_difference` of the losses, and checks that they are within a limit and that keys are equal.

    Args:
        mine: Rows of metrics.jsonl.
        other: Those of the run that is compared with.
        keys: What has to be equal in all rows.
        limit: Of the losses' relative difference.
        together: The check that both have the same steps; losses are not compared where it does not hold.
    """
    losses = [[row["loss"] for row in rows] for rows in (mine, other)]
    apart = furthest(*losses) if all(together.values()) else None
    return {
        "largest_difference": apart,
        "limit": limit,
        "checks": {
            **together,
            **{f"{key} is equal": [row[key] for row in mine] == [row[key] for row in other] for key in keys},
            f"losses differ by at most {limit:g}": apart is not None and apart["relative"] <= limit,
        },
    }


def furthest(mine: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The largest difference, `relative` to `other`, and its `step` from 1; a value that is not finite is furthest."""
    apart = [abs(a - b) / abs(b) for a, b in zip(mine, other, strict=True)]
    step = max(range(len(apart)), key=lambda k: (not math.isfinite(apart[k]), apart[k]))
    return {"relative": apart[step], "step": step + 1}


def falls(losses: Sequence[float]) -> bool:
    """True if the last loss is lower than the first by at least `FALLS`."""
    return bool(losses) and losses[-1] <= losses[0] - FALLS


def resume(
    device: str,
    work: Path,
    *,
    sections: Mapping[str, Any],
    stop_after: int,
    text_bytes: int,
    vocab_size: int,
) -> Result:
    """A run straight to its end, and the same run stopped and resumed by another process.

    Args:
        device: Where all runs train: cuda or cpu.
        work: Folder for corpus and runs.
        sections: Sections of the run file; deterministic.
        stop_after: The step after which a stop is asked for.
        text_bytes: See `corpus.make`.
        vocab_size: See `corpus.make`.
    """
    corpus = make(work, sections, text_bytes=text_bytes, vocab_size=vocab_size)
    straight, resumed = work / "straight", work / "resumed"
    stopped = stop(corpus.file, resumed, device, stop_after)
    for run in (resumed, straight):
        pipeline("train", corpus.file, f"run.dir={run}", f"launch.device={device}")
    return {"corpus": corpus.about, "stopped_after": stopped, **same_bits(resumed, straight, stopped)}


def stop(file: Path, run: Path, device: str, step: int, *overrides: str) -> int:
    """Train with overrides in this process until the run's `stop` file ends it; returns the last step.

    On a GPU the line of a step is printed while the next one runs, so that may be one more than `step`.
    """
    from pipeline.common.console import Console
    from pipeline.train.loop.trainer import train

    config = load(
        file, [f"run.dir={run}", f"launch.device={device}", f"train.metrics.log_every_steps={step}", *overrides]
    )

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if re.search(rf"\bstep +{step}/", text):
                (run / "stop").touch()
            return super().write(text)

    log = Log()
    try:
        train(config, Console(file=log, width=500))
    except Stopped:
        return int(read_metrics(run)[-1]["step"])
    raise RuntimeError(f"the run was not stopped after step {step}: {log.getvalue()[-300:]}")


def same_bits(mine: Path, other: Path, stopped: int) -> Result:
    """Compare rows and last checkpoints of two run folders, of which one was stopped after a step."""
    rows = [[{key: row.get(key) for key in _BITS} for row in read_metrics(run)] for run in (mine, other)]
    files = [checkpoint_hashes(run) for run in (mine, other)]
    losses = [float(row["loss"]) for row in read_metrics(other)]
    return {
        "steps": len(rows[1]),
        "first_difference": first_difference(*rows),
        "checkpoint_files": files[1],
        "losses": losses,
        "checks": {
            "it was stopped before the end": 0 < stopped < len(rows[1]),
            "rows have the same bits": bool(rows[1]) and rows[0] == rows[1],
            "weights and optimizer states have the same bits": bool(files[1]) and files[0] == files[1],
            "the loss falls": falls(losses),
        },
    }


def checkpoint_hashes(run: Path) -> dict[str, str]:
    """Hashes of the files with the tensors of a run's last checkpoint, read from the disk."""
    folder = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    found = {}
    for file in sorted(folder.glob("*.distcp")):
        with file.open("rb") as opened:
            found[file.name] = hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
    return found


def first_difference(mine: Rows, other: Rows) -> str | None:
    """The first step and key that differ, with both values; None where all is equal."""
    for a, b in zip(mine, other, strict=False):
        for key in b:
            if a.get(key) != b[key]:
                return f"step {b['step']}, {key}: {a.get(key)} and {b[key]}"
    return None if len(mine) == len(other) else f"{len(mine)} and {len(other)} rows"


def transformers(device: str, work: Path, *, precision: str, steps: int, sections: Mapping[str, Any]) -> Result:
    """Our model and transformers' Llama of the same shape, weights, batches and optimizer.

    Args:
        device: Where all sides train: cuda or cpu.
        work: Folder for the run file.
        precision: fp32: the two are compared. bf16: each is compared with ours in fp32.
        steps: Number of steps of each side.
        sections: Sections of the run file, with `model.vocab_size`.
    """
    from train_gpu_peer import peer
    from train_gpu_steps import Build, measure, ours

    values = {
        "run": {"dir": str(work / "run")},
        "data": {"sources": [{"name": "drawn", "paths": [str(work / "none.txt")]}]},
        "tokenizer": {"train": {"vocab_size": sections["model"]["vocab_size"]}},
        **sections,
    }
    file = work / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    sides: dict[str, tuple[str, Build]] = {"ours_fp32": ("fp32", ours)}
    if precision == "fp32":
        sides["transformers_fp32"] = "fp32", peer("sdpa")
    else:
        sides |= {f"ours_{precision}": (precision, ours), f"transformers_{precision}": (precision, peer("sdpa"))}
    common = [f"launch.device={device}", f"train.duration={steps} steps", "train.validation.samples=0"]
    losses: dict[str, list[float]] = {}
    found: Result = {}
    for name, (compute, build) in sides.items():
        line = measure(load(file, [*common, f"train.precision.compute={compute}"]), build, steps - 1, warmup=1)
        assert line is not None, "one process is rank 0"
        losses[name] = line["losses"]
        found |= {key: line[key] for key in ("parameters", "step_tokens")}
    return {**found, **beside_transformers(losses, precision), "losses": losses}


def beside_transformers(losses: Mapping[str, Sequence[float]], precision: str) -> Result:
    """Compare losses by name: the second with the first, which is ours in fp32; the third is what others reach."""
    base, other, *theirs = losses
    apart = {name: furthest(losses[name], losses[base]) for name in (other, *theirs)}
    spread = {name: _spread(losses[name], losses[base]) for name in apart}
    limit = TOLERANCE[precision]
    checks = {f"{other} differs from {base} by at most {limit:g}": apart[other]["relative"] <= limit}
    for name in theirs:
        checks[f"{other} is at most {MULTIPLE:g} times as far from {base} as {name}"] = (
            spread[other] <= MULTIPLE * spread[name]
        )
    return {
        "largest_difference": apart,
        "root_mean_square_difference": spread,
        "limit": limit,
        "multiple": MULTIPLE,
        "checks": checks | {"the loss falls": all(falls(each) for each in losses.values())},
    }


def _spread(mine: Sequence[float], other: Sequence[float]) -> float:
    """Root of the mean square of the relative differences."""
    return math.sqrt(sum(((a - b) / b) ** 2 for a, b in zip(mine, other, strict=True)) / len(mine))
