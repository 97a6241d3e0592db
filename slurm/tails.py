"""The ends of log files, whatever their size: the last lines, and what comes after them."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import BinaryIO

from pipeline.data import store

_BLOCK = 2**16
"""Bytes that are read at once."""


def last_lines(file: Path, lines: int) -> list[str]:
    """The last lines of a file, or all of them with 0; none of a file that cannot be read.

    Bytes that are no UTF-8 are replaced.
    """
    try:
        with store.open_regular(file) as opened:
            opened.seek(_start_of(opened, lines))
            data = opened.read()
    except OSError:
        return []
    found = data.decode(errors="replace").split("\n")
    return found[:-1] if found[-1] == "" else found


def _start_of(file: BinaryIO, lines: int) -> int:
    """The place at which the last lines begin; 0 lines mean all."""
    place = end = file.seek(0, os.SEEK_END)
    if lines == 0:
        return 0
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
    """What is written to a file from now on, or from its last lines on, also if it is replaced or not there yet.

    Args:
        file: it.
        lines: so many of the last ones come first; 0: all.
    """

    def __init__(self, file: Path, lines: int = 0) -> None:
        self._file = file
        self._lines = lines
        self._opened: BinaryIO | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """What has come since the last time, at most some megabytes of it; "" if there is nothing."""
        try:
            if self._opened is None or self._replaced():
                self._open()
        except OSError:
            if self._opened is None:
                return ""
        assert self._opened is not None
        data = self._opened.read(64 * _BLOCK)
        return self._decoder.decode(data)

    def close(self) -> None:
        """No more is read."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _open(self) -> None:
        opened = store.open_regular(self._file)
        first = self._opened is None
        self.close()
        self._opened = opened
        # One that takes the place of another is new as a whole.
        opened.seek(_start_of(opened, self._lines) if first else 0)

    def _replaced(self) -> bool:
        """Whether another file has the name now, or the same one was cut off; what was left to read of it is lost."""
        assert self._opened is not None
        now, ours = self._file.stat(), os.fstat(self._opened.fileno())
        return (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino) or now.st_size < self._opened.tell()
