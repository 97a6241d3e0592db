"""Datasets of several parts on a disk and in a bucket, for tests of training from object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console

from pipeline.config import Config
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.packing.make import PackMaker
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.runs import make_config


def write_dataset_of_parts(folder: Path, parts: int, tokens: int, seed: int = 0, pack: int = 0) -> Path:
    """A dataset of random tokens; the part behind the first is empty.

    Args:
        folder: of the dataset.
        parts: number of parts.
        tokens: of each.
        seed: of the tokens.
        pack: tokens of packs; 0 for none.
    """
    tokenizer = Tokenizer.train(iter(["a text"]), TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))
    chance = np.random.default_rng(seed)
    table = np.zeros(parts, PART)
    for unit in range(parts):
        prefix = part_prefix(folder, unit)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        left = 0 if unit == 1 else tokens
        with IndexedWriter(prefix, tokenizer.dtype) as writer:
            while left:
                count = min(left, int(chance.integers(1, 400)))
                writer.add_document(chance.integers(1, 250, count))
                left -= count
        origins = bytes(24 * writer.documents)
        part_files(prefix)[2].write_bytes(origins)
        size = 0 if unit == 1 else tokens
        table[unit] = (
            size,
            writer.documents,
            unit,
            0,
            writer.bin.hash,
            writer.idx.hash,
            xxhash.xxh3_64_intdigest(origins),
            0,
        )
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "", "code_version": "", "settings": {}}
    write_dataset(folder, table, tokenizer, about)
    if pack:
        PackMaker(Dataset.open(folder), pack).make(Console(quiet=True), 1)
    return folder


def config_of(
    root: Path, where: str | Path, names: str = "ab", stage: dict[str, Any] | None = None, **keys: Any
) -> Config:
    """A run of some sources of datasets that are there already.

    Args:
        root: of the run folder.
        where: folder or URL with a folder for each source.
        names: a letter for each.
        stage: its keys.
        keys: of `train`; `loader` and `remote` of `data`; and `blend`.
    """
    blend = keys.pop("blend", {})
    data = {key: keys.pop(key) for key in ("loader", "remote") if key in keys}
    sources = [{"name": name, "dataset": f"{where}/{name}"} for name in names]
    config = make_config(root, sources, **data)
    values = config.model_dump(mode="json", exclude_unset=True)
    values["train"] |= {"duration": "30 steps", "sequence_length": 64, "batch_size": 8, "micro_batch_size": 2, **keys}
    values |= {"stage": stage or {}, "blend": blend}
    return Config.model_validate(values)
