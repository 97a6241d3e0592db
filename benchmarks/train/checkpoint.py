"""What a checkpoint costs: the share of a save that training waits for, and rates as shares of the disk's own.

    python benchmarks/train/checkpoint.py --work /tmp/checkpoint

On 1, 2 and 4 processes that share 1 GiB of model and optimizer (`parallel.dp_shard`), with the package's own `Saver`.
Nothing is trained meanwhile. Each round has, in an order by chance: a save that is written before it returns, one that
is written beside the loop, and the disk itself: as many bytes in as many files, one a process, in plain writes of 8 MiB
with an fsync at the end. All are timed from a barrier to a barrier, and removed before the next one. JSON lines:

    blocked   seconds that a save in the background holds up the loop, by the seconds of a save that does not return
              before it is committed: of the first save, for which memory is allocated, and the median of later ones
    rate      bytes of a checkpoint by the seconds from the call to the commit, and that by the disk's rate: medians
              over rounds; each round has its own disk, whose rate varies
    load, verify, export: see `checkpoint_read.py`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from checkpoint_read import READS, Reading, measure_reading, write_plainly
from rich.console import Console

from pipeline.config.load import load
from pipeline.data.order.journal import Journal
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import barrier, of_environment
from pipeline.train.distributed.watchdog import Watchdog
from pipeline.train.loop.saving import Saver
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.parallel.setup import set_up
from pipeline.train.rules.layout import check_layout
from pipeline.train.start.open_run import open_run_everywhere
from pipeline.train.start.setup import init_rank

STEPS = 1_000
"""The step of the checkpoint that is read."""
WORDS = ("the", "a", "sea", "boat", "wind", "sails", "north", "harbour", "of", "under", "light", "old", "night")


def write_run(work: Path, layers: int) -> Path:
    """A corpus of some words, preprocessed, and a run file whose model has 12 bytes a parameter to save."""
    chance = random.Random(0)
    (work / "text").mkdir(parents=True)
    for number in range(20):
        (work / "text" / f"{number}.txt").write_text(" ".join(chance.choices(WORDS, k=2000)))
    values = {
        "run": {"dir": str(work / "run")},
        "launch": {"threads": 1},
        "data": {"dir": str(work / "data"), "sources": [{"name": "text", "paths": [str(work / "text" / "*.txt")]}]},
        "tokenizer": {"train": {"vocab_size": 300}},
        "model": {"layers": layers, "dim": 1024, "heads": 16},
        "train": {
            "duration": "1000 steps",
            "sequence_length": 64,
            "batch_size": 4,
            "metrics": {"tensorboard": False},
            "compile": False,
        },
    }
    file = work / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    with contextlib.redirect_stdout(sys.stderr):
        preprocess(load(file))
    return file


def rank(
    number: int, world: int, port: int, file: Path, name: str, kinds: Sequence[str], rounds: int, pause: float
) -> None:
    """One process of a group; the first one prints."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    with ExitStack() as stack:
        measure(file, [f"parallel.dp_shard={world}", f"run.dir={file.parent / name}"], stack, kinds, rounds, pause)
    barrier()
    os._exit(0)


def measure(
    file: Path, overrides: list[str], stack: ExitStack, kinds: Sequence[str], rounds: int, pause: float
) -> None:
    """All rounds, on every rank."""
    config, ranks = load(file, overrides), of_environment()
    check_layout(config, ranks.world_size)
    watchdog = stack.enter_context(Watchdog(config.launch.time_limits))
    device = init_rank(config, ranks)
    folder, _, plan = open_run_everywhere(config, ranks, stack, watchdog, Console(quiet=True))
    watchdog.pause()
    setup = set_up(config, plan.tokenizer.vocab_size, device)
    model = build_model(config, setup)
    optimizers = Optimizers(config, model)
    checkpoints = Checkpoints.of_run(folder.path)
    savers = {}
    for kind in ("sync", "async"):
        own = load(file, [*overrides, f"train.checkpoint.async_save={str(kind == 'async').lower()}"])
        savers[kind] = Saver(own, setup, plan, folder, watchdog, model, optimizers, None, Console(quiet=True))
    lines = []
    if "save" in kinds:
        lines += measure_saves(savers, plan.journal, folder.path, rounds, pause)
    if reads := [kind for kind in kinds if kind != "save"]:
        savers["sync"].save(STEPS, plan.journal, {}, last=False, prune=False)
        reading = Reading(config, model, checkpoints, checkpoints.committed(STEPS), file.parent)
        lines += measure_reading(reading, reads, rounds, pause)
    if ranks.rank == 0:
        for line in lines:
            print(json.dumps(line), flush=True)


