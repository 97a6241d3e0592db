"""Start commands of two checkouts in turn: CPU seconds of all processes and wall seconds, as JSON lines.

    python benchmarks/command_start.py --work /tmp/start --before CHECKOUT --after CHECKOUT

`train` is measured from the command to the line that tells the loss of the first step, on a dataset that exists, in a
run folder that does not; the others to their end. The model is tiny and on the CPU, so that what remains is imports,
plan, checks and building. Both sides have the Python that runs this script, and take turns within each round; the
round that comes first fills caches and is left out. The last lines are medians, and after / before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure import tree_cpu

STEP = "step 1/"
"""Start of the line that ends the measurement of a training."""
COMMANDS = {
    "config show": ["config", "show", "{file}"],
    "status": ["status", "{done}"],
    "plan": ["plan", "models/llama3-8b.yaml"],
    "data where": ["data", "where", "{done}", "--step", "1"],
    "train": ["train", "{file}"],
    "train, 4 processes": ["train", "{file}", "launch.processes=4"],
}


def make(work: Path, checkout: Path) -> Path:
    """Run file of a tiny model, with a dataset of this checkout's pages, and a finished run in `done`."""
    work.mkdir(parents=True, exist_ok=True)
    values = {
        "run": {"dir": str(work / "run")},
        "launch": {"threads": 1, "device": "cpu"},
        "data": {
            "dir": str(work / "data"),
            "sources": [{"name": "pages", "paths": [str(checkout / "docs" / "*.md")]}],
        },
        "tokenizer": {"train": {"vocab_size": 300}},
        "model": {"layers": 2, "dim": 32, "heads": 2, "vocab_multiple": 16},
        "train": {
            "duration": "1 steps",
            "sequence_length": 32,
            "batch_size": 4,
            "schedule": {"warmup": "0 steps"},
            "validation": {"samples": 0},
            "metrics": {"log_every_steps": 1, "tensorboard": False},
        },
    }
    for folder in ("data", "done"):  # of an earlier call, when the pages may have been others
        shutil.rmtree(work / folder, ignore_errors=True)
    file = work / "run.yaml"
    file.write_text(json.dumps(values))
    for stage in ("preprocess", "train"):
        run(checkout, [stage, str(file), f"run.dir={work / 'done'}"], work)
    return file


def run(checkout: Path, words: list[str], work: Path, until: str | None = None) -> dict[str, float]:
    """Run a command of a checkout to its end; its CPU and wall seconds, up to a line of its output if that is named."""
    shutil.rmtree(work / "run", ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have the modules compiled
    begin, found = time.perf_counter(), None
    before = os.times()
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline", *words],
        cwd=work,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if until is not None and found is None and line.startswith(until):
                found = {"cpu_s": tree_cpu(process.pid), "wall_s": time.perf_counter() - begin}
    if process.returncode or (until is not None and found is None):
        sys.exit(f"error: {checkout}: pipeline {' '.join(words)}\n{output[-3000:]}")
    if found is None:
        used = sum(os.times()[2:4]) - sum(before[2:4])
        found = {"cpu_s": used, "wall_s": time.perf_counter() - begin}
    return {key: round(value, 3) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the dataset and the runs")
    parser.add_argument("--before", type=Path, required=True, help="a checkout")
    parser.add_argument("--after", type=Path, required=True, help="another one")
    parser.add_argument("--rounds", type=int, default=7, help="times that each side is measured")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    arguments = parser.parse_args()
    work, sides = arguments.work.resolve(), {side: getattr(arguments, side).resolve() for side in ("before", "after")}
    file = make(work, sides["after"])
    for name in arguments.only:
        words = [word.format(file=file, done=work / "done") for word in COMMANDS[name]]
        results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(arguments.rounds + 1):
            for side, checkout in sides.items():
                result = run(checkout, words, work, STEP if words[0] == "train" else None)
                if number > 0:
                    results[side].append(result)
                    print(json.dumps({"command": name, "side": side, **result}), flush=True)
        medians = {
            side: {key: statistics.median(each[key] for each in found) for key in found[0]}
            for side, found in results.items()
        }
        ratio = {key: round(medians["after"][key] / medians["before"][key], 3) for key in medians["after"]}
        print(json.dumps({"command": name, "rounds": arguments.rounds, **medians, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
