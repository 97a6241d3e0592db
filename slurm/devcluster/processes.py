"""Processes of a development cluster: start one, know it again by its pid, end it, find those of its jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import MachineError
from slurm.record.tail import last_lines

_POLL = 0.05
"""Seconds between two looks at what is waited for."""
_TAIL = 15
"""Lines of a log that a message shows."""


@dataclass(frozen=True)
class _Stat:
    """Fields of `/proc/PID/stat`: `start` is in clock ticks since the boot, and tells a pid that is used again."""

    name: str
    state: str
    parent: int
    start: int


def start(command: Sequence[str], environment: Mapping[str, str], output: Path, pid_file: Path) -> int:
    """Start a daemon in a session of its own, note who it is in `pid_file` and return its pid."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        command[0],
        list(command),
        environment,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    stat = _stat(pid)
    pid_file.write_text(f"{pid} {stat.start if stat else 0}\n")
    return pid


def running(pid_file: Path) -> int | None:
    """The pid noted in the file if that very process is still there, else None."""
    try:
        pid, start_time = map(int, pid_file.read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    stat = _stat(pid)
    return pid if stat is not None and stat.start == start_time else None


def alive(pid: int) -> bool:
    return _stat(pid) is not None


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_stopped(pids: Iterable[int]) -> None:
    """Kill processes that are stopped, children before their parents.

    A process group that loses the parent of its leader while members are stopped is sent SIGHUP and continued: a batch
    process would note that it was told to end.
    """
    stats = {pid: stat for pid in pids if (stat := _stat(pid))}
    send(sorted(stats, key=lambda pid: (stats[pid].start, pid), reverse=True), signal.SIGKILL)


def end(pid: int, seconds: float) -> None:
    """End a process, and kill it after `seconds`.

    Raises:
        MachineError: the kernel does not let it die.
    """
    send([pid], signal.SIGTERM)
    if not _gone(pid, seconds):
        send([pid], signal.SIGKILL)
        if not _gone(pid, 10):
            raise MachineError(
                f"process {pid} does not end, even after SIGKILL; see what it waits for with `ps -o wchan {pid}`"
            )


def wait(ready: Callable[[], bool], what: str, pid: int, seconds: float, logs: Sequence[Path]) -> None:
    """Wait until a daemon is ready.

    Raises:
        MachineError: it has ended, or was not ready in time; with the last lines of the first of its logs that has any.
    """
    until = time.monotonic() + seconds
    while not ready():
        if not alive(pid) or time.monotonic() > until:
            trouble = f"was not ready after {seconds:.0f} s" if alive(pid) else "ended while it started"
            raise MachineError(f"{what} {trouble}.{tail(logs)}")
        time.sleep(_POLL)


def tail(logs: Iterable[Path]) -> str:
    """The last lines of the first of the files that has any, as the end of a message."""
    for log in logs:
        if lines := last_lines(log, _TAIL):
            return f" The end of {log}:\n" + "\n".join(lines)
    return ""


def of_jobs(slurm_conf: Path, cluster: str, node: str | None = None) -> list[int]:
    """Processes that jobs of this cluster have started, on one node or on all, by their environment."""
    found = []
    for pid in _pids():
        environment = _environment(pid)
        ours = environment.get("SLURM_CONF") == str(slurm_conf) or environment.get("SLURM_CLUSTER_NAME") == cluster
        if ours and "SLURM_JOB_ID" in environment and node in (None, environment.get("SLURMD_NODENAME")):
            found.append(pid)
    return found


def with_open(logs: Collection[Path], name: str) -> list[int]:
    """Processes of a program that have one of these files open.

    A `slurmstepd` is not a child of its `slurmd` and has written its title over its environment; the log of its node,
    which it writes to, is what tells whose it is.
    """
    wanted = {str(log) for log in logs}
    found = []
    for pid in _pids():
        stat = _stat(pid)
        if stat is None or stat.name != name:
            continue
        with suppress(OSError):
            if any(os.readlink(link) in wanted for link in Path(f"/proc/{pid}/fd").iterdir()):
                found.append(pid)
    return found


def with_descendants(pids: Iterable[int]) -> set[int]:
    """These and all that they have started, as far as the parents still live."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def _gone(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _stat(pid: int) -> _Stat | None:
    """None where there is no such process, or only the entry of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    stat = _Stat(name=name, state=fields[0], parent=int(fields[1]), start=int(fields[19]))
    if stat.state not in "ZX":
        return stat
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # ours to bury, if this process started it
    return None


def _environment(pid: int) -> dict[str, str]:
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    return {key: value for key, _, value in pairs}
