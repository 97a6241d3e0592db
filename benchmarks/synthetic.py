"""Blends of any size, written in seconds: real indices, tokens that take no disk.

    python benchmarks/synthetic.py --work /tmp/blend --documents 100000000

Documents have log-normal lengths of 1,000 tokens on average; `.idx` and `.prov` are as large as those of real
datasets, 44 bytes a document. `.bin` are sparse files of the right size, so every token is 0, and their hashes are
missing: `pipeline data verify` would say so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import yaml

from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.indexed import CODES, HEADER, MAGIC, PROVENANCE, VERSION, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.tokenization.tokenizer import Tokenizer

MEAN = 1000
SENTINELS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
_LENGTHS = 2**20
_BLOCK = 2**20


def make_blend(work: Path, sources: int = 50, parts: int = 10_000, documents: int = 10**8, epochs: float = 1.0) -> Path:
    """Write a blend and a run file for it, or only the run file if the blend is there.

    Args:
        work: Folder for both; `work/data-SOURCES-PARTS-DOCUMENTS/SOURCE/train` are the datasets.
        sources: Datasets; source k has the weight 1 / (k + 1).
        parts: Parts of all of them.
        documents: Documents of all of them; each part has as many.
        epochs: Length of the run in the run file.

    Returns:
        The run file.
    """
    data = work / f"data-{sources}-{parts}-{documents}"
    names = [f"source-{number:03d}" for number in range(sources)]
    if not data.exists():
        unfinished = data.with_name(f"{data.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        _write(unfinished, names, parts // sources, documents // parts)
        unfinished.rename(data)
    tokens = sum(int(np.fromfile(data / name / "train" / "parts.bin", PART)["tokens"].sum()) for name in names)
    values = {
        "run": {"dir": str(work / "run")},
        "data": {
            "dir": str(work / "unused"),
            "sources": [
                {"name": name, "dataset": str(data / name), "weight": 1 / (number + 1)}
                for number, name in enumerate(names)
            ],
        },
        "tokenizer": {"path": str(data / names[0] / "train" / "tokenizer.json"), "special_tokens": SENTINELS},
        "model": {"layers": 1, "dim": 32, "heads": 2},
        "train": {
            "duration": f"{int(epochs * tokens)} tokens",
            "sequence_length": 4096,
            "batch_size": 8,
            "micro_batch_size": 8,
            "validation": {"samples": 0},
        },
    }
    file = work / f"run-{sources}-{parts}-{documents}-{epochs:g}.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def _write(data: Path, names: list[str], parts: int, documents: int) -> None:
    """Datasets of so many parts each, of so many documents each."""
    config = TokenizerConfig.model_validate({"train": {"vocab_size": 300}, "special_tokens": SENTINELS})
    tokenizer = Tokenizer.train(iter(["a boat on the sea, a light on the land"]), config)
    chance = np.random.default_rng(0)
    lengths = np.maximum(2, chance.lognormal(np.log(MEAN) - 0.5, 1.0, _LENGTHS)).astype("<i4")
    lengths = np.tile(lengths, 1 + documents // _LENGTHS + 1)
    for number, name in enumerate(names):
        folder = data / name / "train"
        table = np.zeros(parts, PART)
        for part in range(parts):
            # Parts differ in where they begin in the table of lengths.
            first = (number * parts + part) * documents % _LENGTHS
            table[part] = _write_part(folder, part, lengths[first : first + documents], tokenizer.dtype)
        about: dict[str, Any] = {
            "source": name,
            "split": "train",
            "text_bytes": 4 * int(table["tokens"].sum()),
            "settings": {"adopted": [f"synthetic-{part:05d}" for part in range(parts)]},
            "config_hash": f"{number:032x}",
            "code_version": "synthetic",
        }
        write_dataset(folder, table, tokenizer, about)


def _write_part(folder: Path, number: int, lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Write the files of a part; its `PART` record."""
    prefix = part_prefix(folder, number)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    bin_path, idx_path, prov_path = part_files(prefix)
    documents, itemsize = len(lengths), dtype.itemsize
    ends = np.cumsum(lengths, dtype="<i8")
    bounds = [range(first, min(first + _BLOCK, documents)) for first in range(0, documents, _BLOCK)]
    blocks = [slice(block.start, block.stop) for block in bounds]
    pointers = ((ends[block] - lengths[block]) * itemsize for block in blocks)
    numbers = (np.arange(block.start, block.stop, dtype="<i8") for block in [*bounds, range(documents, documents + 1)])
    header = np.frombuffer(HEADER.pack(MAGIC, VERSION, CODES[dtype], documents, documents + 1), np.uint8)
    hashes = [
        _write_arrays(idx_path, itertools.chain([header, lengths], pointers, numbers)),
        _write_arrays(prov_path, (_provenance(number, block) for block in bounds)),
    ]
    tokens = int(ends[-1])
    bin_path.touch()
    os.truncate(bin_path, tokens * itemsize)
    return tokens, documents, number, 0, 0, *hashes, 0


def _provenance(unit: int, rows: range) -> npt.NDArray[Any]:
    records = np.zeros(len(rows), PROVENANCE)
    records["unit"], records["row"] = unit, rows
    return records


def _write_arrays(path: Path, arrays: Iterable[npt.NDArray[Any]]) -> int:
    """Write arrays one behind the other; xxh3-64 of the file."""
    digest = xxhash.xxh3_64()
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.data.cast("B"))
            digest.update(array.data.cast("B"))
    return digest.intdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder to write to")
    parser.add_argument("--sources", type=int, default=50)
    parser.add_argument("--parts", type=int, default=10_000)
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--epochs", type=float, default=1.0, help="length of the run")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    print(make_blend(**vars(arguments)), f"({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    main()
