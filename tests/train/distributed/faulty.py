"""`pipeline train` in ranks that die, or whose disk fails, at an instant that a test names.

Each rank is a process of its own, a fork of a server that has imported torch already, and runs the command line as
under torchrun. Nothing in the package knows of this: Python tells of every file that is opened, renamed or removed,
in any thread, before it happens (audit events), and that is where a rank dies.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.train.distributed.ranks import environment, free_port

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["pipeline.cli.main", "pipeline.train.loop.trainer", "tests.train.distributed.faulty"])
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = {"os.rename": 1, "open": 0, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "shutil.rmtree": 0}
"""Events about files, and which of their arguments is the path: of a rename the new one."""

KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Instant:
    """When something happens to a rank: right before a call to the operating system, or to a function."""

    event: str = ""
    """"os.rename", "open" (to write), "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"; any of them if empty."""
    path: str = ""
    """A regular expression that is searched for in the path; of a rename, in the new one."""
    function: str = ""
    """In place of both: `module:Class.function`."""
    number: int = 1
    """The first one of these is 1."""
    after: Instant | None = None
    """They count from this instant on."""
    last: int | None = None
    """What comes more than once happens up to this number; by default once."""


@dataclass(frozen=True)
class Fault:
    """What happens then."""

    at: Instant
    error: int | None = None
    """The number of the error that the call fails with; by default the process is killed."""
    touch: Path | None = None
    """A file that is made instead, and the call goes on."""
    stop: bool = False
    """Whether the process stops then, until it gets SIGCONT."""


class Start:
    """A start of `pipeline train` on several ranks. A context manager, which leaves no process behind.

    Args:
        file: the run file.
        run: the run folder; the output of each rank is in the folder `RUN.out` beside it.
        world: how many ranks.
        values: overrides.
        faults: what happens to which rank.
        variables: more of the environment.
        host: what the ranks take for the name of their machine.
    """

    def __init__(
        self,
        file: Path,
        run: Path,
        world: int,
        values: Sequence[str] = (),
        faults: Mapping[int, Fault] | None = None,
        variables: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> None:
        self.run = run
        folder = run.with_name(f"{run.name}.out")
        folder.mkdir(exist_ok=True)
        number = len(list(folder.iterdir())) + 1
        words = ["pipeline", "train", str(file), f"run.dir={run}", *values]
        port = free_port()
        self._outs, self.processes = [], []
        for rank in range(world):
            out = folder / f"{number:03d}-rank-{rank}.txt"
            out.touch()
            self._outs.append(out)
            places = {**environment(rank, world, port), **(variables or {})}
            arguments = (words, out, places, (faults or {}).get(rank), host)
            process = _SERVER.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            self.processes.append(process)

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def kill(self, rank: int) -> None:
        """SIGKILL from outside; one that has ended already is let be."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid or 0, signal.SIGKILL)

    def running(self) -> bool:
        """Whether all ranks still do."""
        return all(process.exitcode is None for process in self.processes)

    def wait(self, timeout: float = 300) -> list[int]:
        """Exit codes by rank, when all have ended by themselves; minus the signal of one that was killed."""
        until = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            assert process.exitcode is not None, f"{process.name} still runs{self.said()}"
        return [process.exitcode for process in self.processes]

    def said(self) -> str:
        """What the ranks have printed."""
        return "".join(f"\n--- {out.name}\n{out.read_text(errors='replace')}" for out in self._outs)

    def text(self, rank: int = 0) -> str:
        """What a rank has printed, lines joined."""
        return " ".join(self._outs[rank].read_text(errors="replace").split())


def _rank(words: list[str], out: Path, places: dict[str, str], fault: Fault | None, host: str | None) -> None:
    # Its own group, so that a Ctrl-C in the terminal of the tests is theirs alone.
    os.setpgid(0, 0)
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(places)
    if host is not None:
        socket.gethostname = lambda: host
    if fault is not None:
        run = next(word.removeprefix("run.dir=") for word in words if word.startswith("run.dir="))
        _arm(fault, run)
    from pipeline.cli.main import main

    sys.argv = words
    main()


def _arm(fault: Fault, run: str) -> None:
    """Let it happen in this process."""

    def happen() -> None:
        if fault.touch is not None:
            fault.touch.touch()
            if fault.stop:
                os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.error is not None:
            raise OSError(fault.error, os.strerror(fault.error))
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(fault.at, run, happen)


def _watch(at: Instant, run: str, happen: Callable[[], None]) -> None:
    """Call `happen` at an instant."""
    if at.after is not None:
        first = replace(at, after=None)
        _watch(at.after, run, lambda: _watch(first, run, happen))
        return
    seen, lock = 0, threading.Lock()

    def here() -> None:
        nonlocal seen
        with lock:
            seen += 1
            number = seen
        if at.number <= number <= (at.last or at.number):
            happen()

    if at.function:
        _wrap(at.function, here)
        return

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _PATHS or (at.event and event != at.event):
            return
        path = arguments[_PATHS[event]]
        if event == "open" and (not isinstance(path, str) or not int(arguments[2]) & _WRITING):
            return
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        # What is removed with a folder is told of by its name alone.
        inside = text.startswith(run) or not os.path.isabs(text)
        if inside and re.search(at.path, text):
            here()

    sys.addaudithook(hook)


def _wrap(name: str, before: Callable[[], None]) -> None:
    module, path = name.split(":")
    *owners, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, last)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    setattr(owner, last, wrapped)
