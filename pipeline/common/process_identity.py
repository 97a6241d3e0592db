"""Which kernel and which namespace of pids this process lives in: only there does its pid mean anything."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

import xxhash


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
