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
from pipeline.train.checkpoint.committed import UNREADABLE
from pipeline.train.checkpoint.exported import Evaluated, ExportedWeights, section_of
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
    sets: dict[str, Scores]
    """Scores of the sets of `heldout_sets`, by name."""
    set_measures: dict[str, str]
    """As `measure`, of each set."""
    lossy: tuple[str, ...]
    """Sources whose text the tokenizer does not keep whole: their bits per byte are too low."""
    replaced: bool
    """True if the checkpoint of this step is another one by now: the run went back and came here again."""


@dataclass(frozen=True)
class WeightsEvaluation:
    """An evaluation of weights in a folder (`pipeline eval --weights`), as a report has it."""

    path: str
    """Folder at that time."""
    export: str
    """Fingerprint of the weights."""
    weights: str
    split: str
    scores: Scores
    time: float
    """Time at which it was written, in seconds since 1970."""
    measure: str
    """As in `Evaluation`."""


def report_path(config: Config, of: int | ExportedWeights) -> Path:
    """Path of the report on a checkpoint, of a step, or on the average of its weights; or on weights in a folder."""
    folder = RunFiles(config.run.dir).evaluations
    if isinstance(of, ExportedWeights):
        return folder / f"{of.name}.json"
    average = "-ema" if config.eval.weights == "ema" else ""
    return folder / f"step-{of:08d}{average}.json"


def evaluated_by(source: Evaluated) -> int | ExportedWeights:
    """The argument of `report_path` for weights: a step, or themselves."""
    return source if isinstance(source, ExportedWeights) else source.step


def identity(config: Config, source: Evaluated) -> dict[str, Any]:
    """Keys of `made_with` that say which weights results are of.

    Those in a folder have their own key: no reader takes them for a checkpoint of the run.
    """
    found = {_key(source): source.fingerprint, "weights": section_of(source, config.eval.weights)}
    if isinstance(source, ExportedWeights) and source.assumed_tokenizer is not None:
        found["assumed_tokenizer"] = source.assumed_tokenizer
    return found


def _key(source: Evaluated) -> str:
    return "export" if isinstance(source, ExportedWeights) else "checkpoint"


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


def read_weights_evaluations(run: Path) -> tuple[list[WeightsEvaluation], list[Path]]:
    """Evaluations of weights in folders in the reports of a run, the latest last; and the damaged files."""
    found, damaged = [], []
    for path in RunFiles(run).evaluations.glob("weights-*.json"):
        try:
            value, time = storage.read_object(path), path.stat().st_mtime
            made_with, folder = value["made_with"], str(value["export"]["path"])
            export, weights, split = (str(made_with[key]) for key in ("export", "weights", "split"))
            scores, measure = _scores(value["blended"]), _measure(made_with)
            found.append(WeightsEvaluation(folder, export, weights, split, scores, time, measure))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            damaged.append(path)
    return sorted(found, key=lambda each: each.time), damaged


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
    sets = [each["blended"] for each in value.get("sets", {}).values()]
    for scores in (value["blended"], *value["sources"].values(), *sets):
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
        _measure(made_with),
        {name: _scores(each["blended"]) for name, each in value.get("sets", {}).items()},
        {name: _set_measure(made_with, name) for name in value.get("sets", {})},
        tuple(map(str, value.get("coverage", ()))),
        fingerprints.get(step, made_with["checkpoint"]) != made_with["checkpoint"],
    )


def _measure(made_with: Any) -> str:
    return value_hash([*(made_with[key] for key in _MEASURE), *(made_with.get(key, WINDOWS[key]) for key in WINDOWS)])


def _set_measure(made_with: Any, name: str) -> str:
    return value_hash([made_with["sets"][name], made_with["compute"], *(made_with[key] for key in WINDOWS)])


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


def benchmark_path(config: Config, of: int | ExportedWeights, kind: Literal["tasks", "harness", "importance"]) -> Path:
    """Path of the results of benchmarks, or of importance, beside the report on the same weights."""
    path = report_path(config, of)
    return path.with_name(f"{kind}-{path.name}")


def kept_results(config: Config, source: Evaluated, kind: Literal["tasks", "harness"]) -> dict[str, Any]:
    """Results that are kept of these very weights, however they were made; none of a damaged file.

    Returns:
        For `tasks` what each was made with and its figures, by its name. For `harness` what the harness said, the
        latest under `""`, and those before it under `"1"` and so on, which were of other tasks or other settings.
    """
    found = {}
    key = _key(source)
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        value = storage.get_json(benchmark_path(config, evaluated_by(source), kind))
        if kind == "tasks":
            entries = dict(value["tasks"])
        else:
            others = value.pop("others", [])
            entries = {"": value} | {str(number): each for number, each in enumerate(others, 1)}
        for name, entry in entries.items():
            if entry["made_with"][key] == source.fingerprint:
                found[name] = entry
    return found
