"""The cost of giving text of a compressed member only after its checksum was seen, and the memory of a long record.

Reads a file of one member with and without `verify`, in turns, and prints seconds and the ratio of the medians; then
preprocesses one long record in a process of its own, and prints its peak memory over that for a short one.

Run it as `python benchmarks/data/damage.py --corpus FILE --megabytes 64 --rounds 5`.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
import zstandard

from pipeline.data.sources.compression import open_stream

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 6),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=1),
}


def reading(path: Path, verify: bool) -> float:
    """Seconds to read all lines."""
    begin = time.perf_counter()
    with open_stream(str(path), verify=verify) as stream:
        for _ in stream:
            pass
    return time.perf_counter() - begin


def peak_of_a_record(work: Path, text: str, tokenizer: Path | None = None) -> int:
    """The highest memory, in bytes, of a process that preprocesses a single record with this text."""
    work.mkdir()
    (work / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "held out"}) + "\n")
    run = {
        "run": {"dir": str(work / "run")},
        "data": {
            "sources": [{"name": "s", "type": "jsonl", "paths": [str(work / "a.jsonl")]}],
            "preprocess": {"workers": 1, "engine": "tokenizers", "max_record_bytes": 2**30},
        },
        "tokenizer": {"path": str(tokenizer)} if tokenizer else {"train": {"vocab_size": 300}},
        "model": {"layers": 1, "dim": 8, "heads": 1},
        "train": {"duration": "1 steps", "sequence_length": 8},
    }
    (work / "run.yaml").write_text(yaml.safe_dump(run))
    code = (
        "import resource, sys; from pathlib import Path; from pipeline.config.load import load;"
        "from pipeline.data.preprocess.stage import preprocess; preprocess(load(Path(sys.argv[1])));"
        "print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)))"
    )
    command = [sys.executable, "-c", code, str(work / "run.yaml")]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return int(out.splitlines()[-1]) * 1024


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, repeated as often as needed")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    text = args.corpus.read_bytes()
    size = args.megabytes * 10**6
    words, chance = text.split(b" "), random.Random(0)
    # In another order each time: no compression sees that it repeats.
    data = b" ".join(b" ".join(chance.sample(words, len(words))) for _ in range(size // len(text) + 1))[:size]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for suffix, compress in COMPRESS.items():
            path = work / f"a{suffix}"
            path.write_bytes(compress(data))
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(args.rounds):
                for verify in (False, True):
                    times[verify].append(reading(path, verify))
            with_it, without = (statistics.median(times[verify]) for verify in (True, False))
            more = (with_it - without) / size * 10**9
            ratio = with_it / without
            print(f"{suffix}: {without:.2f} s, verified {with_it:.2f} s, ratio {ratio:.2f}, {more:.1f} s per GB")
        short = peak_of_a_record(work / "short", "some words " * 100)
        tokenizer = work / "short" / "run" / "data" / "tokenizer" / "tokenizer.json"
        for size in (2**25, 2**26):
            record = data[:size].decode("utf-8", "ignore")
            peak = peak_of_a_record(work / str(size), record, tokenizer) - short
            print(f"a record of {size / 2**20:.0f} MiB: {peak / size:.1f} bytes of memory per byte")


if __name__ == "__main__":
    main()
