"""An object as a file that is read from a place on: ranges are asked for ahead, and what was read may be kept."""

from __future__ import annotations

import io
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import IO, TYPE_CHECKING, NamedTuple

import xxhash

from pipeline.common.objects.stored import StoredObject
from pipeline.common.storage import naming

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_FIRST_BYTES = 2**18
"""Bytes of the first request; each further one has twice as many, so that a look at the beginning fetches little."""
_BEHIND_BYTES = 2**16
"""Bytes of a request behind `stop`, for the rest of a line."""
_HELD_BYTES = 2**25
"""Kept bytes above which they lie on disk, in the folder for temporary files."""


@lru_cache(maxsize=4)
def reading_pool(count: int) -> ThreadPoolExecutor:
    """Threads of this process that wait for answers, of a number."""
    return ThreadPoolExecutor(count, thread_name_prefix="objects")


class _Ahead(NamedTuple):
    """A range that was asked for."""

    start: int
    end: int
    data: Future[bytes]


class ObjectFile(io.RawIOBase):
    """An object as a file for reading, with a place in it. How bytes come is a subclass's.

    Args:
        stored: the object.
    """

    def __init__(self, stored: StoredObject) -> None:
        self._stored = stored
        self._at = 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It has places."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; nothing is asked for before it is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.size}[whence]
        self._at = max(0, base + offset)
        return self._at


class ObjectStream(ObjectFile):
    """An object as a file for reading.

    Requests grow while it is read on, up to `concurrency` of `request_bytes`; a seek to another place begins anew.

    Args:
        stored: the object.
        stop: about where reading will end; ranges behind it are not asked for ahead.
        keeps: whether what was read is kept, so that it is read again from there. `keep_from` says what may go.
        small: most bytes of a request, for a look at one place.
    """

    def __init__(
        self, stored: StoredObject, stop: int | None = None, *, keeps: bool = False, small: int | None = None
    ) -> None:
        super().__init__(stored)
        self._stop = stored.size if stop is None else min(stop, stored.size)
        self._largest = min(small or 2**62, stored.access.request_bytes)
        self._width = 1 if small else stored.access.concurrency
        self._abandoned = threading.Event()
        self._ahead: deque[_Ahead] = deque()
        self._data = memoryview(b"")
        self._data_at = 0
        self._kept = _Kept() if keeps else None
        self._restart(0)

    def _restart(self, at: int) -> None:
        """Forget what was asked for, and begin at another place."""
        self._cancel()
        self._data, self._data_at = memoryview(b""), at
        self._next = at
        self._size = min(_FIRST_BYTES, self._largest)
        self._open = 1

    def _cancel(self) -> None:
        self._abandoned.set()
        for each in self._ahead:
            each.data.cancel()
        self._ahead.clear()
        self._abandoned = threading.Event()

    def keep_from(self, at: int) -> None:
        """Keep what was and is read from a place on, and nothing before it."""
        if self._kept is not None:
            self._kept.drop_before(at)

    def kept_hash(self) -> str | None:
        """Hash (xxh3-128) of what is kept; None if nothing is."""
        return None if self._kept is None else self._kept.hash()

    def fetch_again(self, at: int) -> bool:
        """Forget what was kept, and go to a place, whose bytes are asked for anew; False if nothing is kept.

        For bytes that turned out to be wrong: a second answer tells whether the first one or the object is damaged.
        """
        if self._kept is None:
            return False
        self._kept.drop_before(2**62)
        self._kept = _Kept(at)
        self._restart(at)
        self._at = at
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer with some of the next bytes; 0 at the end.

        Raises:
            UserError: the object has changed, or cannot be read.
        """
        target = memoryview(buffer).cast("B")
        if not target or self._at >= self._stored.size:
            return 0
        if self._kept is not None and self._kept.has(self._at):
            count = self._kept.readinto(target, self._at)
        else:
            data = self._some(len(target))
            count = len(data)
            target[:count] = data
            if self._kept is not None:
                self._kept.add(self._at, data)
        self._at += count
        return count

    def _some(self, most: int) -> memoryview:
        """Some of the bytes at the present place, from the answers."""
        start = self._at - self._data_at
        if not 0 <= start < len(self._data):
            if self._at != self._data_at + len(self._data) or (not self._ahead and self._next != self._at):
                self._restart(self._at)
            self._ask()
            got = self._ahead.popleft()
            self._data, self._data_at = memoryview(got.data.result()), got.start
            self._ask()
            start = 0
        return self._data[start : start + most]

    def _ask(self) -> None:
        """Ask for the next ranges, as far ahead as reading on has earned."""
        pool = reading_pool(self._stored.access.concurrency)
        while self._next < self._stored.size and len(self._ahead) < self._open:
            if self._next >= self._stop:
                if self._ahead or self._next > self._at:
                    return
                size = min(_BEHIND_BYTES, self._largest)
            else:
                size = min(self._size, self._stop - self._next)
                self._size = min(2 * self._size, self._largest)
            end = min(self._next + size, self._stored.size)
            self._ahead.append(
                _Ahead(self._next, end, pool.submit(self._stored.read, self._next, end, self._abandoned))
            )
            self._next = end
            if self._size == self._largest:
                self._open = min(self._open + 1, self._width)

    def close(self) -> None:
        """Give up what was asked for."""
        if not self.closed:
            self._cancel()
            self._data = memoryview(b"")
            if self._kept is not None:
                self._kept.close()
        super().close()


class _Kept:
    """Bytes of an object from a place on that were read, in memory or a temporary file.

    Args:
        at: place of the first byte.
    """

    def __init__(self, at: int = 0) -> None:
        self._start = self._end = at
        self._file = self._new()

    def _new(self) -> IO[bytes]:
        return tempfile.SpooledTemporaryFile(_HELD_BYTES)

    def has(self, at: int) -> bool:
        """Tell whether the byte of a place is kept."""
        return self._start <= at < self._end

    def add(self, at: int, data: memoryview) -> None:
        """Keep bytes that were read, if they follow those that are."""
        if at != self._end:
            return
        with naming(tempfile.gettempdir()):
            self._file.seek(self._end - self._start)
            self._file.write(data)
        self._end += len(data)

    def readinto(self, target: memoryview, at: int) -> int:
        """Fill a buffer from a place on."""
        self._file.seek(at - self._start)
        data = self._file.read(min(len(target), self._end - at))
        target[: len(data)] = data
        return len(data)

    def hash(self) -> str:
        """Hash of the bytes, with their place."""
        digest = xxhash.xxh3_128(str(self._start).encode())
        self._file.seek(0)
        while block := self._file.read(2**20):
            digest.update(block)
        return digest.hexdigest()

    def drop_before(self, at: int) -> None:
        """Forget what lies before a place."""
        if at <= self._start:
            return
        rest = b""
        if at < self._end:
            self._file.seek(at - self._start)
            rest = self._file.read()
        self._file.close()
        self._file = self._new()
        self._start, self._end = at, max(at, self._end)
        self._file.write(rest)

    def close(self) -> None:
        """Remove it."""
        self._file.close()
