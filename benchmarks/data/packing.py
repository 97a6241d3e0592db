"""Best-fit packing of a dataset beside windows: documents that are cut, padding, time and size of the packs.

One JSON line for each length. Times are those of the CPU, but for making and opening packs. Packs that are missing are
made, beside the manifest of the dataset.

python benchmarks/data/packing.py --dataset DATA_DIR/SOURCE/train --lengths 2048 4096 8192
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from pipeline.common.console import Console
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.best_fit import IntArray, Place, packed, place, quickest
from pipeline.data.datasets.packing.blocks import GROUP, group_lengths
from pipeline.data.datasets.packing.packs import Packs
from pipeline.data.packing.make import PackMaker

ROUNDS = 3
LOOKUPS = 1000


def cut_by_windows(starts: IntArray, length: int) -> float:
    """Share of the documents that a window's end cuts, in the first epoch.

    Args:
        starts: first token of each document, and the end of the last one.
        length: tokens of a window.
    """
    first, last = starts[:-1] // length, (starts[1:] - 1) // length
    return float((last > first).mean())


def seconds_per_million(groups: list[IntArray], length: int, engine: Place) -> float:
    """Best CPU seconds of one process for packing a million documents in memory."""
    packed(groups[0], length, engine)  # the compiled one is compiled
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for each in groups:
            packed(each, length, engine)
        times.append(time.process_time() - start)
    return min(times) / sum(map(len, groups)) * 1e6


def measure(dataset: Dataset, length: int, workers: int) -> dict[str, object]:
    """The figures of one length. Makes the packs where they are missing."""
    start = time.perf_counter()
    was_there = PackMaker(dataset, length).state().index is not None
    index = PackMaker(dataset, length).make(Console(quiet=True), workers)
    took = time.perf_counter() - start
    size = sum(file.size for file in (index.groups, *index.blocks))
    start = time.perf_counter()
    packs = Packs.open(dataset, length)
    opened = time.perf_counter() - start
    chance = np.random.default_rng(0)
    times = {}
    for batch in (1, 64):
        asked = chance.integers(0, packs.count, (LOOKUPS, batch))
        packs.chunks(asked.ravel())  # mapped
        start = time.process_time()
        for each in asked:
            packs.chunks(each)
        times[batch] = (time.process_time() - start) / LOOKUPS
    start = time.process_time()
    for document in chance.integers(0, dataset.documents, LOOKUPS).tolist():
        packs.packs_of(document)
    found = (time.process_time() - start) / LOOKUPS
    groups = group_lengths(dataset, 0, min(dataset.documents, 20 * GROUP), GROUP)
    starts = dataset.starts_of(np.arange(min(dataset.documents, 10**6) + 1))
    return {
        "length": length,
        "documents": dataset.documents,
        "tokens": dataset.tokens,
        "cut": round(index.cut / dataset.documents, 4),
        "cut_by_windows": round(cut_by_windows(starts, length), 4),
        "padding": round(index.padding, 6),
        "packs": index.packs,
        "bytes_per_document": round(size / dataset.documents, 2),
        "cpu_s_per_million_python": round(seconds_per_million(groups, length, place), 3),
        "cpu_s_per_million_compiled": round(seconds_per_million(groups, length, quickest(10**9)), 3),
        "made_s": None if was_there else round(took, 2),
        "open_ms": round(1e3 * opened, 3),
        "us_per_pack": round(1e6 * times[1], 1),
        "us_per_64_packs": round(1e6 * times[64], 1),
        "us_per_document_found": round(1e6 * found, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    dataset = Dataset.open(arguments.dataset)
    for length in arguments.lengths:
        print(json.dumps(measure(dataset, length, arguments.workers)), flush=True)


if __name__ == "__main__":
    main()
