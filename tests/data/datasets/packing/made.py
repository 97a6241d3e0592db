"""Datasets of documents of given lengths, and a reference of their packs in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.indexed import PROVENANCE, HashedFile, IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.tokenization.tokenizer import Tokenizer

Chunk = tuple[int, int, int]
"""Document, first token in it, tokens."""


def some_lengths(length: int) -> list[int]:
    """Lengths of 185 documents: empty ones, of one token, of a pack, of several, and many short ones."""
    chance = np.random.default_rng(1)
    found = [
        *chance.integers(0, 3 * length, 60),
        *chance.integers(1, length, 120),
        0,
        1,
        length,
        length + 1,
        2 * length,
    ]
    return chance.permutation(found).tolist()


def write_lengths(folder: Path, lengths: Sequence[int], parts: int = 3) -> Path:
    """A dataset of documents with these numbers of tokens; some have two sequences, and one of the parts is empty."""
    tokenizer = Tokenizer.train(iter(["a text"]), TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))
    chance = np.random.default_rng(len(lengths))
    cuts = sorted(chance.integers(0, len(lengths) + 1, parts - 1).tolist())
    table = np.zeros(parts + 1, PART)
    for index, (first, end) in enumerate(zip([0, *cuts, len(lengths)], [*cuts, len(lengths)] * 2, strict=False)):
        of_part = lengths[first:end] if index < parts else []
        prefix = part_prefix(folder, index)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(prefix, tokenizer.dtype) as writer:
            for number, length in enumerate(of_part):
                ids = chance.integers(10, 200, length)
                ids[-1:] = tokenizer.end_of_document
                writer.add_document(ids, [1, length - 1] if number % 5 == 4 and length > 1 else [])
        with HashedFile(part_files(prefix)[2]) as provenance:
            provenance.write(np.zeros(len(of_part), PROVENANCE).tobytes())
            provenance.commit()
        hashes = writer.bin.hash, writer.idx.hash, provenance.hash, 0
        table[index] = sum(of_part), len(of_part), index, 0, *hashes
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "", "code_version": "", "settings": {}}
    write_dataset(folder, table, tokenizer, about)
    return folder


def reference(lengths: Sequence[int], length: int, group: int, first: int = 0, end: int | None = None) -> list:
    """The packs of documents [first, end): lists of chunks."""
    packs: list[list[Chunk]] = []
    end = len(lengths) if end is None else end
    for start in range(0, end, group):
        packs += _best_fit(lengths, length, range(max(start, first), min(start + group, end)))
    return packs


def _best_fit(lengths: Sequence[int], length: int, documents: range) -> list[list[Chunk]]:
    chunks = [(d, at, min(length, lengths[d] - at)) for d in documents for at in range(0, lengths[d], length)]
    packs: list[list[Chunk]] = []
    last_filled: list[int] = []
    for time, chunk in enumerate(sorted(chunks, key=lambda chunk: -chunk[2])):
        room = [length - sum(tokens for _, _, tokens in pack) for pack in packs]
        fits = [number for number in range(len(packs)) if room[number] >= chunk[2]]
        if fits:
            best = min(fits, key=lambda number: (room[number], -last_filled[number]))
            packs[best].append(chunk)
            last_filled[best] = time
        else:
            packs.append([chunk])
            last_filled.append(time)
    return [sorted(pack, key=lambda chunk: (chunk[1] == 0, chunk)) for pack in packs]
