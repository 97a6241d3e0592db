"""Saves of a large model while it trains, a `kill -9` in the middle, and the same command again."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.child import command, pipeline
from evidence.corpus import make
from evidence.item import Result
from pipeline.common.run_files import RunFiles
from pipeline.common.storage import read_json_lines
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.run.attempts import attempts
from pipeline.train.run.goodput import goodput

Rows = Sequence[Mapping[str, Any]]
"""Of metrics.jsonl."""
_POLL_S = 0.01
_WARMUP = 2
"""Steps of each attempt whose times are not compared."""


def measure(
    device: str,
    work: Path,
    *,
    threads: int | None,
    model: Mapping[str, Any],
    text_bytes: int,
    vocab_size: int,
    sequence_length: int,
    batch_size: int,
    every: int,
    kill_at: int,
    steps: int,
) -> Result:
    """Train with saves in the background until it is killed, and start the same command again.

    Seconds and sizes are those that the run itself records: `save_blocked`, what the loop waited for; `save_seconds`,
    from the copy to the commit. The run is deterministic and its layers are not compiled, in both attempts.

    Args:
        device: Where it trains.
        work: For the run; at most two checkpoints are there at once.
        threads: `launch.threads`.
        model: The `model` section.
        text_bytes: Limit of the corpus.
        vocab_size: Of the tokenizer.
        sequence_length: Tokens of a window.
        batch_size: Windows of a step, and of its only micro-batch.
        every: Steps between two saves.
        kill_at: The process is killed as soon as metrics.jsonl has the row of this step.
        steps: Of the run; the last save is not in the background.
    """
    train = {
        "duration": f"{steps} steps",
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "schedule": {"warmup": f"{every} steps"},
        "checkpoint": {"every_steps": every, "keep": 1},
        "validation": {"samples": 0},
        "metrics": {"log_every_steps": every, "tensorboard": False},
        "deterministic": True,
        "compile": False,
    }
    sections = {"launch": {"device": device, "threads": threads}, "model": dict(model), "train": train}
    corpus = make(work, sections, text_bytes=text_bytes, vocab_size=vocab_size)
    run, log = work / "run", work / "first.log"
    started = time.time()
    with log.open("wb") as output:
        first = subprocess.Popen(command("train", corpus.file), stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_for_step(run, kill_at, first, log)
    finally:
        killed = time.time()
        first.kill()
        first.wait()
    checkpoints = Checkpoints.of_run(run)
    committed, unfinished = checkpoints.latest(), checkpoints.unfinished()
    pipeline("train", corpus.file)
    rows, tries = read_json_lines(RunFiles(run).metrics), attempts(run)
    latest, used = checkpoints.latest(), goodput(run)
    assert committed and latest and used, "the run has saved"
    found = saves(rows)
    again = repeated(rows, tries[0].number, tries[1].number)
    begun = {
        line["attempt"]: line["time"] for line in read_json_lines(RunFiles(run).ledger) if line["event"] == "attempt"
    }
    background = [save for save in found if save["step"] < steps]
    return {
        "corpus": corpus.about,
        "checkpoint_bytes": latest.size,
        "saves": [{key: value for key, value in save.items() if key != "in_flight"} for save in found],
        "first_blocked_s": _median(save["blocked_s"] for save in background if save["first"]),
        "blocked_s": _median(save["blocked_s"] - save["waited_s"] for save in background if not save["first"]),
        "bytes_per_s": _median(latest.size / save["commit_s"] for save in background if save["commit_s"] is not None),
        "step_seconds": step_seconds(rows, found),
        "killed": {
            "attempt_ran_as": tries[0].outcome,
            "newest_committed": committed.step,
            "unfinished": [path.name for path in unfinished],
        },
        "first_start": start_seconds(rows, tries[0].number, started, begun[tries[0].number]),
        "restart": start_seconds(rows, tries[1].number, killed, begun[tries[1].number]),
        "repeated": again,
        "goodput": {key: round(value, 4) for key, value in used.to_json().items()},
        "checks": {
            "the first attempt was killed": tries[0].outcome == "killed" and tries[0].pid == first.pid,
            "it goes on from the newest checkpoint that was committed": tries[1].first_step == committed.step > 0,
            "steps were repeated": again["steps"] > 0,
            "repeated steps have the same data": again["data_equal"],
            "repeated steps have the same losses": again["losses_equal"],
            "the run came to its end": latest.step == steps and tries[1].outcome == "done",
        },
    }


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    while not any("loss" in row and row["step"] >= step for row in read_json_lines(RunFiles(run).metrics)):
        if process.poll() is not None:
            last = " ".join(log.read_text(errors="replace").split())[-300:]
            raise RuntimeError(f"the run ended before step {step} (exit code {process.returncode}): {last}")
        time.sleep(_POLL_S)


def saves(rows: Rows) -> list[dict[str, Any]]:
    """Saves in their order.

    Returns:
        For each `attempt`, `step`, `first`: whether it is the first of its process, which allocates memory for the
        copy, `blocked_s`, `waited_s` of these for the save before it, `commit_s` from the copy to the commit (None if
        it was not reported), and `in_flight`: when the loop continued, and when it was committed, in seconds since
        1970.
    """
    ended = {(row["attempt"], row["step"]): row for row in rows if "save_seconds" in row}
    found: list[dict[str, Any]] = []
    for row in rows:
        if "save_blocked" not in row:
            continue
        end = ended.get((row["attempt"], row["step"]), {})
        seconds, waited = end.get("save_seconds"), end.get("save_waited", 0.0)
        copied = row["time"] - row["save_blocked"] + waited
        found.append(
            {
                "attempt": row["attempt"],
                "step": row["step"],
                "first": all(save["attempt"] != row["attempt"] for save in found),
                "blocked_s": row["save_blocked"],
                "waited_s": waited,
                "commit_s": seconds,
                "in_flight": (row["time"], math.inf if seconds is None else copied + seconds),
            }
        )
    return found


def step_seconds(rows: Rows, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Median time per step while a save is in flight and while none is, and the number of steps of each.

    Steps that a save begins or ends in are left out, and so are the first ones of each attempt.
    """
    kinds: dict[str, list[float]] = {"in flight": [], "none": []}
    begun: dict[int, int] = {}
    for row in rows:
        if "step_seconds" not in row:
            continue
        attempt = row["attempt"]
        begun[attempt] = begun.get(attempt, 0) + 1
        if begun[attempt] <= _WARMUP:
            continue
        first, last = row["time"] - row["step_seconds"], row["time"]
        spans = [save["in_flight"] for save in found if save["attempt"] == attempt]
        # A row is written a little after the step has ended, and a save is called after that.
        if any(begin <= first + 1e-3 and last <= end for begin, end in spans):
            kinds["in flight"].append(row["step_seconds"])
        elif all(last <= begin or end <= first for begin, end in spans):
            kinds["none"].append(row["step_seconds"])
    return [{"save": kind, "steps": len(times), "median_s": _median(times)} for kind, times in kinds.items()]


