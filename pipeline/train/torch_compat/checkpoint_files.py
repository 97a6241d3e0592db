"""Names of torch that are not public, of files of checkpoints; see `core.py`."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as Place
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from pipeline.common import links, storage
from pipeline.common.errors import UserError

__all__ = ["CheckpointReader", "HashingWriter", "PartPlanner", "Place", "PythonUnpickler", "first_cause"]

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
        self._file = links.create(path)
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
    """DCP's file writer, one fsynced file per rank, that knows size and xxh3 of each file as it was written.

    DCP compares no hashes when it reads: it notices that a file ends too early, and not that a bit is another one.

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

    Tensors are read by `torch.load(weights_only=True)`, as torch's own reader has it, or as bytes where one that was
    described by the same bytes has shown what they are.

    Args:
        folder: of the checkpoint.
        metadata: the list of its tensors, checked.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.fs = _RegularFiles()
        self._metadata = metadata
        self._forms: dict[tuple[tuple[str, bytes], ...], tuple[torch.Size, torch.dtype]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list that was given. torch's own method would unpickle it."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan names; a `UserError` if that is not a tensor, which torch would unpickle."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise UserError(
                    f"{item.storage_index.fqn} in {self.path} is not a tensor but a pickle, which could run code and "
                    "is not read; do not trust the source of the checkpoint"
                )
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    target = planner.resolve_tensor(item).detach()
                    self._read_tensor(file, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, file: Any, item: ReadItem, target: Tensor) -> None:
        """Read a tensor, or the part of it that is asked for: straight into the target where its bytes lie as they are.

        `torch.load` would read it into memory of its own first. It is used for the first tensor of each form, which
        shows what the form is, and for all whose bytes lie otherwise.
        """
        place: Place = self.storage_data[item.storage_index]
        saved = self._saved(file, place)
        known = self._forms.get(saved.form)
        if known is not None and (begin := _first_byte(known, item, target)) is not None:
            file.seek(place.offset + saved.begin + begin)
            memory = target.reshape(-1).view(torch.uint8).numpy().data
            if file.readinto(memory) != len(memory):
                raise self._forged(place)
            return
        tensor: Tensor = torch.load(super()._slice_file(file, place), map_location="cpu", weights_only=True)
        entry = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if isinstance(entry, TensorStorageMetadata) and tensor.dtype != entry.properties.dtype:
            raise ValueError(
                f"{item.storage_index.fqn} is of {tensor.dtype}, and the list says {entry.properties.dtype}"
            )
        if saved.form and _is_plain(tensor, saved.size):
            self._forms[saved.form] = tensor.shape, tensor.dtype
        part = tensor[tuple(map(slice, item.storage_offsets, map(add, item.storage_offsets, item.lengths)))]
        if part.shape != target.shape:
            raise ValueError(f"{item.storage_index.fqn} has {tuple(part.shape)} in place of {tuple(target.shape)}")
        target.copy_(part)

    def _saved(self, file: Any, place: Place) -> _Saved:
        """The part of a file that has a tensor, as `torch.save` wrote it: not compressed, so no larger than it is."""
        try:
            part = _Part(file, place.offset, place.length)
            with zipfile.ZipFile(part) as archive:
                entries = archive.infolist()
            if any(each.compress_type != zipfile.ZIP_STORED or each.file_size > place.length for each in entries):
                raise self._forged(place)
            return _saved_in(part, entries, place.length)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
            raise self._forged(place) from None

    def _forged(self, place: Place) -> UserError:
        return UserError(
            f"{self.path}/{place.relative_path} is damaged or forged: there is no tensor at byte {place.offset:,}"
        )


class PartPlanner(DefaultLoadPlanner):
    """Loads parts of tensors into a state that has tensors of those parts alone.

    Args:
        first: indices of the first element of each part; 0 for the dimensions behind.
    """

    def __init__(self, first: Sequence[int]) -> None:
        super().__init__()
        self._first = tuple(first)

    def create_local_plan(self) -> LoadPlan:
        """Reads of what the parts share with each saved part of a tensor."""
        items = []
        assert self.metadata is not None
        for name, tensor in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), name
            offsets = torch.Size([*self._first, *[0] * (tensor.ndim - len(self._first))])
            wanted = ChunkStorageMetadata(offsets=offsets, sizes=tensor.size())
            items += create_read_items_for_chunk_list(name, saved, [wanted])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of the part."""
        return cast(Tensor, self.state_dict[index.fqn])


class _Saved(NamedTuple):
    """A tensor as `torch.save` wrote it."""

    form: tuple[tuple[str, bytes], ...]
    """All but its elements: their size, type, shape, strides, order of bytes. Empty where that is not known."""
    begin: int
    """Place of the first element."""
    size: int
    """Bytes of the elements."""


_UNKNOWN = _Saved((), 0, 0)
_MOST_BYTES = 4096
"""Bytes of an entry beside the elements at most: what describes a tensor takes some hundreds."""


def _saved_in(part: _Part, entries: Sequence[zipfile.ZipInfo], length: int) -> _Saved:
    """The form of a tensor, and the place of its elements, from the entries of the archive."""
    form, places = [], []
    for each in entries:
        name = each.filename.partition("/")[2]
        if name == ".data/serialization_id":  # a hash, which differs
            continue
        if each.header_offset < 0:  # which zipfile makes of a forged place
            return _UNKNOWN
        header = _read_at(part, each.header_offset, _LOCAL_HEADER.size)
        signature, name_size, extra_size = _LOCAL_HEADER.unpack(header)
        begin = each.header_offset + _LOCAL_HEADER.size + name_size + extra_size
        if signature != b"PK\3\4" or begin + each.file_size > length:
            return _UNKNOWN
        if name == "data/0":
            places.append((begin, each.file_size))
            form.append((name, str(each.file_size).encode()))
        elif name.startswith("data/") or each.file_size > _MOST_BYTES:
            return _UNKNOWN
        else:
            form.append((name, _read_at(part, begin, each.file_size)))
    if len(places) != 1 or ("byteorder", sys.byteorder.encode()) not in form:
        return _UNKNOWN
    return _Saved(tuple(form), *places[0])


_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of an entry of a zip archive: signature, then sizes of the name and of the extra field that follow."""


def _read_at(part: _Part, begin: int, size: int) -> bytes:
    part.seek(begin)
    return part.read(size) or b""


def _is_plain(tensor: Tensor, size: int) -> bool:
    """True if the elements of a tensor are all that is in its storage of `size` bytes, in order."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() == size > 0
    )


def _first_byte(known: tuple[torch.Size, torch.dtype], item: ReadItem, target: Tensor) -> int | None:
    """Place of what an item asks for among the elements; None where it does not lie in one piece, as in the target."""
    shape, dtype = known
    offsets, lengths = item.storage_offsets, item.lengths
    fits = target.is_cpu and target.dtype == dtype and target.shape == lengths and target.is_contiguous()
    if not fits or target.numel() == 0 or len(lengths) != len(shape):
        return None
    if any(first < 0 or first + count > size for first, count, size in zip(offsets, lengths, shape, strict=True)):
        return None
    # One run of elements: single indices first, then a range of one dimension, then whole ones.
    ranged = next((dim for dim, count in enumerate(lengths) if count != 1), len(shape))
    if any(lengths[dim] != shape[dim] for dim in range(ranged + 1, len(shape))):
        return None
    place = 0
    for first, size in zip(offsets, shape, strict=True):
        place = place * size + first
    return place * dtype.itemsize


class _Part(io.RawIOBase):
    """A part of a file, as a file. torch's own class goes forward where it is asked to go back from the end."""

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
