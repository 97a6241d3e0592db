"""What reading a checkpoint costs: the rate of load, verify and export as a fraction of plain reads and writes.

Used by `checkpoint.py`, on a checkpoint that it has saved. Each kind alternates with its own plain side:

    load    how the trainer resumes: every rank hashes a part of the files, then all load the tensors; beside it every
            rank reads its own file
    verify  `pipeline checkpoint verify`, in one process; beside it that process reads all files
    export  `pipeline checkpoint export` of the weights, in one process, which verifies first; beside it that process
            reads all files and writes as many bytes as the export has, with an fsync

Plain reads go to one buffer of 8 MiB, file by file. With a cold cache, the kernel is asked before each measurement to
drop the pages of the checkpoint (POSIX_FADV_DONTNEED); with a warm one, all files have been read just before.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from pipeline.config import Config
from pipeline.train.checkpoint import dcp_storage
from pipeline.train.checkpoint.export import export
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.resume_point import resume_point
from pipeline.train.distributed.process_group import barrier
from pipeline.train.export.commands import verify
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import ParallelModel

CHUNK = 8 << 20
SOURCE = memoryview(os.urandom(CHUNK))
READS = ("load", "verify", "export")
CACHES = ("warm", "cold")
QUIET = Console(quiet=True)


@dataclass(frozen=True)
class Reading:
    """The sides of all measurements on this rank."""

    config: Config
    model: ParallelModel
    checkpoints: Checkpoints
    checkpoint: Checkpoint
    work: Path

    @property
    def files(self) -> list[Path]:
        return [self.checkpoint.path / name for name in self.checkpoint.files()]

    def load(self) -> None:
        found = resume_point(self.checkpoints, self.config.resume, print)
        assert found == self.checkpoint
        dcp_storage.read(found, self.model, Optimizers(self.config, self.model))

    def plain_load(self) -> None:
        read_plainly([self.checkpoint.path / f"__{dist.get_rank()}_0.distcp"])

    def verify(self) -> None:
        if dist.get_rank() == 0:
            found = verify(self.checkpoints, self.checkpoint.step, QUIET, lambda line: None)
            assert found == {self.checkpoint.step: []}

    def plain_verify(self) -> None:
        if dist.get_rank() == 0:
            read_plainly(self.files)

    def export(self) -> None:
        if dist.get_rank() == 0:
            export(self.checkpoints, self.work / "exported", step=None, weights="model", max_shard=None, console=QUIET)

    def plain_export(self) -> None:
        if dist.get_rank() == 0:
            read_plainly(self.files)
            write_plainly(self.work / "plain", self.exported_bytes)

    @property
    def exported_bytes(self) -> int:
        return sum(weight.numel() for part in self.model.parts.values() for weight in part.parameters()) * 4

    def clean(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.work / "exported", ignore_errors=True)
            (self.work / "plain").unlink(missing_ok=True)


def measure_reading(reading: Reading, kinds: Sequence[str], rounds: int, pause: float) -> list[dict[str, Any]]:
    """All rounds, on every rank; the lines of results. The first round of each kind is not counted."""
    chance = random.Random(0)  # the same on all ranks
    bytes_of = dict.fromkeys(READS, reading.checkpoint.size)
    bytes_of["export"] += reading.exported_bytes
    lines = []
    for kind in kinds:
        for cache in CACHES:
            seconds: dict[str, list[float]] = {kind: [], f"plain_{kind}": []}
            for number in range(rounds + 1):
                for side in chance.sample(sorted(seconds), 2):
                    taken = _timed(getattr(reading, side), reading, cache, pause)
                    if number:
                        seconds[side].append(taken)
            ours, plain = ([bytes_of[kind] / 1e6 / each for each in values] for values in seconds.values())
            lines.append(
                {
                    "what": kind,
                    "cache": cache,
                    "ranks": dist.get_world_size(),
                    "bytes": bytes_of[kind],
                    "rounds": rounds,
                    "mb_s": round(statistics.median(ours)),
                    "plain_mb_s": round(statistics.median(plain)),
                    "share": round(statistics.median(ours) / statistics.median(plain), 2),
                    "mb_s_all": [round(rate) for rate in ours],
                    "plain_mb_s_all": [round(rate) for rate in plain],
                }
            )
    return lines


def _timed(side: Callable[[], None], reading: Reading, cache: str, pause: float) -> float:
    os.sync()
    if dist.get_rank() == 0:
        if cache == "warm":
            read_plainly(reading.files)
        else:
            drop_from_cache(reading.files)
    time.sleep(pause if cache == "cold" else 0)
    barrier()
    start = time.perf_counter()
    side()
    barrier()
    seconds = time.perf_counter() - start
    reading.clean()
    barrier()
    return seconds


def read_plainly(paths: list[Path]) -> None:
    """All bytes of files, as fast as they come."""
    buffer = memoryview(bytearray(CHUNK))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def write_plainly(path: Path, size: int) -> None:
    """So many bytes as fast as it goes, down to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while size > 0:
        size -= os.write(descriptor, SOURCE[: min(size, CHUNK)])
    os.fsync(descriptor)
    os.close(descriptor)


def drop_from_cache(paths: list[Path]) -> None:
    """The pages of files, which have been flushed, leave the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
