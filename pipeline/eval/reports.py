"""Reports of evaluations as files: where each is kept, and what all of a run say. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.common import storage
from pipeline.common.hashing import value_hash
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.train.checkpoint.committed import UNREADABLE, Checkpoint
from pipeline.train.checkpoint.manager import Checkpoints

_MEASURE = ("data", "split", "sequence_length", "compute")
"""Keys of `made_with`: losses are comparable where these are the same, and what `WINDOWS` has."""
WINDOWS: Mapping[str, Any] = {"samples": None, "stride": None, "documents": False}
"""Keys that name the windows; reports from before there was a choice have these."""
Scores = dict[str, float | None]
"""`loss`, `perplexity` and `bits_per_byte`; None where the figure is not finite."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, as a report has it."""

    step: int
    tokens: int | None
    """Trained on until then; None where neither a checkpoint nor the metrics know."""
    weights: str
    split: str
    scores: Scores
    """Scores of all sources together."""
    sources: dict[str, Scores]
    time: float
    """Time at which it was written, in seconds since 1970."""
    checkpoint: str
    """Fingerprint."""
    measure: str
    """Hash of what the losses of two reports have to have in common to be compared."""
    replaced: bool
    """True if the checkpoint of this step is another one by now: the run went back and came here again."""


def report_path(config: Config, step: int) -> Path:
    """Path of the report on a checkpoint, or on the average of its weights."""
    of = "-ema" if config.eval.weights == "ema" else ""
    return RunFiles(config.run.dir).evaluations / f"step-{step:08d}{of}.json"


def evaluated_checkpoint(report: Path) -> str | None:
    """Fingerprint of the checkpoint that a report is of; None without a sound report."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(storage.read_object(report)["made_with"]["checkpoint"])
    return None


def report_files(run: Path) -> list[Path]:
    """All reports of a run folder, by step."""
    return sorted(RunFiles(run).evaluations.glob("step-*.json"))


def read_evaluations(run: Path) -> tuple[list[Evaluation], list[Path]]:
    """Evaluations in the reports of a run, by step; and the damaged files."""
    sound: list[tuple[Any, float]] = []
    damaged = []
    for path in report_files(run):
        try:
            sound.append((_checked(storage.read_object(path)), path.stat().st_mtime))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            damaged.append(path)
    tokens, fingerprints = _known(run, {value["step"] for value, _ in sound})
    found = [_evaluation(value, time, tokens, fingerprints) for value, time in sound]
    return sorted(found, key=lambda each: (each.step, each.split, each.weights != "model")), damaged


def best(evaluations: list[Evaluation]) -> list[Evaluation]:
    """The one with the lowest loss among those that can be compared, where there are several of a kind."""
    kinds: dict[str, list[Evaluation]] = {}
    for each in evaluations:
        if each.scores["loss"] is not None and not each.replaced:
            kinds.setdefault(each.measure, []).append(each)
    return [min(kind, key=lambda each: each.scores["loss"] or 0.0) for kind in kinds.values() if len(kind) > 1]


def _checked(value: Any) -> Any:
    """A report with all that is read of it.

    Raises:
        KeyError, TypeError, ValueError: something is missing.
    """
    int(value["step"])
    for scores in (value["blended"], *value["sources"].values()):
        _scores(scores)
    [value["made_with"][key] for key in ("checkpoint", "weights", *_MEASURE)]
    return value


def _evaluation(value: Any, time: float, tokens: dict[int, int], fingerprints: dict[int, str]) -> Evaluation:
    made_with, step = value["made_with"], value["step"]
    return Evaluation(
        step,
        tokens.get(step),
        made_with["weights"],
        made_with["split"],
        _scores(value["blended"]),
        {name: _scores(scores) for name, scores in value["sources"].items()},
        time,
        made_with["checkpoint"],
        value_hash([*(made_with[key] for key in _MEASURE), *(made_with.get(key, WINDOWS[key]) for key in WINDOWS)]),
        fingerprints.get(step, made_with["checkpoint"]) != made_with["checkpoint"],
    )


def _scores(value: Any) -> Scores:
    return {key: _number(value[key]) for key in ("loss", "perplexity", "bits_per_byte")}


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _known(run: Path, steps: set[int]) -> tuple[dict[int, int], dict[int, str]]:
    """Tokens trained until these steps, and fingerprints of their checkpoints, where they are known.

    The metrics know of steps whose checkpoint has gone; of one that was trained twice the last line counts.
    """
    tokens, fingerprints = dict[int, int](), dict[int, str]()
    for checkpoint in Checkpoints.of_run(run).all():
        if checkpoint.step in steps:
            with suppress(*UNREADABLE):
                fingerprints[checkpoint.step] = checkpoint.fingerprint
                tokens[checkpoint.step] = int(checkpoint.state()["tokens"])
    if left := steps - tokens.keys():
        for row in storage.json_lines(RunFiles(run).metrics):
            if row.get("step") in left and isinstance(row.get("tokens"), int):
                tokens[row["step"]] = row["tokens"]
    return tokens, fingerprints


def benchmark_path(config: Config, step: int, kind: Literal["tasks", "harness"]) -> Path:
    """Path of the results of benchmarks of a checkpoint, beside its report."""
    path = report_path(config, step)
    return path.with_name(f"{kind}-{path.name}")


def kept_results(config: Config, checkpoint: Checkpoint, kind: Literal["tasks", "harness"]) -> dict[str, Any]:
    """Results that are kept of this very checkpoint, however they were made; none of a damaged file.

    Returns:
        For `tasks` what each was made with and its figures, by its name. For `harness` what the harness said, the
        latest under `""`, and those before it under `"1"` and so on, which were of other tasks or other settings.
    """
    found = {}
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        value = storage.get_json(benchmark_path(config, checkpoint.step, kind))
        if kind == "tasks":
            entries = dict(value["tasks"])
        else:
            others = value.pop("others", [])
            entries = {"": value} | {str(number): each for number, each in enumerate(others, 1)}
        for name, entry in entries.items():
            if entry["made_with"]["checkpoint"] == checkpoint.fingerprint:
                found[name] = entry
    return found
