"""Datasets of several parts on a disk and in a bucket, for tests of training from object storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline.config import Config
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.files import MANIFEST_FILE, PARTS_FILE
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.datasets.remote.sums import SUFFIX, SumWriter
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
        part_files(prefix)[2].write_bytes(bytes(24 * writer.documents))
        size = 0 if unit == 1 else tokens
        table[unit] = (size, writer.documents, unit, 0, writer.bin.hash, writer.idx.hash, 0, 0)
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "", "code_version": "", "settings": {}}
    write_dataset(folder, table, tokenizer, about)
    if pack:
        PackMaker(Dataset.open(folder), pack).make(Console(quiet=True), 1)
    return folder


def objects_of(folder: Path, key: str) -> dict[str, bytes]:
    """The objects of a dataset by key; the manifest is the last."""
    fingerprint = Dataset.open(folder).whole.fingerprint
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == MANIFEST_FILE:
            continue
        found[f"{key}/{fingerprint}/{name}"] = data = path.read_bytes()
        if name != PARTS_FILE:
            writer = SumWriter()
            writer.update(data)
            found[f"{key}/{fingerprint}/{name}{SUFFIX}"] = writer.sums()
    found[f"{key}/{MANIFEST_FILE}"] = (folder / MANIFEST_FILE).read_bytes()
    return found


def put_datasets(folder: Path, key: str, put: Callable[[str, bytes], object]) -> dict[str, bytes]:
    """Write the datasets of a data folder, and return their objects."""
    found = {}
    for manifest in sorted(folder.glob(f"*/*/{MANIFEST_FILE}")):
        found |= objects_of(manifest.parent, f"{key}/{manifest.parent.relative_to(folder)}")
    for name, data in found.items():
        put(name, data)
    return found


def config_of(root: Path, where: str | Path, names: str = "ab", stage: dict[str, Any] | None = None, **keys: Any) -> Config:
    """A run of some sources of datasets that are there already.

    Args:
        root: of the run folder.
        where: folder or URL with a folder for each source.
        names: a letter for each.
        stage: its keys.
        keys: of `train`, and `loader` and `remote` of `data`.
    """
    data = {key: keys.pop(key) for key in ("loader", "remote") if key in keys}
    sources = [{"name": name, "dataset": f"{where}/{name}"} for name in names]
    config = make_config(root, sources, **data)
    values = config.model_dump(mode="json", exclude_unset=True)
    values["train"] |= {"duration": "30 steps", "sequence_length": 64, "batch_size": 8, "micro_batch_size": 2, **keys}
    values["stage"] = stage or {}
    return Config.model_validate(values)
