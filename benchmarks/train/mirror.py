"""What a mirror of checkpoints costs the steps: the same run without one, with one whose server is down, and with one.

    python benchmarks/train/mirror.py --work /tmp/mirror
    python benchmarks/train/mirror.py --work /tmp/mirror --url s3://BUCKET/FOLDER --rate 20MB

Each round trains a small decoder on one thread, once a side, in an order by chance, and saves every 20 steps. With
`--url` the third side uploads there, with credentials and endpoint of the environment; a server on the same machine
takes cores of its own. Each line is a run: the median and the 10th percentile of the seconds of its steps, its seconds
on cores, and how many checkpoints it has uploaded. The last lines are ratios to the side without a mirror, medians over
rounds. Where other programs use the machine, the median says more of them than of the mirror.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoint import write_run

from pipeline.train.run.folder import read_metrics

WARM = 20
"""First steps, which are left out."""
MODEL = (
    *("model.layers=2", "model.dim=256", "model.heads=4", "train.sequence_length=128", "train.checkpoint.keep=1"),
    *("train.checkpoint.every_steps=20", "train.validation.samples=0"),
)
DOWN = "http://127.0.0.1:1"
"""Nobody listens there."""


def measured(file: Path, side: str, steps: int, url: str, rate: str, name: str) -> dict[str, Any]:
    """The line of a run."""
    run = file.parent / name
    words = [*MODEL, f"run.dir={run}", f"train.duration={steps} steps"]
    environment = dict(os.environ)
    if side != "none":
        words.append(f"train.checkpoint.mirror={{to: '{url}/{name}', keep: 1, patience_seconds: 60}}")
        if rate:
            words.append(f"train.checkpoint.mirror.max_bytes_per_second={rate}")
    if side == "down":
        words.append("train.checkpoint.mirror.patience_seconds=1")
        environment |= {"AWS_ENDPOINT_URL": DOWN, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    command = [sys.executable, "-m", "pipeline", "train", str(file), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    ).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = read_metrics(run)
    seconds = sorted(row["step_seconds"] for row in rows if row.get("step_seconds") and row["step"] > WARM)
    uploads = sum("mirrored_step" in row for row in rows)
    shutil.rmtree(run)
    return {
        "side": side,
        "code": code,
        "median": statistics.median(seconds),
        "p10": seconds[len(seconds) // 10],
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "uploads": uploads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", default="", help="a folder in a bucket")
    parser.add_argument("--rate", default="", help="most bytes per second")
    arguments = parser.parse_args()
    file = write_run(arguments.work, 2)
    sides = ["none", "down", *(["up"] if arguments.url else [])]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for round_ in range(arguments.rounds):
        for side in random.sample(sides, len(sides)):
            url = arguments.url or "s3://bucket/folder"
            line = measured(file, side, arguments.steps, url.rstrip("/"), arguments.rate, f"{side}-{round_}")
            found[side].append(line)
            print(json.dumps(line), flush=True)
    for side in sides[1:]:
        pairs = list(zip(found[side], found["none"], strict=True))
        ratios = {
            key: round(statistics.median(each[key] / without[key] for each, without in pairs), 4)
            for key in ("median", "p10", "cpu")
        }
        print(json.dumps({"side": side, "ratios": ratios}))
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
