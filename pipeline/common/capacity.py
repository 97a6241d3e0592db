"""Memory and disk that processes of this machine can still get, and what there is in all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.format import size

_CACHED = ("active_file", "inactive_file")
"""Keys of `memory.stat`: files that are kept in memory as long as nobody needs it."""
_VERSIONS = {
    # Controller in /proc/self/cgroup -> its mount, limit, usage, prefix of the totals in memory.stat.
    "": ("unified", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


@dataclass(frozen=True)
class HostMemory:
    """Bytes, swap included."""

    free: int
    """Memory that processes could get now, with what the kernel keeps of files and would give back."""
    total: int
    """Memory that they could get if nothing else ran."""
    limited: bool
    """True if a cgroup (a container, a job) sets the limit, and not the machine."""


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Memory that is free and there, as the machine and the cgroups of this process limit it; None if not known.

    Args:
        root: where `proc` and `sys` are.
    """
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        known = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}
        free, total = known["MemAvailable"], known["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    limited = False
    for limit, used in _limits(root):
        free = min(free, max(0, limit - used))
        if limit < total:
            total, limited = limit, True
    return HostMemory(free + known.get("SwapFree", 0), total + known.get("SwapTotal", 0), limited)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and usage, without files that are kept in memory, of the cgroups of this process that have a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        name = "memory" if "memory" in controllers.split(",") else controllers
        if name not in _VERSIONS:
            continue
        mount, limit, usage, prefix = _VERSIONS[name]
        base = root / "sys/fs/cgroup"
        base = base / mount if (base / mount).is_dir() else base
        folder = base / path.strip("/")
        # A container sees its own cgroup at the root of the mount, whatever the path says.
        for place in (folder, *folder.parents):
            with suppress(OSError, ValueError, KeyError, IndexError):
                stat = dict(pair.split() for pair in (place / "memory.stat").read_text().splitlines())
                kept = sum(int(stat.get(prefix + key, 0)) for key in _CACHED)
                yield int((place / limit).read_text()), int((place / usage).read_text()) - kept
            if place == base:
                break


def free_space(path: Path) -> tuple[int, int | None]:
    """Bytes and inodes that this user may still use where a path is or would be; None: no number of inodes."""
    stat = os.statvfs(nearest(path))
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None


def nearest(path: Path) -> Path:
    """A path if it exists and can be seen, else the nearest folder above it that does."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def room_of(key: str, path: Path, free: int) -> str:
    """`run.dir=PATH has 3.1 GB free`, as messages about room begin."""
    return f"{key}={path} has {size(free)} free"
