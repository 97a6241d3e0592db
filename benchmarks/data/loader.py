"""Read shuffled windows of 4,096 tokens in batches of 8, in one process: millions of tokens a second, as JSON lines.

    python benchmarks/data/loader.py --work /tmp/loader --peer-python /tmp/olmo/bin/python
    python benchmarks/data/loader.py --work /tmp/loader --sources 100 --parts 10000

Sides, each in a fresh process, one after the other in every round; at the end medians, over wall and over CPU seconds,
and their ratios to those of `gather`:

    batches    `Loader.batches`: tokens and targets, document starts, both hashes, ids compared with the vocabulary
    iterate    the same through `Loader.iterate`, which reads ahead in a thread
    gather     eight windows copied from memmaps as they are, all of which stay open: an upper bound
    olmo-core  `NumpyFSLDataLoader` without worker processes, with document lengths; needs a Python that has
               `ai2-olmo-core` (3.0.0 was tried)

The datasets are made on the first run: random ids below 50,000, documents of 1,000 tokens in the mean (lognormal); by
default one source of four parts. They are read once before the rounds, so that all sides find them in the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, LENGTH = 8, 4096
VOCABULARY, MEAN, SIGMA = 50_000, 1000, 1.0
PEER = "olmo-core"


def make_dataset(folder: Path, tokens: int, count: int, seed: int) -> None:
    """Write a dataset of `count` parts if it is not there."""
    import xxhash

    from pipeline.common import storage
    from pipeline.data.datasets.files import PARTS_FILE
    from pipeline.data.datasets.indexed import IndexedWriter, part_prefix
    from pipeline.data.datasets.manifest import FORMAT_VERSION, MANIFEST_FILE, PART, Manifest, TokenizerInfo

    if (folder / MANIFEST_FILE).exists():
        return
    chance = np.random.default_rng(seed)
    parts = np.zeros(count, PART)
    for number in range(count):
        prefix = part_prefix(folder, number)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        left = tokens // count
        with IndexedWriter(prefix, "<u2") as writer:
            while left > 0:
                # The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
                lengths = 1 + chance.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, 1000).astype(np.int64)
                lengths = lengths[np.cumsum(lengths) - lengths < left]
                ids = chance.integers(1, VOCABULARY, lengths.sum(), dtype=np.uint16)
                ids[np.cumsum(lengths) - 1] = 0
                writer.add_documents(ids.tobytes(), lengths)
                left -= len(ids)
                parts[number]["tokens"] += len(ids)
                parts[number]["documents"] += len(lengths)
        parts[number]["unit"] = number
    (folder / PARTS_FILE).write_bytes(parts.tobytes())
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        source="random",
        split="train",
        documents=int(parts["documents"].sum()),
        tokens=int(parts["tokens"].sum()),
        text_bytes=0,
        dtype="uint16",
        tokenizer=TokenizerInfo(
            fingerprint="none",
            vocab_size=VOCABULARY,
            end_of_document=0,
            end_of_document_token="<|end|>",
            special_tokens={},
        ),
        config_hash="",
        code_version="",
        parts=count,
        parts_hash=xxhash.xxh3_128_hexdigest(parts.tobytes()),
    )
    storage.put_json(folder / MANIFEST_FILE, manifest.model_dump())


def bins(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/parts/*/*.bin"))


def open_ours(folder: Path) -> Any:
    from pipeline.data.datasets.dataset import Dataset
    from pipeline.data.loading.loader import Loader
    from pipeline.data.loading.objectives.causal import Causal
    from pipeline.data.order.blend import integer_weights, keyed_offset
    from pipeline.data.order.journal import Journal
    from pipeline.data.order.packs import instances_of
    from pipeline.data.order.segments import Segment, SourceState

    datasets = {path.name: Dataset.open(path) for path in sorted(folder.iterdir())}
    weights = integer_weights(dict.fromkeys(datasets, 1))
    sources = {
        name: SourceState(tokens=dataset.tokens, weight=weights[name], offset=keyed_offset(1, name), lap=0, cursor=0)
        for name, dataset in datasets.items()
    }
    segment = Segment(first_step=0, first_sample=0, batch_size=BATCH, sequence_length=LENGTH, sources=sources)
    journal = Journal(seed=1, segments=[segment])
    instances = instances_of(journal, datasets)
    return Loader(journal, instances, Causal(), micro_batch_size=[BATCH], vocab_size=VOCABULARY)


def batches(folder: Path) -> Iterator[Any]:
    return map(open_ours(folder).batches, itertools.count())


def iterate(folder: Path) -> Iterator[Any]:
    return iter(open_ours(folder).iterate(0, 10**9))


def gather(folder: Path) -> Iterator[Any]:
    mapped = [np.memmap(path, np.uint16, "r") for path in bins(folder)]
    chance = np.random.default_rng(0)
    while True:
        batch = np.empty((BATCH, LENGTH + 1), np.uint16)
        for row, part in zip(batch, chance.integers(0, len(mapped), BATCH).tolist(), strict=True):
            start = int(chance.integers(0, len(mapped[part]) - LENGTH))
            row[:] = mapped[part][start : start + LENGTH + 1]
        yield batch


def olmo_core(folder: Path) -> Iterator[Any]:
    from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset

    dataset = NumpyFSLDataset(
        *bins(folder),
        sequence_length=LENGTH,
        pad_token_id=0,
        eos_token_id=0,
        vocab_size=VOCABULARY,
        dtype=np.uint16,
        generate_doc_lengths=True,
    )
    dataset.work_dir = folder.parent / "olmo-core"
    dataset.prepare()
    loader = NumpyFSLDataLoader(
        dataset,
        collator=DataCollator(pad_token_id=0),
        global_batch_size=BATCH * LENGTH,
        work_dir=folder.parent / "olmo-core",
        num_threads=0,
        num_workers=0,
    )
    for epoch in itertools.count(1):
        loader.reshuffle(epoch=epoch)
        yield from loader


SIDES: dict[str, Callable[[Path], Iterator[Any]]] = {
    "batches": batches,
    "iterate": iterate,
    "gather": gather,
    PEER: olmo_core,
}


def run_side(side: str, folder: Path, seconds: float) -> None:
    """Measure one side in this process, and print it."""
    source = SIDES[side](folder)
    for _ in range(max(500, len(bins(folder)))):  # files are opened, look-ups are in full swing
        next(source)
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        for _ in range(50):
            next(source)
        count += 50
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = count * BATCH * LENGTH
    result = {"side": side, "mtok_s": round(tokens / wall / 1e6, 1), "mtok_cpu_s": round(tokens / cpu / 1e6, 1)}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({**result, "max_rss_mib": memory}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the datasets, kept for the next time")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of all .bin files")
    parser.add_argument("--sources", type=int, default=1, help="number of datasets, of equal size and weight")
    parser.add_argument("--parts", type=int, default=4, help="parts of all datasets together")
    parser.add_argument("--rounds", type=int, default=5, help="times that each side is run")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument("--peer-python", help="a Python with ai2-olmo-core; without it that side is left out")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sources, parts = arguments.sources, arguments.parts
    folder = arguments.work / f"random-{arguments.gigabytes:g}-{sources}-{parts}"
    if arguments.side:
        return run_side(arguments.side, folder, arguments.seconds)
    for number in range(sources):
        tokens = int(arguments.gigabytes * 1e9 / 2 / sources)
        make_dataset(folder / f"random{number:03d}", tokens, parts // sources, number)
    for path in [*bins(folder), *folder.glob("*/parts/*/*.idx")]:
        path.read_bytes()
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for side in SIDES:
            python = arguments.peer_python if side == PEER else sys.executable
            if python is None:
                continue
            command = [python, __file__, "--side", side, "--work", arguments.work, "--sources", sources]
            command += ["--parts", parts, "--gigabytes", f"{arguments.gigabytes:g}", "--seconds", arguments.seconds]
            line = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
            print(line.strip().splitlines()[-1], flush=True)
            results.setdefault(side, []).append(json.loads(line.strip().splitlines()[-1]))
    print_medians(results)
    return None


def print_medians(results: dict[str, list[dict[str, float]]]) -> None:
    """Print the median of each side, and its ratio to that of `gather`."""
    medians = {
        side: {clock: statistics.median(run[clock] for run in runs) for clock in ("mtok_s", "mtok_cpu_s")}
        for side, runs in results.items()
    }
    for side, median in medians.items():
        ratios = {clock: round(value / medians["gather"][clock], 3) for clock, value in median.items()}
        print(json.dumps({"side": side, "runs": len(results[side]), "median": median, "to_gather": ratios}), flush=True)


if __name__ == "__main__":
    main()
