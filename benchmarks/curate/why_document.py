"""Time of `pipeline data why --document ID` in a source of many documents.

    python benchmarks/curate/why_document.py --work /tmp/bench [--documents 10000000] [--files 20] [--rounds 3]

Short documents with ids in JSON lines, curated by one rule. Prints seconds of the command for ids of the first, the
middle and the last document, for one that is not there, and for a place, which needs no id; each after a first call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def seconds(*words: object, code: int = 0) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "pipeline", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10**7)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    each = options.documents // options.files
    for number in range(options.files):
        with (options.work / f"{number:03}.jsonl").open("w") as out:
            for row in range(each):
                out.write(f'{{"id": "document-{number * each + row}", "text": "some words of {row}"}}\n')
    source = {"name": "s", "type": "jsonl", "paths": [str(options.work / "*.jsonl")]}
    rules = {"gopher_quality": {"min_words": 1}}
    data = [f"data.sources={json.dumps([source])}", f"data.curate={json.dumps({'rules': rules})}"]
    run = ["quickstart.yaml", f"run.dir={options.work / 'run'}", *data]
    print(f"curate: {seconds('curate', *run):.0f} s", flush=True)
    last = each * options.files - 1
    questions = {
        "first id": "document-0",
        "middle id": f"document-{last // 2}",
        "last id": f"document-{last}",
        "place": "0:0",
        "no such id": "document-x",
    }
    for name, document in questions.items():
        words = ("data", "why", *run, "--source", "s", "--document", document)
        times = [seconds(*words, code=2 if name == "no such id" else 0) for _ in range(options.rounds + 1)][1:]
        row = {"question": name, "documents": options.documents, "median_s": round(statistics.median(times), 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