def start_seconds(rows: Rows, attempt: int, since: float, begun: float) -> dict[str, float]:
    """Seconds from `since` to the row of an attempt's first step.

    Args:
        rows: Metrics.
        attempt: Number.
        since: Seconds since 1970.
        begun: When the attempt was noted in the ledger: data and checkpoint are verified by then.

    Returns:
        `start`: until `begun`; `load`: until the first step began, with the model built and what the checkpoint has;
        `first_step`; and `total`.
    """
    row = next(row for row in rows if row["attempt"] == attempt and "step_seconds" in row)
    first = row["time"] - row["step_seconds"]
    spans = {"start": begun - since, "load": first - begun, "first_step": row["step_seconds"]}
    return {name: round(seconds, 3) for name, seconds in (spans | {"total": row["time"] - since}).items()}


def repeated(rows: Rows, first: int, second: int) -> dict[str, Any]:
    """The steps that two attempts made, compared: data and order by their hashes, losses and gradient norms by value.

    Returns:
        `steps`: how many; `data_equal`; `losses_equal`, bit by bit; `largest_difference` of a loss.
    """
    by_attempt: dict[int, dict[int, Mapping[str, Any]]] = {first: {}, second: {}}
    for row in rows:
        if "loss" in row and row["attempt"] in by_attempt:
            by_attempt[row["attempt"]][row["step"]] = row
    pairs = [(by_attempt[first][step], row) for step, row in by_attempt[second].items() if step in by_attempt[first]]
    return {
        "steps": len(pairs),
        "data_equal": all(a[key] == b[key] for a, b in pairs for key in ("data_hash", "order_hash")),
        "losses_equal": all(a[key] == b[key] for a, b in pairs for key in ("loss", "grad_norm")),
        "largest_difference": max((abs(a["loss"] - b["loss"]) for a, b in pairs), default=0.0),
    }


def _median(values: Any) -> float | None:
    values = list(values)
    return round(statistics.median(values), 5) if values else None
