"""GPT-2 of 124 million parameters in bf16 for some minutes, and its first steps on the CPU in fp32."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from train_gpu_table import TOLERANCE

from evidence.child import pipeline
from evidence.corpus import make
from evidence.exact import DATA, compare_rows, falls, stop
from evidence.imported import ROOT
from evidence.item import Result
from pipeline.common.errors import EXIT_OK, EXIT_STOPPED
from pipeline.train.run.folder import read_metrics

Rows = Sequence[Mapping[str, Any]]

RUN_FILE = "configs/models/gpt2-124m.yaml"
_WARMUP = 5
"""Steps after the first ones whose speeds do not count: layers are compiled for their shape."""


def measure(
    device: str,
    work: Path,
    *,
    model: Mapping[str, Any],
    text_bytes: int,
    vocab_size: int,
    sequence_length: int,
    batch_size: int,
    micro_batch_size: int,
    first_steps: int,
    first_batch_size: int,
    warmup: int,
    validate_every: int,
    validation_samples: int,
    duration: str,
    minutes: float | None,
    threads: int | None,
) -> Result:
    """Train the model of `configs/models/gpt2-124m.yaml` with its optimizer.

    Args:
        device: Of the long run; the first steps are made on the CPU, too.
        work: Folder for corpus and runs.
        model: What differs from the `model` section of the file.
        text_bytes: See `corpus.make`.
        vocab_size: See `corpus.make`; the model has more, those of `model.vocab_size`.
        sequence_length: Tokens of a window.
        batch_size: Windows of a step.
        micro_batch_size: Windows of a micro-batch.
        first_steps: Steps at the beginning that the CPU makes, too.
        first_batch_size: Windows of each of these.
        warmup: Steps in which the learning rate rises.
        validate_every: Steps between two validations.
        validation_samples: Windows of each.
        duration: Of the run.
        minutes: `launch.max_minutes`: the run stops before its end.
        threads: `launch.threads`.
    """
    published = yaml.safe_load((ROOT / RUN_FILE).read_text())
    train = {
        "duration": duration,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "optimizer": published["train"]["optimizer"],
        "schedule": {**published["train"]["schedule"], "warmup": f"{warmup} steps"},
        "validation": {"every_steps": validate_every, "samples": validation_samples},
        "checkpoint": {"every_steps": 10**6},
        "metrics": {"tensorboard": False},
    }
    first = {"until": f"{first_steps} steps", "batch_size": first_batch_size, "micro_batch_size": first_batch_size}
    sections = {
        "launch": {"device": device, "threads": threads, "max_minutes": minutes},
        "blend": {"phases": [first, {}]},
        "model": {**published["model"], **model},
        "train": train,
    }
    corpus = make(work, sections, text_bytes=text_bytes, vocab_size=vocab_size)
    pipeline("train", corpus.file, codes=(EXIT_OK, EXIT_STOPPED))
    # Stopped, since a shorter run would have another schedule. A stop that is asked for between two steps comes after
    # the second.
    changes = ("launch.max_minutes=null", "train.precision.compute=fp32", "train.compile=false")
    stop(corpus.file, work / "on-cpu", "cpu", first_steps - 1, *changes)
    rows, other = read_metrics(work / "run"), read_metrics(work / "on-cpu")
    compared, trained = beside_cpu(rows, other, first_steps), course(rows, first_steps)
    return {
        "corpus": corpus.about,
        **trained,
        **compared,
        "checks": trained["checks"] | compared["checks"],
        "reads": [RUN_FILE],
    }


def beside_cpu(rows: Rows, other: Rows, steps: int) -> Result:
    """Compare the first steps of a run in bf16 with those on a CPU in fp32: data and learning rates, and losses."""
    mine = rows[:steps]
    together = {"the CPU made the first steps": len(mine) == len(other) == steps}
    return {
        "first_losses": [row["loss"] for row in mine],
        "first_losses_cpu": [row["loss"] for row in other],
        **compare_rows(mine, other, (*DATA, "lr"), TOLERANCE["bf16"], together),
    }


def course(rows: Rows, first_steps: int) -> Result:
    """Losses and speeds of a run; speeds are medians over the steps that are not among the first."""
    timed = [row for row in rows if row["step"] > first_steps + _WARMUP]
    heldout = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    speeds = {
        key: statistics.median(row[key] for row in timed) if timed and key in timed[0] else None
        for key in ("tokens_per_second", "step_seconds", "mfu", "mfu_causal")
    }
    losses = [row["loss"] for row in rows]
    return {
        "steps": len(rows),
        "tokens": rows[-1]["tokens"],
        "epochs": max(rows[-1]["epochs_by_source"].values()),
        **speeds,
        "last_loss": losses[-1],
        "losses": [round(loss, 4) for loss in losses],
        "heldout_losses": {step: round(loss, 4) for step, loss in heldout},
        "checks": {
            "the loss falls": falls(losses),
            "the held-out loss falls": falls([loss for _, loss in heldout]),
        },
    }
