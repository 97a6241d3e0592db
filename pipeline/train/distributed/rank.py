"""The place of this process in a run, its end with its launcher, and the file that tells the launcher why it failed.

Nothing here needs torch, whose import takes seconds in which a process may have to end already.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common import process_identity, storage
from pipeline.common.errors import EXIT_OTHER, RankFailed, Stopped, UserError, exit_code
from pipeline.common.redaction import masked

LAUNCHER = "PIPELINE_LAUNCHER"
"""Environment variable in the ranks that our own launcher starts: its process id."""
STORE = "PIPELINE_STORE"
"""Environment variable beside it: the file through which the ranks find one another, in a folder of this user alone."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
NODE_ERRORS = "PIPELINE_NODE_ERRORS"
"""Environment variable in the ranks that SLURM starts: a file per node, to which each adds a line when it fails."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when the thread that started it ends."""


@dataclass(frozen=True)
class Processes:
    """The place of this process among those of the run; all nodes have the same number of them."""

    rank: int
    world_size: int
    local_rank: int
    """Its number on this node."""
    local_world_size: int
    """Processes on this node."""

    @property
    def is_one_machine(self) -> bool:
        """True if all processes of the run are on this node."""
        return self.world_size == self.local_world_size


def is_rank() -> bool:
    """True if a launcher (ours, torchrun) started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def of_environment() -> Processes:
    """The place that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE name; a single process if none is set.

    Raises:
        UserError: some of them are missing, or they contradict one another.
    """
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    if not given:
        return Processes(0, 1, 0, 1)
    found = ", ".join(f"{name}={value}" for name, value in given.items())
    advice = "start the processes with torchrun or launch.processes, or unset " + ", ".join(given)
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise UserError(f"the environment has {found}, but not {', '.join(missing)}; {advice}")
    try:
        rank, world, local_rank, local_world = (int(given[name]) for name in _NAMES)
    except ValueError:
        raise UserError(f"the environment has {found}, which must be whole numbers; {advice}") from None
    problems = [
        text
        for wrong, text in (
            (not 0 <= rank < world, "RANK must be from 0 to WORLD_SIZE - 1"),
            (not 0 <= local_rank < local_world, "LOCAL_RANK must be from 0 to LOCAL_WORLD_SIZE - 1"),
            (local_world > world, "LOCAL_WORLD_SIZE cannot be above WORLD_SIZE"),
        )
        if wrong
    ]
    if not problems and world % local_world:
        problems = ["WORLD_SIZE must be a multiple of LOCAL_WORLD_SIZE, the same number of processes on every node"]
    elif not problems and rank % local_world != local_rank:
        problems = ["ranks must be counted node by node (RANK = number of the node x LOCAL_WORLD_SIZE + LOCAL_RANK)"]
    if problems:
        raise UserError(f"the environment has {found}: {'; '.join(problems)}; {advice}")
    return Processes(rank, world, local_rank, local_world)


def begin_rank() -> None:
    """Prepare a rank of our launcher, before all else; nothing under torchrun.

    The kernel will end it when the launcher is gone, however that ended. Its log takes both streams in order.
    """
    # Children of a rank inherit the variable, but not the parent.
    launcher = os.environ.get(LAUNCHER, "")
    if not launcher.isdecimal() or not is_rank():
        return
    end_with(int(launcher))
    if os.environ.get("RANK") != "0":
        # torch opens the log once for each stream, and each would write over the other's lines.
        os.lseek(1, 0, os.SEEK_END)
        fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_APPEND)
        os.dup2(1, 2)


def end_with(parent: int) -> None:
    """Let the kernel end this process when the thread of its parent that has started it is gone, however that ended.

    Args:
        parent: Its process id.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the line above
        os._exit(EXIT_OTHER)


@dataclass(frozen=True)
class ErrorRecord:
    """The record that a rank has left of its failure."""

    time: float
    """Seconds since 1970."""
    code: int
    message: str
    traceback: str
    """Empty where the message says it all: a `UserError`, a stop."""
    consequence: bool
    """True if another process failed first, and this one failed because of that."""
    was_shown: bool
    """True if the rank has shown the message itself, on the terminal."""
    host: str = ""
    """Its node, as the scheduler names it."""


def record_error(error: BaseException, trace: str | None = None) -> None:
    """Write the error to the file of this rank, if it has one that is empty, or to its node's.

    Args:
        error: What is about to end this process.
        trace: In place of the error's own traceback, text.
    """
    file, shared = os.environ.get(_ERROR_FILE), os.environ.get(NODE_ERRORS)
    if not shared and (not file or os.path.exists(file)):
        return
    expected = isinstance(error, (UserError, Stopped, RankFailed, OSError, KeyboardInterrupt))
    if trace is None:
        trace = "" if expected else "".join(traceback.format_exception(error))
    name = type(error).__name__
    message, trace = masked((str(error) or name) if expected else f"{name}: {error}"), masked(trace)
    now = time.time()
    data = {
        # The form that torch's agent reads; what it has no place for follows.
        "message": {"message": message, "extraInfo": {"py_callstack": trace or message, "timestamp": str(int(now))}},
        "time": now,
        "host": process_identity.node_name(),
        "pid": os.getpid(),
        "rank": os.environ.get("RANK", "0"),
        "exit_code": exit_code(error),
        "traceback": trace,
        "consequence": is_consequence(error),
        "said": os.environ.get("RANK") == "0",
    }
    with suppress(OSError):  # a full disk, say; the exit code and the log still tell
        if shared:
            storage.append_line(Path(shared), json.dumps(data).encode())
        elif file:
            temporary = f"{file}.{os.getpid()}.tmp"
            Path(temporary).write_text(json.dumps(data, indent=1))
            os.replace(temporary, file)


def log_folder() -> Path | None:
    """The folder of the ranks' logs by our own launcher; None where another one has started this process."""
    file = os.environ.get(_ERROR_FILE)
    return Path(file).parent if file and LAUNCHER in os.environ else None


def read_error(file: Path) -> ErrorRecord | None:
    """The error file of a rank, or None where it left none."""
    try:
        return _record(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_errors(file: Path) -> dict[int, ErrorRecord]:
    """The first line of each rank in a file of many; none of a file that cannot be read."""
    found: dict[int, ErrorRecord] = {}
    with suppress(OSError):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # cut short by a full disk
                found.setdefault(int(json.loads(line)["rank"]), _record(line))
    return found


def _record(text: bytes) -> ErrorRecord:
    data = json.loads(text)
    return ErrorRecord(
        time=float(data["time"]),
        code=int(data["exit_code"]),
        message=str(data["message"]["message"]),
        traceback=str(data["traceback"]),
        consequence=bool(data["consequence"]),
        was_shown=bool(data["said"]),
        host=str(data.get("host", "")),
    )


def is_consequence(error: BaseException) -> bool:
    """True if an error comes from another process that has failed: a connection that was lost, or `RankFailed`.

    A network that fails by itself looks the same.
    """
    return not isinstance(error, UserError) and any(
        isinstance(cause, RankFailed) or _is_network(cause) for cause in _cause_chain(error)
    )


def _is_network(error: BaseException) -> bool:
    # Known by name, so that torch need not be imported to ask. gloo raises plain RuntimeErrors that name its sources.
    named = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    text = str(error)
    return named or "gloo/transport" in text or "NCCL error" in text


def _cause_chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
