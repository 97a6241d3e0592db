"""Partial copies of objects in temporary files, for formats that are read here and there."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING

from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.stream import ObjectFile, reading_pool
from pipeline.common.storage import naming

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LEAST_BYTES = 2**16
"""Bytes that are fetched where fewer are read."""


class PartialCopy(ObjectFile):
    """An object as a file of which the parts that were read lie on this machine, each fetched once.

    Args:
        stored: the object.
    """

    def __init__(self, stored: StoredObject) -> None:
        super().__init__(stored)
        self._abandoned = threading.Event()
        self._there: list[tuple[int, int]] = []
        """Ranges that were fetched, in order, none touching another."""
        with naming(tempfile.gettempdir()):
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with this one)
            os.ftruncate(self._file.fileno(), stored.size)

    def size(self) -> int:
        """Bytes of the object."""
        return self._stored.size

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer with the next bytes; 0 at the end.

        Raises:
            UserError: the object has changed, or cannot be read.
        """
        target = memoryview(buffer).cast("B")
        count = min(len(target), self._stored.size - self._at)
        if count <= 0:
            return 0
        self.need([(self._at, self._at + count)])
        done = os.preadv(self._file.fileno(), [target[:count]], self._at)
        self._at += done
        return done

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch what is missing of ranges, several at a time."""
        size, step = self._stored.size, self._stored.access.request_bytes
        wanted = []
        for begin, stop in ranges:
            start, end = max(0, begin), min(stop, size)
            for first, asked in self._missing(start, end):
                last = asked
                if last - first < _LEAST_BYTES:  # up to what is there by now
                    last = min(first + _LEAST_BYTES, self._begin_behind(first, size))
                wanted += [(at, min(at + step, last)) for at in range(first, last, step)]
                self._add(first, last)
        if not wanted:
            return
        try:
            if len(wanted) == 1:
                self._write(wanted[0][0], self._stored.read(*wanted[0]))
                return
            pool = reading_pool(self._stored.access.concurrency)
            pending, running = deque(wanted), deque[tuple[int, Future[bytes]]]()
            while pending or running:
                while pending and len(running) < self._stored.access.concurrency:
                    at, last = pending.popleft()
                    running.append((at, pool.submit(self._stored.read, at, last, self._abandoned)))
                at, data = running.popleft()
                self._write(at, data.result())
        except BaseException:
            self._there.clear()  # nobody knows which of them came
            self._abandoned.set()
            self._abandoned = threading.Event()
            raise

    def whole(self) -> mmap.mmap:
        """The file in memory; what `need` has not fetched is zeros."""
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def forget(self) -> None:
        """Give the disk back what was fetched; it is fetched anew if it is asked for again."""
        self._there.clear()
        os.ftruncate(self._file.fileno(), 0)
        os.ftruncate(self._file.fileno(), self._stored.size)

    def _write(self, at: int, data: bytes) -> None:
        with naming(tempfile.gettempdir()):
            view = memoryview(data)
            while view:
                count = os.pwrite(self._file.fileno(), view, at)
                view, at = view[count:], at + count

    def _missing(self, start: int, end: int) -> list[tuple[int, int]]:
        found = []
        for first, last in self._there:
            if last <= start or first >= end:
                continue
            if start < first:
                found.append((start, first))
            start = max(start, last)
        return [*found, (start, end)] if start < end else found

    def _begin_behind(self, at: int, size: int) -> int:
        """The beginning of the next range that is there."""
        index = bisect_right(self._there, (at, size))
        return self._there[index][0] if index < len(self._there) else size

    def _add(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._there, (start, end)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self._there = merged

    def close(self) -> None:
        """Remove it."""
        self._abandoned.set()
        self._file.close()
        super().close()
