"""Names of torch that are not public, of files of checkpoints; see `core.py`."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pickle
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as Place
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from pipeline.common import storage
from pipeline.common.errors import UserError

__all__ = ["CheckpointReader", "HashingWriter", "Place", "PythonUnpickler", "first_cause"]

PythonUnpickler: Any = pickle._Unpickler
"""That of pickle which is written in Python, whose steps can be replaced."""

_CHUNK = 4 << 20
"""Bytes that are written and hashed at once: the hash then finds them in the processor's cache."""
_AHEAD = 32 << 20
"""Bytes after which the kernel is told to begin with writing them to the disk, rather than at the end."""
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class _HashingStream(io.RawIOBase):
    """An append-only file that hashes the bytes as they are handed to the kernel."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_64()
        self._size = 0
        self._begun = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            try:
                self._file.write(chunk)
            except OSError as error:
                self.failure = error
                raise
            self._hash.update(chunk)
            self._size += len(chunk)
            if self._size - self._begun >= _AHEAD:
                self._begin()
        return len(view)

    def _begin(self) -> None:
        """Let the disk work while the rest is still being handed over."""
        if _sync_file_range is not None:
            # A hint, whose errors say nothing that the fsync at the end does not say.
            _sync_file_range(self._file.fileno(), self._begun, self._size - self._begun, _WRITE)
        self._begun = self._size

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Asked for by the fsync that follows the last write; what is buffered must be in the file by then.
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            super().close()

    def written(self) -> tuple[int, str]:
        """Bytes written and their xxh3."""
        return self._size, self._hash.hexdigest()


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        stream = _HashingStream(Path(path))
        try:
            yield stream
        except Exception as error:
            # torch's writer turns what goes wrong in a write into a RuntimeError of its own about positions.
            raise stream.failure or error from None
        finally:
            stream.close()
        self.files[Path(path).name] = stream.written()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """DCP's file writer, one fsynced file a rank, that knows size and xxh3 of each file as it was written.

    Args:
        folder: Where to.
        on_host: What will be written is in the memory of the host. torch would open a stream on the first GPU, for
            every rank.
    """

    def __init__(self, folder: Path, *, on_host: bool = False) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        if on_host:
            self.per_thread_copy_ahead = 0
        self.fs = _HashingFileSystem()

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """File name -> (bytes, xxh3) of what this rank wrote."""
        return cast(_HashingFileSystem, self.fs).files


def first_cause(failure: CheckpointException) -> BaseException:
    """The first error of the lowest rank."""
    rank = min(failure.failures)
    return failure.failures[rank][0]


class _RegularFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb", "it reads"
        with storage.open_regular(Path(path), symlinks=False) as stream:
            yield cast(io.IOBase, stream)


class CheckpointReader(FileSystemReader):
    """DCP's file reader, for a checkpoint that may be a stranger's: of its pickles none is read but tensors.

    Tensors are read by `torch.load(weights_only=True)`, as torch's own reader has it.

    Args:
        folder: of the checkpoint.
        metadata: the list of its tensors, checked.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.fs = _RegularFiles()
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list that was given; torch's would unpickle it."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan names; a `UserError` if that is not a tensor, which torch would unpickle."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise UserError(
                    f"{item.storage_index.fqn} in {self.path} is not a tensor but a pickle, which could run code and "
                    "is not read; do not trust the source of the checkpoint"
                )
        return super().read_data(plan, planner)

    def _slice_file(self, file: Any, sinfo: Place) -> IO[bytes]:
        """The part of a file that has a tensor, as `torch.save` wrote it: not compressed, so no larger than it is."""
        try:
            with zipfile.ZipFile(_Part(file, sinfo.offset, sinfo.length)) as archive:
                plain = all(
                    each.compress_type == zipfile.ZIP_STORED and each.file_size <= sinfo.length
                    for each in archive.infolist()
                )
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            plain = False
        if not plain:
            place = f"{self.path}/{sinfo.relative_path}"
            raise UserError(f"{place} is damaged or forged: there is no tensor at byte {sinfo.offset:,}")
        return super()._slice_file(file, sinfo)


class _Part(io.RawIOBase):
    """A part of a file, as a file. That of torch goes ahead where it is asked to go back from the end."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        place = (0, self._place, self._length)[whence] + offset
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._place = place
        return place

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._offset + self._place)
        count: int = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._place)])
        self._place += count
        return count
