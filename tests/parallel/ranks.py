"""Functions on several processes, connected by gloo, each a fork of a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["pipeline.train.trainer", "tests.parallel.ranks"])

Environment = dict[str, str]


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
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(world: int, function: Callable[..., Any], *args: Any, connect: bool = True, timeout: float = 120) -> list[Any]:
    """Call `function(*args)` on `world` processes; returns what each returned, by rank.

    Args:
        world: Processes.
        function: Of a module, so that a process can import it; its result must be picklable.
        args: Its arguments.
        connect: Make the process group first (gloo). Without it only the environment is as torchrun sets it.
        timeout: Seconds after which all are killed.

    Raises:
        RankFailed: one raised, died or hung; of several the first one. All are ended then.
    """
    port = free_port()
    logs = Path(tempfile.mkdtemp(prefix="ranks-"))
    processes, ends = [], []
    for rank in range(world):
        ours, theirs = _SERVER.Pipe(duplex=False)
        log = logs / f"rank-{rank}.log"
        process = _SERVER.Process(
            target=_rank, args=(theirs, log, environment(rank, world, port), connect, function, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    results: dict[int, Any] = {}
    until = time.monotonic() + timeout
    try:
        while len(results) < world:
            ready = wait([end for rank, end in enumerate(ends) if rank not in results], until - time.monotonic())
            if not ready:
                raise RankFailed(
                    f"ranks {sorted(set(range(world)) - results.keys())} took over {timeout:.0f} s{_tails(logs)}"
                )
            for end in ready:
                assert isinstance(end, Connection)
                rank = ends.index(end)
                try:
                    good, value = end.recv()
                except EOFError:
                    processes[rank].join(5)
                    good, value = False, f"died with exit code {processes[rank].exitcode}"
                if not good:
                    raise RankFailed(f"rank {rank}: {value}{_tails(logs)}")
                results[rank] = value
        return [results[rank] for rank in range(world)]
    finally:
        for process in processes:
            if len(results) < world:
                process.kill()
            process.join()
        shutil.rmtree(logs)


def _rank(
    end: Connection,
    log: Path,
    variables: Environment,
    connect: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import torch
    import torch.distributed as dist

    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        if connect:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        value = function(*args)
        if dist.is_initialized():
            dist.barrier()
        end.send((True, value))
        code = 0
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
