"""Objects that are written: files of any size under keys that one process writes, and small objects that many may try.

A store has no rename, and a request may have been done although its answer was lost. So a file goes under a key that
nobody else writes, where it may be sent again and again. What makes files count is one small object (a manifest, say)
that is created only where there is none: of many writers one wins, and all of them see who.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectChanged, ObjectMissing, StoreError, is_taken, kind_of
from pipeline.common.objects.retries import COUNTS, Abandoned, retrying
from pipeline.common.objects.stored import StoredObject, find_object, version_in
from pipeline.common.objects.stores import forget_store, load_obstore, open_store
from pipeline.common.objects.urls import ObjectUrl

_MOST_PIECES = 9_000
"""Pieces of an upload; stores refuse more than 10,000."""
_LEAST_PIECE = 5 * 2**20
"""Bytes of a piece; stores refuse smaller ones but for the last."""
_READ_BYTES = 2**20
SMALL_BYTES = 2**26
"""Most bytes of an object that is created, or read whole."""


class FileChanged(UserError):
    """A file whose bytes are not those that it should have. Nothing of it is to count."""


class Pace:
    """Bound of the bytes per second that all uploads of a process send together.

    Args:
        most: bytes per second; None for no bound.
    """

    def __init__(self, most: float | None) -> None:
        self._most = most
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int, abandoned: threading.Event) -> None:
        """Wait until that many bytes more may be sent.

        Raises:
            Abandoned: nobody waits for the upload any more.
        """
        pause = 0.0
        if self._most is not None:
            with self._lock:
                now = time.monotonic()
                pause = max(0.0, self._free_at - now)
                self._free_at = max(now, self._free_at) + count / self._most
        if abandoned.wait(pause) if pause else abandoned.is_set():
            raise Abandoned


def put_file(
    path: Path,
    url: ObjectUrl,
    access: RemoteAccess,
    *,
    new_hash: Callable[[], Any] = xxhash.xxh3_128,
    expected: str | None = None,
    pace: Pace | None = None,
    abandoned: threading.Event | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[StoredObject, str]:
    """Write a file as an object, over one that is there. It is visible when all of it has come.

    Args:
        path: of the file.
        url: of the object; nobody else writes it.
        access: settings.
        new_hash: makes the hash of the file (xxhash).
        expected: hexadecimal hash that the file must have.
        pace: bound of bytes per second.
        abandoned: set when the upload is to be given up.
        advance: called with bytes that were read; with a negative number when they are sent again.

    Returns:
        The object, and the hash of the bytes that were sent.

    Raises:
        FileChanged: the file has another hash or size than it should.
        UserError: it cannot be written; the message says what can be done.
        Abandoned: the upload was given up.
        OSError: the file cannot be read.
    """
    stop = abandoned or threading.Event()
    with storage.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        upload = _Upload(path, file, size, new_hash, expected, pace or Pace(None), stop, advance)
        if not size:
            list(upload)  # nothing is sent, and the hash is compared all the same

        def request() -> Any:
            upload.begin()
            options: dict[str, Any] = {}
            if size:
                piece = max(access.request_bytes, _LEAST_PIECE, math.ceil(size / _MOST_PIECES))
                options = {
                    "use_multipart": size > piece,
                    "chunk_size": piece,
                    "max_concurrency": access.concurrency,
                }
            try:
                return load_obstore().put(
                    open_store(url, access, writes=True), url.key, upload if size else b"", **options
                )
            except Exception:
                if upload.failure is None:
                    raise
                return None  # it is the file that fails

        # A large file goes in pieces, each of which the library sends again; so this is for what outlasts that.
        renew = partial(forget_store, url, access)
        done = retrying(request, url, "write", access, renew=renew, abandoned=stop)
        if upload.failure is not None:
            raise upload.failure
        # It is read once: files that are in use should stay in memory instead.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return StoredObject(url, size, version_in(url, done), access), upload.digest.hexdigest()


class _Upload:
    """The bytes of a file on their way; the hash is of those that were given on last."""

    def __init__(
        self,
        path: Path,
        file: IO[bytes],
        size: int,
        new_hash: Callable[[], Any],
        expected: str | None,
        pace: Pace,
        stop: threading.Event,
        advance: Callable[[int], object],
    ) -> None:
        self._path, self._file, self._size = path, file, size
        self._new_hash, self._expected = new_hash, expected
        self._pace, self._stop, self._advance = pace, stop, advance
        self.sent = 0
        self.failure: BaseException | None = None
        self.digest = new_hash()

    def begin(self) -> None:
        """Begin anew."""
        self._advance(-self.sent)
        self._file.seek(0)
        self.sent, self.digest, self.failure = 0, self._new_hash(), None

    def __iter__(self) -> Iterator[bytes]:
        try:
            # A file that grows meanwhile is not followed.
            while data := self._file.read(min(_READ_BYTES, self._size - self.sent)):
                self._pace.wait(len(data), self._stop)
                self.digest.update(data)
                self.sent += len(data)
                COUNTS.count(written=len(data))
                self._advance(len(data))
                yield data
            found = self.digest.hexdigest()
            if self.sent != self._size or self._expected not in (None, found):
                raise FileChanged(
                    f"{self._path} is not the file that it should be: it has {self.sent:,} bytes, and the hash {found}"
                )
        except BaseException as error:
            self.failure = error
            raise


def create_object(url: ObjectUrl, data: bytes, access: RemoteAccess) -> bytes:
    """Write an object where there is none.

    A store that has done it may fail to say so; then what is there now tells. So data of different writers should
    differ, by a number that each has chosen for itself, if it matters who wrote it.

    Returns:
        What the object has now: the data, or those of another writer, who was first.

    Raises:
        UserError: it cannot be written; the message says what can be done.
    """
    assert len(data) <= SMALL_BYTES

    def request() -> bytes:
        try:
            store = open_store(url, access, writes=True)
            load_obstore().put(store, url.key, data, mode="create", use_multipart=False)
        except Exception as error:
            if not is_taken(error):
                raise
            # Some stores say so, too, while another writer is at it, who may fail.
            if (found := read_small(url, access)) is None:
                raise
            return found[0]
        COUNTS.count(written=len(data))
        return data

    return retrying(request, url, "write", access, renew=partial(forget_store, url, access))


def put_object(url: ObjectUrl, data: bytes, access: RemoteAccess) -> None:
    """Write a small object, over one that is there. All who write it have the same data.

    Raises:
        UserError: it cannot be written; the message says what can be done.
    """

    def request() -> None:
        load_obstore().put(open_store(url, access, writes=True), url.key, data, use_multipart=False)
        COUNTS.count(written=len(data))

    retrying(request, url, "write", access, renew=partial(forget_store, url, access))


def replace_object(url: ObjectUrl, data: bytes, access: RemoteAccess, version: str) -> StoredObject | None:
    """Write a small object in the place of a version of it.

    Returns:
        The new version; None if the object has another version by now, or is gone.

    Raises:
        UserError: it cannot be written; the message says what can be done.
    """

    def request() -> StoredObject | None:
        try:
            done = load_obstore().put(
                open_store(url, access, writes=True),
                url.key,
                data,
                mode={"e_tag": version},
                use_multipart=False,
            )
        except Exception as error:
            if not is_taken(error) and kind_of(error)[0] not in ("changed", "missing"):
                raise
            now = read_small(url, access)
            # The answer to an earlier attempt may have been lost.
            return now[1] if now is not None and now[0] == data else None
        return StoredObject(url, len(data), version_in(url, done), access)

    return retrying(request, url, "write", access, renew=partial(forget_store, url, access))


def read_small(url: ObjectUrl, access: RemoteAccess) -> tuple[bytes, StoredObject] | None:
    """All of a small object, and its version; None if there is none.

    Raises:
        UserError: it cannot be read, or has more than `SMALL_BYTES`.
    """
    while True:
        try:
            found = find_object(url, access)
            if found.size > SMALL_BYTES:
                raise UserError(f"{url} has {found.size:,} bytes; such an object has at most {SMALL_BYTES:,}")
            return found.read(0, found.size), found
        except ObjectMissing:
            return None
        except ObjectChanged:  # between the two requests; who replaces it does so now and then
            continue


def delete_objects(urls: Sequence[ObjectUrl], access: RemoteAccess) -> None:
    """Remove objects of one bucket; one that is gone already is none of the failures.

    Raises:
        UserError: they cannot be removed; the message says what can be done.
    """
    for at in range(0, len(urls), 1000):
        some = urls[at : at + 1000]

        def request(some: Sequence[ObjectUrl] = some) -> None:
            with suppress(FileNotFoundError):
                load_obstore().delete(open_store(some[0], access, writes=True), [each.key for each in some])

        retrying(request, some[0], "delete", access, renew=partial(forget_store, some[0], access))


def check_writing(folder: ObjectUrl, access: RemoteAccess) -> None:
    """Try whether objects can be written below a folder, and whether the store refuses a second writer.

    Raises:
        StoreError: the store would let two writers create the same object.
        UserError: this user cannot write there; the message says what can be done.
    """
    url = folder.below(f".probe-{os.urandom(8).hex()}")
    first, second = b"1", b"2"
    try:
        if create_object(url, first, access) == first and create_object(url, second, access) == second:
            raise StoreError(
                f"{folder}: this store cannot refuse a second writer (If-None-Match is ignored), so two programs might "
                "each take the place for theirs; use another store, or a disk"
            )
    finally:
        with suppress(UserError):
            delete_objects([url], access)
