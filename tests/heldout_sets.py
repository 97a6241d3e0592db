"""A tiny run with named held-out sets, and their losses by plain loops over one process's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.model.decoder import Context
from pipeline.train.start.setup import InferenceModel
from tests import tiny

SETS: dict[str, Any] = {
    "waters": {"sources": ["sea"], "every_steps": 2, "samples": 6},
    "far": {"sources": ["sky", "past", "land"], "sequence_length": 48, "samples": 9},
    "rare": {"sources": ["past"], "samples": 0},
}


def write(root: Path, changes: Mapping[str, Any] | None = None, name: str = "run.yaml") -> Path:
    """A run file with sets: of a source of the run, of files of their own, and of a dataset that was made before."""
    if not (root / "sky").exists():
        tiny.write_corpus(root / "sky", documents=9, seed=5)
        tiny.write_corpus(root / "past", documents=9, seed=6)
        preprocess(load(tiny.write_run(root)))
        source = {"name": "past", "paths": [str(root / "past" / "*.txt")]}
        tokenizer = {"path": str(root / "data" / "tokenizer" / "tokenizer.json")}
        other = {"data.dir": str(root / "other"), "data.sources": [source], "tokenizer": tokenizer}
        preprocess(load(tiny.write_run(root, other, "past.yaml")))
    sources = [
        {"name": "sky", "paths": [str(root / "sky" / "*.txt")]},
        {"name": "past", "dataset": str(root / "other" / "past"), "split": "train"},
    ]
    common = {"data.heldout_sources": sources, "heldout_sets": SETS, "train.precision.compute": "fp32"}
    return tiny.write_run(root, {**common, **(changes or {})}, name)


def nats_by_window(
    loaded: InferenceModel, dataset: Dataset, length: int, windows: Sequence[int] | None = None
) -> list[list[float]]:
    """Cross entropy of each target of all windows of a text, or of some, in fp64, without batches or padding."""
    end = loaded.tokenizer.end_of_document
    row = [end, *dataset.read(0, dataset.tokens).tolist()]
    found = []
    for window in range(-(-dataset.tokens // length)) if windows is None else windows:
        first = window * length
        tokens = torch.tensor(row[first : first + length + 1])
        with torch.no_grad():
            log_p = loaded.model.whole(tokens[None, :-1], Context())[0].double().log_softmax(-1)
        found.append((-log_p[torch.arange(len(tokens) - 1), tokens[1:]]).tolist())
    return found


def mean(windows: Sequence[Sequence[float]]) -> float:
    """Mean over all targets."""
    each = [nat for window in windows for nat in window]
    return sum(each) / len(each)


def spread(counts: Mapping[str, int], samples: int) -> dict[str, list[int]]:
    """Windows by source that are scored: to each source its share, at equal distances."""
    everything = sum(counts.values())
    if samples >= everything:
        return {name: list(range(count)) for name, count in counts.items()}
    taken = {name: max(1, samples * count // everything) for name, count in counts.items()}
    return {name: [i * counts[name] // some for i in range(some)] for name, some in taken.items()}
