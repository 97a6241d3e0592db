"""The command line with a stand-in for the training: `python -m tests.train.distributed.launched CASE train RUN.yaml`.

The ranks that it starts run the same case.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from pathlib import Path

from pipeline.common.errors import Stopped, UserError
from pipeline.config import Config

FOREVER = 600.0


def train(config: Config, console: object = None) -> int:
    """The stage, as the command line calls it."""
    import torch

    from pipeline.train.distributed import process_group

    ranks = process_group.of_environment()
    home = config.run.dir
    home.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    if CASE == "early":
        _say(home, ranks.rank)
        time.sleep(FOREVER)
    process_group.init_process_group(ranks, torch.device("cpu"), config.launch.time_limits)
    process_group.barrier()
    _say(home, ranks.rank)
    case = globals()[f"case_{CASE}"]
    return int(case(config, ranks.rank) or 0)


def _say(home: Path, rank: int) -> None:
    """Tell the test that the case begins, and which process this is."""
    temporary = home / f".{rank}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(home / f"pid-{rank}")


def _say_that_it_listens(home: Path, rank: int) -> None:
    """The same, from when on signals are no longer what ends a process."""
    (home / "listening").mkdir(exist_ok=True)
    _say(home / "listening", rank)


def case_good(config: Config, rank: int) -> int:
    from contextlib import nullcontext

    from pipeline.train.distributed.process_group import broadcast_from_rank0
    from pipeline.train.run.folder import open_run

    with open_run(config.run.dir) if rank == 0 else nullcontext() as folder:
        if folder is not None:
            folder.step = 7
        # One write: ranks that share a terminal do not mix within it.
        sys.stdout.write(f"out of rank {rank}\n")
        print(f"err of rank {rank}", file=sys.stderr)
        step: int = broadcast_from_rank0(lambda: 7)
    return step


def case_raises(config: Config, rank: int) -> None:
    from contextlib import nullcontext

    from pipeline.train.distributed.process_group import barrier
    from pipeline.train.run.folder import open_run

    with open_run(config.run.dir) if rank == 0 else nullcontext():
        barrier()
        if rank == 1:
            raise KeyError("what")
        barrier()


def case_mistake(config: Config, rank: int) -> None:
    from pipeline.train.distributed.process_group import broadcast_from_rank0

    def refuse() -> None:
        raise UserError("train.x is wrong")

    broadcast_from_rank0(refuse)


def case_slow_mistake(config: Config, rank: int) -> None:
    """The other ranks are gone for long when rank 0 says why."""
    from slurm.local.launcher import _AFTER_FAILURE

    try:
        case_mistake(config, rank)
    finally:
        if rank == 0:
            time.sleep(_AFTER_FAILURE + 1)


def case_same_mistake(config: Config, rank: int) -> None:
    raise UserError("train.y is wrong")


def case_base_exception(config: Config, rank: int) -> None:
    class Odd(BaseException):
        pass

    if rank == 1:
        raise Odd("no Exception")
    time.sleep(FOREVER)


def case_lost(config: Config, rank: int) -> None:
    """A network that fails by itself."""
    raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")


def case_killed(config: Config, rank: int) -> None:
    from pipeline.train.distributed.process_group import barrier

    if rank == 1:
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


def case_exits(config: Config, rank: int) -> None:
    if rank == 1:
        print("a library gave up", file=sys.stderr)
        os._exit(9)
    time.sleep(FOREVER)


def case_stop(config: Config, rank: int) -> None:
    """Ranks agree on a stop, and rank 0 has something to close after the others have left."""
    from pipeline.train.distributed.process_group import broadcast_from_rank0, gather
    from pipeline.train.run.stop_requests import Requests

    try:
        with Requests(config.run.dir, to_the_end=True) as stop:
            _say_that_it_listens(config.run.dir, rank)
            step = 0
            while True:
                step += 1
                reasons = gather(stop.reason())
                reason = broadcast_from_rank0(lambda found=reasons or []: next(filter(None, found), None))
                if reason:
                    raise Stopped(f"{reason} at step {step}")
                time.sleep(0.02)
    finally:
        if rank == 0:
            (config.run.dir / "closing").touch()
            time.sleep(1)
            (config.run.dir / "closed").touch()


def case_deaf(config: Config, rank: int) -> None:
    """Asked to stop, and never does."""
    from pipeline.train.run.stop_requests import Requests

    with Requests(config.run.dir):
        _say_that_it_listens(config.run.dir, rank)
        while True:
            time.sleep(1)


def case_hang(config: Config, rank: int) -> None:
    from pipeline.train.distributed.process_group import barrier, of_environment
    from pipeline.train.distributed.watchdog import Watchdog
    from pipeline.train.run.folder import RunFolder

    folder, seconds = RunFolder(config.run.dir, 1), config.launch.heartbeat_seconds
    with Watchdog(config.launch.time_limits) as watchdog, watchdog.heartbeats(folder, of_environment(), seconds):
        for step in range(3):
            watchdog.phase("step" if step else "first_step", step)
            if rank == 1 and step == 2:
                this_is_where_it_hangs()
            barrier()


def case_hang_alone(config: Config, rank: int) -> None:
    from pipeline.train.distributed.process_group import of_environment
    from pipeline.train.distributed.watchdog import Watchdog
    from pipeline.train.run.folder import RunFolder

    folder, seconds = RunFolder(config.run.dir, 1), config.launch.heartbeat_seconds
    with Watchdog(config.launch.time_limits) as watchdog, watchdog.heartbeats(folder, of_environment(), seconds):
        watchdog.phase("first_step", 1)
        this_is_where_it_hangs()


def this_is_where_it_hangs() -> None:
    time.sleep(FOREVER)


if __name__ == "__main__":
    CASE = sys.argv[1]
    stage = types.ModuleType("pipeline.train.loop.trainer")
    stage.train = train  # type: ignore[attr-defined]
    sys.modules["pipeline.train.loop.trainer"] = stage
    if "WORLD_SIZE" not in os.environ:
        import slurm.local.launcher

        slurm.local.launcher.RANK_MODULE = ("tests.train.distributed.launched", CASE)
    from pipeline.cli.main import main

    sys.argv = ["pipeline", *sys.argv[2:]]
    main()
