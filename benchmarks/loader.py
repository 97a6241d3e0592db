"""Read shuffled windows of 4,096 tokens in batches of 8, in one process: millions of tokens a second, as JSON lines.

    python benchmarks/loader.py --work /tmp/loader --peer-python /tmp/olmo/bin/python

Sides, each in a fresh process, one after the other in every round, with the median of the rounds at the end:

    batches    `Loader.batches`: tokens and targets, document starts, both hashes, ids compared with the vocabulary
    iterate    the same through `Loader.iterate`, which reads ahead in a thread
    gather     eight windows copied from a memmap as they are: an upper bound
    olmo-core  `NumpyFSLDataLoader` without worker processes, with document lengths; needs a Python that has
               `ai2-olmo-core` (3.0.0 was tried)

The dataset is made on the first run: random ids below 50,000, documents of 1,000 tokens in the mean (lognormal), four
parts. It is read once before the rounds, so that all sides find it in the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
PARTS = 4
PEER = "olmo-core"


def make_dataset(folder: Path, gigabytes: float) -> None:
    """Write the dataset if it is not there."""
    import xxhash

    from pipeline.common import storage
    from pipeline.data.datasets.files import PARTS_FILE
    from pipeline.data.datasets.indexed import IndexedWriter, part_prefix
    from pipeline.data.datasets.manifest import FORMAT_VERSION, MANIFEST_FILE, PART, Manifest, TokenizerInfo

    if (folder / MANIFEST_FILE).exists():
        return
    chance = np.random.default_rng(0)
    parts = np.zeros(PARTS, PART)
    for number in range(PARTS):
        prefix = part_prefix(folder, number)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        left = int(gigabytes * 1e9 / 2 / PARTS)
        with IndexedWriter(prefix, "<u2") as writer:
            while left > 0:
                # The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
                lengths = 1 + chance.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, 10_000).astype(np.int64)
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
        parts=PARTS,
        parts_hash=xxhash.xxh3_128_hexdigest(parts.tobytes()),
    )
    storage.put_json(folder / MANIFEST_FILE, manifest.model_dump())


def bins(folder: Path) -> list[Path]:
    return sorted(folder.glob("parts/*/*.bin"))


def open_ours(folder: Path) -> Any:
    from pipeline.data.datasets.dataset import Dataset
    from pipeline.data.loading.loader import Loader
    from pipeline.data.loading.objectives import Causal
    from pipeline.data.order.blend import UNIT
    from pipeline.data.order.journal import Journal
    from pipeline.data.order.segments import Segment, SourceState
    from pipeline.data.order.windows import windows_of

    dataset = Dataset.open(folder)
    state = SourceState(tokens=dataset.tokens, weight=UNIT, offset=0, lap=0, cursor=0)
    segment = Segment(first_step=0, first_sample=0, batch_size=BATCH, sequence_length=LENGTH, sources={"random": state})
    journal = Journal(seed=1, segments=[segment])
    instances = windows_of(journal, {"random": dataset})
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
    for _ in range(500):  # files are opened, look-ups are in full swing
        next(source)
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        for _ in range(50):
            next(source)
        count += 50
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = count * BATCH * LENGTH
    result = {"side": side, "mtok_s": round(tokens / wall / 1e6, 1), "mtok_cpu_s": round(tokens / cpu / 1e6, 1)}
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the dataset, kept for the next time")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the dataset's .bin files")
    parser.add_argument("--rounds", type=int, default=5, help="times that each side is run")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument("--peer-python", help="a Python with ai2-olmo-core; without it that side is left out")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.work / f"random-{arguments.gigabytes:g}"
    if arguments.side:
        return run_side(arguments.side, folder, arguments.seconds)
    make_dataset(folder, arguments.gigabytes)
    for path in [*bins(folder), *folder.glob("parts/*/*.idx")]:
        path.read_bytes()
    results: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for side in SIDES:
            python = arguments.peer_python if side == PEER else sys.executable
            if python is None:
                continue
            command = [python, __file__, "--side", side, "--work", arguments.work]
            command += ["--gigabytes", f"{arguments.gigabytes:g}", "--seconds", str(arguments.seconds)]
            line = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
            print(line.strip().splitlines()[-1], flush=True)
            results.setdefault(side, []).append(json.loads(line.strip().splitlines()[-1])["mtok_s"])
    for side, values in results.items():
        spread = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        print(json.dumps({"side": side, "runs": len(values), "mtok_s": spread}), flush=True)
    return None


if __name__ == "__main__":
    main()
