"""Processes of this node that read a copy of a dataset, each with the step that it is at.

Below the copy, `readers/` has a file for each, whose lock ends with the process. `evicted.jsonl` has the parts whose
tokens were removed: who has one open closes it, so that the disk gets its space back.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pipeline.common import storage
from pipeline.common.file_lock import open_lock_file

READERS = "readers"
EVICTED_FILE = "evicted.jsonl"
_STEP_BYTES = 8


@dataclass(frozen=True)
class LiveReader:
    """A process that reads a copy.

    Attributes:
        run: folder of its run.
        dp_rank: its data-parallel rank.
        step: that it reads, or is about to.
    """

    run: str
    dp_rank: int
    step: int


class NodeReader:
    """This process as a reader of a copy, until it is closed or the process ends.

    Args:
        folder: of the copy.
        run: folder of the run.
        dp_rank: data-parallel rank of this process.
        step: the first one that it reads.
        forget: called with the names of parts whose tokens were removed.
    """

    def __init__(
        self, folder: Path, run: Path, dp_rank: int, step: int, forget: Callable[[list[str]], object] | None = None
    ) -> None:
        (folder / READERS).mkdir(mode=0o700, exist_ok=True)
        self._path = folder / READERS / f"{os.getpid()}-{os.urandom(4).hex()}"
        self._evicted, self._forget = folder / EVICTED_FILE, forget
        self._seen = _size(self._evicted)
        waiting = storage.temporary(self._path)
        self._file = open_lock_file(waiting)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.pwrite(self._file, orjson.dumps({"run": str(run), "dp_rank": dp_rank}), _STEP_BYTES)
        self._note(step)
        # Only now can others see it, and whether it is locked.
        os.rename(waiting, self._path)

    def at(self, step: int) -> None:
        """Note the step that is read now, and hear of parts that were removed."""
        self._note(step)
        if self._forget is not None and (size := _size(self._evicted)) > self._seen:
            with open(self._evicted, "rb") as file:
                file.seek(self._seen)
                lines = file.read(size - self._seen).splitlines()
            self._seen = size
            self._forget([row["file"] for line in lines if (row := storage.json_object(line)) is not None])

    def _note(self, step: int) -> None:
        os.pwrite(self._file, step.to_bytes(_STEP_BYTES, "little"), 0)

    def close(self) -> None:
        """Read it no more."""
        if (file := self.__dict__.pop("_file", None)) is not None:
            with suppress(FileNotFoundError):
                self._path.unlink()
            os.close(file)

    def __del__(self) -> None:
        self.close()


def live_readers(folder: Path) -> Iterator[LiveReader]:
    """The processes that read a copy; what others left that were killed is removed."""
    if not (folder / READERS).is_dir():
        return
    for path in sorted((folder / READERS).iterdir()):
        if path.name.startswith("."):
            storage.remove_if_stale(path)
            continue
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            data = os.pread(file, storage.SMALL_BYTES, 0)
            about: dict[str, Any] = storage.json_object(data[_STEP_BYTES:]) or {}
            step = int.from_bytes(data[:_STEP_BYTES], "little")
            yield LiveReader(about.get("run", ""), about.get("dp_rank", 0), step)
        finally:
            os.close(file)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
