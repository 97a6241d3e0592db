"""The ends of log files, whatever their size: the last lines, and what comes after them."""

from __future__ import annotations

import codecs
import io
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pipeline.common import storage

_BLOCK = 2**16
"""Bytes that are read at once."""


def last_lines(file: Path, lines: int, rank: int | None = None) -> list[str]:
    """The last lines of a file, or all of them with 0; none of a file that cannot be read.

    Bytes that are not UTF-8 are replaced.

    Args:
        file: it.
        lines: how many.
        rank: only lines of this rank, in a file whose lines begin with theirs, as `srun --label` writes them.
    """
    label = None if rank is None else _label(rank)
    try:
        with storage.open_regular(file) as opened:
            opened.seek(_start_of(opened, lines, label))
            data = _without(label, opened.read())
    except OSError:
        return []
    found = data.decode(errors="replace").split("\n")
    return found[:-1] if found[-1] == "" else found


def _label(rank: int) -> re.Pattern[bytes]:
    return re.compile(rb" *0*%d: " % rank)


def _without(label: re.Pattern[bytes] | None, data: bytes) -> bytes:
    """The lines with a label, without it."""
    if label is None:
        return data
    found = [(label.match(line), line) for line in io.BytesIO(data)]  # which ends lines at newlines alone
    return b"".join(line[begin.end() :] for begin, line in found if begin)


def _start_of(file: BinaryIO, lines: int, label: re.Pattern[bytes] | None = None) -> int:
    """The place at which the last lines begin; 0 lines mean all."""
    if lines == 0:
        return 0
    if label is not None:
        at, places = 0, deque[int](maxlen=lines)
        for line in file:
            if label.match(line):
                places.append(at)
            at += len(line)
        return places[0] if places else at
    place = end = file.seek(0, os.SEEK_END)
    missing = lines
    while place > 0:
        size = min(_BLOCK, place)
        place -= size
        file.seek(place)
        block = file.read(size)
        found = len(block)
        while (found := block.rfind(b"\n", 0, found)) >= 0:
            if place + found == end - 1:  # the last line's own
                continue
            missing -= 1
            if missing == 0:
                return place + found + 1
    return 0


class Tail:
    """The end of a file as it grows, from now or from its last lines on, also if it is replaced or not there yet.

    Args:
        file: it.
        lines: number of last lines that come first; 0: all.
        rank: see `last_lines`.
    """

    def __init__(self, file: Path, lines: int = 0, rank: int | None = None) -> None:
        self._file = file
        self._lines = lines
        self._opened: BinaryIO | None = None
        self._label = None if rank is None else _label(rank)
        self._rest = b""
        """With a label: the beginning of a line."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """New text since the last call, at most some megabytes of it; "" if there is nothing."""
        try:
            if self._opened is None or self._replaced():
                self._open()
        except OSError:
            if self._opened is None:
                return ""
        assert self._opened is not None
        while data := self._opened.read(64 * _BLOCK):
            if self._label is not None:
                whole, end, self._rest = (self._rest + data).rpartition(b"\n")
                data = _without(self._label, whole + end)
            if text := self._decoder.decode(data):
                return text
        return ""

    def close(self) -> None:
        """No more is read."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _open(self) -> None:
        opened = storage.open_regular(self._file)
        first = self._opened is None
        self.close()
        self._opened = opened
        # One that takes the place of another is new as a whole.
        opened.seek(_start_of(opened, self._lines, self._label) if first else 0)
        self._rest = b""

    def _replaced(self) -> bool:
        """True if another file has the name now, or the same one was truncated; what was left to read of it is lost."""
        assert self._opened is not None
        now, ours = self._file.stat(), os.fstat(self._opened.fileno())
        return (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino) or now.st_size < self._opened.tell()


class Tails:
    """The ends of several files, one after the other."""

    def __init__(self, tails: Sequence[Tail]) -> None:
        self._tails = tails

    def read(self) -> str:
        """See `Tail`."""
        return "".join(tail.read() for tail in self._tails)

    def close(self) -> None:
        """See `Tail`."""
        for tail in self._tails:
            tail.close()
