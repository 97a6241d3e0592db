"""Room on a disk, and whether the datasets of a run have it, before they are made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.common.format import size
from pipeline.config import Config
from pipeline.data.preprocess.source_plan import SourceFiles
from pipeline.data.preprocess.status import read_state

_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of text; a guess for English."""


def free_space(path: Path) -> tuple[int, int | None]:
    """Bytes and inodes that this user may still use where a path is or would be; None: no number of inodes."""
    stat = os.statvfs(nearest(path))
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None


def nearest(path: Path) -> Path:
    """A path if it exists and can be seen, else the nearest folder above it that does."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def dataset_warning(config: Config, sources: Sequence[SourceFiles], token_bytes: int) -> str | None:
    """Warning where the datasets will probably not fit on the disk of `data.dir`; None where they will.

    Nothing is read for it, so it is a guess, and refuses nothing.

    Args:
        config: The run.
        sources: What is tokenized.
        token_bytes: Bytes of a token on disk.
    """
    free, _ = free_space(config.data_dir)
    copies = 2 if config.data.preprocess.shuffle == "global" else 1
    needed = {source.source.name: copies * _TOKENS_PER_BYTE * token_bytes * source.text_bytes for source in sources}
    if sum(needed.values()) <= free:
        return None
    for state in read_state(config):
        if state.units:
            needed[state.name] = needed.get(state.name, 0.0) * (1 - state.done / state.units)
    if sum(needed.values()) <= free:
        return None
    return (
        f"{room_of('data.dir', config.data_dir, free)}, and the datasets will take about {size(sum(needed.values()))} "
        "more (estimated from the size of the files): free some space, or set data.dir to a folder on another disk"
    )


def room_of(key: str, path: Path, free: int) -> str:
    """`run.dir=PATH has 3.1 GB free`, as messages about room begin."""
    return f"{key}={path} has {size(free)} free"
