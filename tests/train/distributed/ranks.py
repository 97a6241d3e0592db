"""Functions on several processes, connected by gloo, each a fork of a server that has imported torch already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["pipeline.train.loop.trainer", "tests.train.distributed.ranks"])

Environment = dict[str, str]

_MOST_CALLS = 16
"""Runs of the same processes. Each leaves the groups of its mesh behind, with their connections and threads."""


class RankFailed(AssertionError):
    """A rank raised or died; the message has its traceback and the end of its output."""


def environment(rank: int, world: int, port: int) -> Environment:
    """What torchrun would have set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port that nobody listens on now, and that neither the kernel nor another worker of pytest gives to anybody."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    while True:
        # Below those that outgoing connections get (32768 to 60999 on Linux).
        port = 20_000 + 16 * random.SystemRandom().randrange(750) + worker
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Ranks:
    """Processes that are called together, more than once. A context manager.

    Args:
        world: How many.
        connect: Make the process group first (gloo). Without it only the environment is as torchrun sets it.
    """

    def __init__(self, world: int, *, connect: bool) -> None:
        port = free_port()
        self._logs = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes, self._ends = [], []
        for rank in range(world):
            ours, theirs = _SERVER.Pipe()
            log = self._logs / f"rank-{rank}.log"
            process = _SERVER.Process(
                target=_rank, args=(theirs, log, environment(rank, world, port), connect), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
        self.calls = 0
        """Calls that ended well."""
        self.failed = False

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End them all."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()  # which they wait for, if nothing has gone wrong
            process.join(5)
            process.kill()
            process.join()
        shutil.rmtree(self._logs, ignore_errors=True)

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 480) -> list[Any]:
        """`function(*args)` on each; returns what each returned, by rank.

        Args:
            function: Of a module, so that a process can import it; its result must be picklable.
            args: Its arguments.
            timeout: Seconds.

        Raises:
            RankFailed: one raised, died or hung; of several the first one. All are ended then.
        """
        try:
            return self._call(function, args, timeout)
        except BaseException:
            self.failed = True
            for process in self._processes:
                process.kill()
            raise

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for end in self._ends:
            end.send((function, args))
        results: dict[int, Any] = {}
        until = time.monotonic() + timeout
        while len(results) < len(self._ends):
            waiting = [end for rank, end in enumerate(self._ends) if rank not in results]
            ready = wait(waiting, until - time.monotonic())
            if not ready:
                late = sorted(set(range(len(self._ends))) - results.keys())
                raise RankFailed(f"ranks {late} took over {timeout:.0f} s{_tails(self._logs)}")
            for end in ready:
                assert isinstance(end, Connection)
                rank = self._ends.index(end)
                try:
                    good, value = end.recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5)
                    good, value = False, f"died with exit code {self._processes[rank].exitcode}"
                if not good:
                    raise RankFailed(f"rank {rank}: {value}{_tails(self._logs)}")
                results[rank] = value
        self.calls += 1
        return [results[rank] for rank in range(len(self._ends))]


def run(world: int, function: Callable[..., Any], *args: Any, connect: bool = True, timeout: float = 480) -> list[Any]:
    """One call on `world` new processes, see `Ranks`."""
    with Ranks(world, connect=connect) as these:
        return these.call(function, *args, timeout=timeout)


@contextmanager
def kept_ranks() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, kept from one call to the next: what torch has worked out once it need not again."""
    kept: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world in kept and (kept[world].calls >= _MOST_CALLS or kept[world].failed):
            kept.pop(world).close()
        if world not in kept:
            kept[world] = Ranks(world, connect=False)
        return kept[world]

    yield get
    for these in kept.values():
        these.close()


def _rank(end: Connection, log: Path, variables: Environment, connect: bool) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import torch
    import torch.distributed as dist

    from pipeline.train.torch_compat.gloo import give_gloo_one_thread

    os.environ.update(variables)
    torch.set_num_threads(1)
    code = 0
    try:
        if connect:
            give_gloo_one_thread()
            dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        while True:
            try:
                function, args = end.recv()
            except EOFError:
                break
            gc.freeze()  # a training collects, which takes long with all that torch has imported
            value = function(*args)
            if dist.is_initialized():
                dist.barrier()
            end.send((True, value))
    except BaseException:
        end.send((False, traceback.format_exc()))
        code = 1
    end.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # leaving a gloo process in the ordinary way aborts now and then


def _tails(logs: Path) -> str:
    texts = {path.name: path.read_text(errors="replace")[-2000:] for path in sorted(logs.iterdir())}
    return "".join(f"\n--- {name}\n{text}" for name, text in texts.items() if text)