def measure_saves(
    savers: dict[str, Saver], journal: Journal, run: Path, rounds: int, pause: float
) -> list[dict[str, Any]]:
    """Saves of both kinds and plain writes, on every rank; the lines of results."""
    checkpoints, number_of_rank = Checkpoints.of_run(run), dist.get_rank()
    plain = run / f"plain-{number_of_rank}"
    chance, step, size = random.Random(0), 0, 0
    seconds: dict[str, list[float]] = {"sync": [], "async": [], "disk": [], "blocked": []}
    for number in range(rounds + 1):
        kinds = ["sync", "async", "disk"]
        if number:
            chance.shuffle(kinds)  # the same on all ranks
        for kind in kinds:
            step += 1
            os.sync()
            time.sleep(pause)
            barrier()
            start = time.perf_counter()
            if kind == "disk":
                write_plainly(plain, size)
            else:
                savers[kind].save(step, journal, {}, last=False, prune=False)
                if kind == "async":
                    seconds["blocked"].append(slowest(time.perf_counter() - start))
                savers[kind].wait()
            barrier()
            seconds[kind].append(time.perf_counter() - start)
            if kind != "disk":
                size = (checkpoints.committed(step).path / f"__{number_of_rank}_0.distcp").stat().st_size
            barrier()
            if number_of_rank == 0:
                problems = [report.failure for saver in savers.values() for report in saver.reports() if report.failure]
                assert not problems, problems
                if kind != "disk":
                    shutil.rmtree(checkpoints.committed(step).path)
            plain.unlink(missing_ok=True)
    total = torch.tensor([float(size)])
    dist.all_reduce(total)
    return results(dist.get_world_size(), total.item(), seconds)


def slowest(seconds: float) -> float:
    """Of all ranks, since they wait for one another in the next step."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def results(world: int, size: float, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The first round is apart: memory is allocated in it, and files are written for the first time."""
    first, later = (
        {kind: part(values) for kind, values in seconds.items()} for part in (lambda v: v[:1], lambda v: v[1:])
    )
    sync = statistics.median(later["sync"])
    common = {"ranks": world, "bytes": int(size), "rounds": len(later["sync"])}

    def rates(kind: str) -> list[float]:
        return [size / 1e6 / value for value in later[kind]]

    shares = {
        kind: [ours / disk for ours, disk in zip(rates(kind), rates("disk"), strict=True)] for kind in ("sync", "async")
    }
    return [
        {
            "what": "blocked",
            **common,
            "blocked_s": round(statistics.median(later["blocked"]), 3),
            "sync_s": round(sync, 3),
            "share": round(statistics.median(later["blocked"]) / sync, 3),
            "first_blocked_s": round(first["blocked"][0], 3),
            "first_share": round(first["blocked"][0] / sync, 3),
        },
        {
            "what": "rate",
            **common,
            **{f"{kind}_mb_s": round(statistics.median(rates(kind))) for kind in ("disk", "sync", "async")},
            **{f"{kind}_share": round(statistics.median(shares[kind]), 2) for kind in ("sync", "async")},
            "disk_mb_s_all": [round(rate) for rate in rates("disk")],
        },
    ]


def run_ranks(target: Callable[..., None], world: int, *values: Any) -> None:
    """Run a function on the processes of a group, with number, world, a free port and `values`; end if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    group = [context.Process(target=target, args=(number, world, port, *values)) for number in range(world)]
    for process in group:
        process.start()
    left = list(group)
    while left:
        multiprocessing.connection.wait([process.sentinel for process in left])
        left = [process for process in left if process.is_alive()]
        failed = [process.exitcode for process in group if process.exitcode]
        if failed:
            for process in left:
                process.terminate()
            raise SystemExit(f"a rank of {world} ended with {failed[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, help="a folder that does not exist, on the disk in question"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", choices=["save", *READS], default=["save", *READS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--pause", type=float, default=2.0, help="seconds before each measurement, for disks with a burst"
    )
    parser.add_argument("--layers", type=int, default=8, help="of 12.6 million parameters each")
    arguments = parser.parse_args()
    file = write_run(arguments.work, arguments.layers)
    for world in arguments.ranks:
        name = f"run-{world}"
        run_ranks(rank, world, file, name, arguments.kinds, arguments.rounds, arguments.pause)
        shutil.rmtree(arguments.work / name)
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
