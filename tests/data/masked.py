"""Tiny datasets of which some tokens alone are trained on, as those of conversations are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import IndexedPart
from pipeline.data.datasets.manifest import part_record, read_manifest, read_parts, write_dataset
from pipeline.data.datasets.target_mask import write_mask
from pipeline.data.packing.command import pack
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests import tiny

_WORDS = "the a sea boat wind sails north harbour light night storm".split()
KEYS: dict[str, Any] = {
    "data.loader": {"packing": "best_fit"},
    "model.document_attention": True,
    "train.precision": {"compute": "fp32"},
}


def write(root: Path, changes: dict[str, Any] | None = None, name: str = "run.yaml", sources: int = 2) -> Path:
    """A run file of two sources of short documents, the first of which gets masks, or of that one alone."""
    tiny.write_corpus(root / "sea", documents=2)
    chance = random.Random(3)
    of_run = []
    for source, weight in (("chat", 3), ("text", 1))[:sources]:
        path = root / f"{source}.jsonl"
        if not path.exists():
            texts = (" ".join(chance.choices(_WORDS, k=chance.randint(1, 9))) for _ in range(240))
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        of_run.append({"name": source, "type": "jsonl", "paths": [str(path)], "weight": weight})
    return tiny.write_run(root, {**KEYS, "data.sources": of_run, **(changes or {})}, name)


def make(file: Path, seed: int = 0, share: float = 0.4) -> None:
    """The datasets of a run file, and masks of the source `chat`."""
    config = load(file)
    preprocess(config)
    for split in ("train", "heldout"):
        mask_dataset(config.data_dir / "chat" / split, seed, share)
    pack(config.data_dir / "chat", config.pack_lengths, workers=1, console=Console(quiet=True))


def mask_dataset(folder: Path, seed: int = 0, share: float = 0.4) -> None:
    """Give a finished dataset masks, by chance."""
    manifest, chance = read_manifest(folder), np.random.default_rng(seed)
    parts, dataset = read_parts(folder, manifest), Dataset.open(folder)
    table = np.zeros(len(parts), part_record(weights=False, mask=True))
    trained = 0
    for name in parts.dtype.names or ():
        table[name] = parts[name]
    for number in range(len(parts)):
        part = IndexedPart(dataset.prefix(number))
        starts = np.array([part.document_start(document) for document in range(part.documents + 1)], np.int64)
        mask = (chance.random(part.tokens) < share).astype(np.uint8)
        mask[starts[:-1]] = 0
        with write_mask(dataset.prefix(number), mask, np.diff(starts)) as file:
            file.commit()
        table["mask"][number], trained = file.hash, trained + int(mask.sum())
    about = {key: getattr(manifest, key) for key in _KEPT} | {"trained_tokens": trained}
    write_dataset(folder, table, Tokenizer.open(folder), about)


_KEPT = ("source", "split", "text_bytes", "settings", "config_hash", "code_version", "dtype", "inner_ends")
