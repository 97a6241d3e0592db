"""Commits of a mirror: what makes the files of a checkpoint in object storage count.

The files of a try lie under `MIRROR/step-00001000/UPLOAD/`, a name that nobody else writes to. When all of them are
there, `MIRROR/step-00001000/COMMIT` is created, which names them. A checkpoint is in the mirror if and only if this
object is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.train.checkpoint.committed import COMMIT, Files

FORMAT = 1
_UPLOAD = re.compile(r"\d{6,12}-[0-9a-f]{8}")


@dataclass(frozen=True)
class MirrorCommit:
    """A checkpoint in a mirror, as its `COMMIT` there has it."""

    step: int
    run: str
    """Id of the run."""
    generation: int
    """Number of the start, or rewind, of the run that has uploaded it; grows from one to the next."""
    began: int
    """Step at which that one began: what older ones have uploaded of later steps was abandoned."""
    upload: str
    """Name of the folder with its files."""
    time: float
    """Time of the commit, in seconds since 1970."""
    files: Files
    """Files of the checkpoint, `COMMIT` of the run folder among them."""
    run_files: Files
    """Files of the run folder as they were at that time."""

    def to_bytes(self) -> bytes:
        """The content of the object."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return orjson.dumps({"format": FORMAT, **values}, option=orjson.OPT_INDENT_2)

    @property
    def size(self) -> int:
        """Bytes of the files of the checkpoint."""
        return sum(size for size, _ in self.files.values())


def parse_commit(data: bytes, name: str) -> MirrorCommit:
    """The content of a `COMMIT`.

    Args:
        data: of the object.
        name: its URL, for messages.

    Raises:
        UserError: it is damaged, or another program's.
    """
    try:
        values = orjson.loads(data)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("it has another format")
        found = MirrorCommit(
            **{key: _whole(values[key]) for key in ("step", "generation", "began")},
            run=str(values["run"]),
            upload=str(values["upload"]),
            time=float(values["time"]),
            files=_files(values["files"], name),
            run_files=_files(values["run_files"], name),
        )
        if not _UPLOAD.fullmatch(found.upload):
            raise ValueError("its upload has no name of ours")
        if COMMIT not in found.files:
            raise ValueError(f"it does not list {COMMIT}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{name} is damaged: {storage.shown(str(error))}") from None
    return found


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("a number in it is none")
    return value


def _files(values: Mapping[str, Any], name: str) -> Files:
    return {storage.plain_name(key, Path(name)): (_whole(size), str(digest)) for key, (size, digest) in values.items()}


def upload_name(generation: int, token: str) -> str:
    """The name of the folder of a start's files, which is in no other one's keys."""
    return f"{generation:06d}-{token}"


def generation_of(upload: str) -> int | None:
    """The generation in the name of a folder of files; None for any other name."""
    return int(upload.partition("-")[0]) if _UPLOAD.fullmatch(upload) else None


def current_line(commits: Iterable[MirrorCommit]) -> list[MirrorCommit]:
    """The commits that descend from one another up to the newest one, by step.

    A run that went back to an earlier checkpoint has abandoned what it had uploaded of later steps. The newest one is
    that of the highest step of the highest generation.
    """
    limit, line = math.inf, list[MirrorCommit]()
    by_generation = sorted(commits, key=lambda each: each.generation, reverse=True)
    for _, same in itertools.groupby(by_generation, key=lambda each: each.generation):
        found = list(same)
        line += [each for each in found if each.step <= limit]
        limit = min(limit, *(each.began for each in found))
    return sorted(line, key=lambda each: each.step)
