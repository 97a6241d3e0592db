"""Two checkouts side by side: CPU time of `preprocess` and `curate` of one corpus, alternated.

    python benchmarks/data/checkouts.py --before CHECKOUT --work /tmp/bench --rounds 10

The text is what `preprocess.py` finds on this machine. Both use this interpreter and its packages. The first round
loads and compiles, and does not count. One JSON line a run, then one with medians and the ratio of this checkout to the
other for each command.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import orjson
import yaml

from benchmarks.data.preprocess import ROOT, texts

CURATE = {
    "rules": {"gopher_quality": {}, "gopher_repetition": {}},
    "duplicates": {"exact": "text", "near": {}, "lines": {"min_count": 3}},
}
CLEARED = {"preprocess": ["a"], "curate": ["a/curate", "curate"]}
"""Folders below that of the data that a command makes."""


def write_run(work: Path, mb: float, changes: dict[str, object]) -> Path:
    """Write the corpus and the run file."""
    size = 0
    with (work / "a.jsonl").open("wb") as file:
        for number, text in enumerate(texts(200_000)):
            size += file.write(orjson.dumps({"id": str(number), "text": text}) + b"\n")
            if size > mb * 1e6:
                break
    run = {
        "run": {"dir": str(work / "run")},
        "tokenizer": {"train": {"vocab_size": 2000}},
        "data": {
            "sources": [{"name": "a", "type": "jsonl", "paths": [str(work / "a.jsonl")]}],
            "preprocess": {"workers": 2, "unit_bytes": 4_000_000, **changes},
            "curate": CURATE,
        },
        "model": {"layers": 1, "dim": 8, "heads": 1},
        "train": {"duration": "1 steps", "sequence_length": 8},
    }
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def cpu_s(checkout: Path, command: str, run: Path) -> float:
    """CPU seconds of a command, with its workers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "pipeline", command, str(run)]
    subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(checkout)}, cwd=run.parent, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mb", type=float, default=40)
    parser.add_argument("--shuffle", choices=["unit", "global"], default="unit")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    run = write_run(options.work, options.mb, {"shuffle": options.shuffle})
    found: dict[tuple[str, Path], list[float]] = {}
    sides = [options.before.resolve(), ROOT]
    for number in range(options.rounds + 1):
        for checkout in sides[:: 1 if number % 2 else -1]:
            for command, folders in CLEARED.items():
                for folder in folders:
                    shutil.rmtree(options.work / "run" / "data" / folder, ignore_errors=True)
                seconds = cpu_s(checkout, command, run)
                print(
                    json.dumps({"checkout": str(checkout), "command": command, "cpu_s": round(seconds, 3)}), flush=True
                )
                if number:
                    found.setdefault((command, checkout), []).append(seconds)
    for command in CLEARED:
        before, after = (statistics.median(found[command, side]) for side in sides)
        print(json.dumps({"command": command, "before_cpu_s": before, "after_cpu_s": after, "ratio": after / before}))


if __name__ == "__main__":
    main()
