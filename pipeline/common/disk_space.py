"""Room on a disk."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.common.format import size


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
