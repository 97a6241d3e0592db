"""Identity of the process behind a pid, and whether it still runs.

A pid means something in its kernel and namespace alone, and is used again: the start time tells two processes apart.
"""

from __future__ import annotations

import os
import socket
import time
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

_DEAD = "ZXx"
"""States of a process that has ended; its parent has not asked how yet, which some never do (PID 1 of containers)."""
_SLACK = 2.0
"""Seconds: the kernel rounds the start of a process."""


@cache
def boot() -> str:
    """Id of the running kernel, which tells machines apart better than their names; "" if not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def namespace() -> str:
    """Namespace of pids: containers of one machine do not see each other's processes; "" if not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@cache
def pid_space() -> str:
    """Eight characters that all processes share whose pids can be looked up from here, and no others."""
    return xxhash.xxh3_64_hexdigest(f"{boot() or socket.gethostname()} {namespace()}".encode())[:8]


def node_name() -> str:
    """As the scheduler names this machine, which people then ask it about; else as the machine calls itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def process(pid: int) -> tuple[str, int] | None:
    """State and start time of a process (proc(5), fields 3 and 22); None if they cannot be read."""
    try:
        values = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return values[0].decode(), int(values[19])
    except (OSError, IndexError, ValueError):
        return None


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks after boot; None if none runs under this pid, or that cannot be read."""
    found = process(pid)
    return found[1] if found is not None and is_alive(found) else None


def is_alive(found: tuple[str, int]) -> bool:
    """Tell whether what `process` gave is that of a process that has not ended."""
    return found[0] not in _DEAD


def runs(pid: int) -> bool:
    """Tell whether a process has this pid, also one of another user that may not be looked at."""
    found = process(pid)
    if found is not None:
        return is_alive(found)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def ran_at(host: str, pid: int, moment: float) -> bool | None:
    """Tell whether the process that had this pid at a time still runs; None if that cannot be known from this machine.

    Args:
        host: its machine.
        pid: its number there.
        moment: in seconds since 1970.
    """
    if host != socket.gethostname():
        return None
    start = start_time(pid)
    if start is None:
        return False
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + start / os.sysconf("SC_CLK_TCK") <= moment + _SLACK


def identity() -> dict[str, Any]:
    """Facts that tell this process apart from every other one, also from a later one with the same pid."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": boot(),
        "namespace": namespace(),
        "pid": pid,
        "started": start_time(pid),
    }
