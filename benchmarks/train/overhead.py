"""The training loop's own time per step: all that a step takes beside the arithmetic, as JSON lines.

    python benchmarks/train/overhead.py --work /tmp/overhead
    python benchmarks/train/overhead.py --work /tmp/overhead --ranks 2 8 --steps 400 --simulate 1024 8192

Each line is a real `pipeline train` of a tiny model on gloo processes of this machine. In every rank, `Stepper.step`
is timed; the rest of a step is the loop: data, metrics, logs, heartbeat, stop requests. The run neither validates nor
saves before its end, and the first steps are left out.

    rank0, others   milliseconds of the loop per step in the main thread, medians over steps, then over ranks: `cpu` on
                    a core, `wall` with the time in which other threads and processes had the core
    agreement       milliseconds on a core of what the ranks agree on within a step, beside the collective itself:
                    the tensors that carry it, and its figures

`--simulate` computes `agreement` and the figures of rank 0 for as many ranks as named, without the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import orjson
import torch
from checkpoint import run_ranks, write_run
from rich.console import Console

from pipeline.config.load import load
from pipeline.train.loop import trainer
from pipeline.train.loop.step import Stepper
from pipeline.train.monitor.straggler import Stragglers, summary

WARM = 20
"""First steps, which are left out."""
TINY = [
    "model.layers=1",
    "model.dim=32",
    "model.heads=2",
    "train.validation.samples=0",
    "train.metrics.tensorboard=true",
    "train.checkpoint.every_steps=1000000",
]


def measure_rank(number: int, world: int, port: int, file: Path, steps: int, results: Path) -> None:
    """One process of a run; writes the milliseconds of its loop."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    begins: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    plain = Stepper.step

    def timed(self: Stepper, *args: Any, **options: Any) -> Any:
        begins.append((time.perf_counter(), time.thread_time()))
        result = plain(self, *args, **options)
        ends.append((time.perf_counter(), time.thread_time()))
        return result

    Stepper.step = timed  # type: ignore[method-assign]
    values = [*TINY, f"train.batch_size={world}", f"train.duration={steps} steps", f"parallel.dp_replicate={world}"]
    trainer.train(load(file, [*values, f"run.dir={file.parent / f'run-{world}'}"]), Console(quiet=True))
    loops = [
        [1e3 * (after - before) for after, before in zip(begin, end, strict=True)]
        for end, begin in zip(ends[WARM:], begins[WARM + 1 :], strict=False)
    ]
    wall, cpu = (statistics.median(values) for values in zip(*loops, strict=True))
    (results / f"{number}.json").write_bytes(orjson.dumps({"wall": wall, "cpu": cpu}))


def measured(work: Path, file: Path, world: int, steps: int) -> dict[str, Any]:
    """The result line of a number of processes."""
    results = work / f"results-{world}"
    results.mkdir()
    run_ranks(measure_rank, world, file, steps, results)
    found = [orjson.loads((results / f"{number}.json").read_bytes()) for number in range(world)]
    row = {"ranks": world, "steps": steps - WARM - 1, "unit": "ms", "rank0": rounded(found[0])}
    if world > 1:
        row["others"] = rounded({key: statistics.median(each[key] for each in found[1:]) for key in found[0]})
    return row | {"agreement": {"cpu": round(agreement(world), 4)}}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in values.items()}


def agreement(world: int, rounds: int = 200) -> float:
    """Milliseconds per step of what grows with the ranks: their working times, from the tensor to the warning."""
    stragglers, seconds = Stragglers(lambda rank: None), []
    for step in range(rounds):
        begin = time.thread_time()
        works = [0.0] * world
        works[0] = 0.01
        facts = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, *works], dtype=torch.float64)
        everything = torch.cat([facts, torch.zeros(4, dtype=torch.float64)])
        found = torch.split(everything, [7, world, 4])[1].tolist()
        if world > 1:
            stragglers.see(step, summary(found), 1.0)
        seconds.append(time.thread_time() - begin)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", type=int, nargs="*", default=[], metavar="RANKS")
    arguments = parser.parse_args()
    file = write_run(arguments.work, 1)
    for _ in range(arguments.rounds):
        for world in arguments.ranks:
            print(json.dumps(measured(arguments.work, file, world, arguments.steps)), flush=True)
            for path in (f"run-{world}", f"results-{world}"):
                shutil.rmtree(arguments.work / path)
    for world in arguments.simulate:
        print(
            json.dumps(
                {"ranks": world, "simulated": True, "unit": "ms", "agreement": {"cpu": round(agreement(world), 4)}}
            )
        )
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
