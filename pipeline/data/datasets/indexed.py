"""The `.bin/.idx` format: token ids of many documents in two files.

The layout is the one of Megatron-LM, NeMo and GPT-NeoX (`megatron/core/datasets/indexed_dataset.py`), so their files
open here and ours open there; `docs/data-format.md` has every byte. No memmap leaves this file: readers get copies.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import CHUNK_BYTES
from pipeline.common.mapped_file import map_file
from pipeline.common.retry import retried

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences S, document bounds D = documents + 1: 34 bytes."""
VERSION = 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""dtype code -> NumPy dtype. 6 and 7 exist in the format but are not token ids."""
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
PROVENANCE = np.dtype([("unit", "<u4"), ("flags", "<u4"), ("row", "<u8"), ("id_hash", "<u8")])
"""One record of a `.prov` file: where a document came from. 24 bytes."""
SPLIT = 1
"""Flag of a document that was too long to encode at once: its sequences were encoded one by one."""
EDITED = 2
"""Flag of a document whose text was edited by curation."""
PARTS_A_FOLDER = 1000
_PER_TOKEN, _EMPTY = 16, 2**20
"""Most sequences or documents of a part: so many for each of its tokens, and so many more, as some are empty."""


def part_files(prefix: Path) -> tuple[Path, Path, Path]:
    """The three files that every part has: `.bin`, `.idx`, `.prov`."""
    tokens, index, provenance = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx", ".prov"))
    return tokens, index, provenance


PART_FILES = ("bin", "idx", "prov", "meta", "weight", "mask")
"""Names of all files that a part may have: their suffixes, and the fields of their hashes."""


def named_files(prefix: Path) -> dict[str, Path]:
    """All files that a part may have, by their names in receipts."""
    return {name: prefix.with_name(f"{prefix.name}.{name}") for name in PART_FILES}


def part_name(unit: int, chunk: int = 0) -> str:
    """Name of what a chunk of a unit gave, without a suffix."""
    return f"{unit:08d}-{chunk:05d}" if chunk else f"{unit:08d}"


def numbered(folder: Path, unit: int, chunk: int = 0) -> Path:
    """Path of what a chunk of a unit gave below `folder`, a thousand units a sub-folder, without a suffix."""
    return folder / f"{unit // PARTS_A_FOLDER:05d}" / part_name(unit, chunk)


def part_prefix(dataset: Path, unit: int, chunk: int = 0) -> Path:
    """Prefix of a part of a dataset folder."""
    return numbered(dataset / "parts", unit, chunk)


class HashedFile(storage.NewFile):
    """A `NewFile` with the hash and size of what was written."""

    def __init__(self, final: Path) -> None:
        super().__init__(final)
        self.size = 0
        self._digest = xxhash.xxh3_64()

    @property
    def hash(self) -> int:
        """xxh3-64 of the bytes so far."""
        return self._digest.intdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def listing(self) -> dict[str, Any]:
        """Size and hash as receipts have them."""
        return {"size": self.size, "xxh3": f"{self.hash:016x}"}


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. Memory: 4 bytes a sequence, and some more for documents of several.

    Use as a context manager: leaving it without an exception commits both files, an exception leaves neither.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"{prefix}: dtype {self.dtype} is not one of {sorted(map(str, CODES))}")
        bin_path, idx_path, _ = part_files(prefix)
        self.bin = HashedFile(bin_path)
        self.idx = HashedFile(idx_path)
        self._lengths = array("i")
        self.documents = 0
        """Documents so far."""
        self._longer: dict[int, int] = {}
        # By document, how many sequences more than one it has.

    def add_document(self, ids: npt.NDArray[Any], lengths: Sequence[int] = ()) -> None:
        """Append one document.

        Args:
            ids: token ids, shape (length,), of any integer dtype.
            lengths: of its sequences, if there are several; their sum is the length.

        Raises:
            ValueError: an id does not fit into the dtype of the file.
        """
        if ids.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if len(ids) and not (limits.min <= int(ids.min()) and int(ids.max()) <= limits.max):
                raise ValueError(f"{self.bin.final}: token ids {ids.min()}..{ids.max()} do not fit into {self.dtype}")
            ids = ids.astype(self.dtype)
        self.add_documents(
            np.ascontiguousarray(ids).tobytes(), lengths or [len(ids)], {0: len(lengths)} if lengths else {}
        )

    def add_documents(
        self,
        tokens: bytes | memoryview,
        lengths: Sequence[int] | npt.NDArray[Any],
        longer: Mapping[int, int] | None = None,
    ) -> None:
        """Append documents whose ids are in the dtype of the file already, back to back.

        Args:
            tokens: bytes of the ids of all of them.
            lengths: of their sequences, in tokens; usually one a document.
            longer: by place among these documents, the number of sequences where it is not one.
        """
        self.bin.write(tokens)
        self._lengths.frombytes(np.asarray(lengths, dtype=np.int32).tobytes())
        sequences = 0
        for place, count in (longer or {}).items():
            self._longer[self.documents + place] = count - 1
            sequences += count - 1
        self.documents += len(lengths) - sequences

    def _write_index(self) -> None:
        sequences = len(self._lengths)
        self.idx.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], sequences, self.documents + 1))
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if sequences else np.zeros(0, np.int32)
        step = CHUNK_BYTES // 8
        self.idx.write(lengths.astype("<i4", copy=False).tobytes())
        offset = 0
        for first in range(0, sequences, step):
            ends = offset + np.cumsum(lengths[first : first + step], dtype="<i8") * self.dtype.itemsize
            self.idx.write(np.concatenate([[np.int64(offset)], ends[:-1]]).astype("<i8").tobytes())
            offset = int(ends[-1])
        longer = np.array(sorted(self._longer), dtype=np.int64)
        more = np.cumsum([0, *(self._longer[document] for document in longer.tolist())], dtype=np.int64)
        for first in range(0, self.documents + 1, step):
            bounds = np.arange(first, min(first + step, self.documents + 1), dtype="<i8")
            self.idx.write((bounds + more[np.searchsorted(longer, bounds)]).astype("<i8").tobytes())

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self.bin, self.idx:
            if error is None:
                self._write_index()
                self.bin.commit()
                self.idx.commit()


class _Mapped:
    """A file that is mapped, read-only; empty files, which cannot be mapped, are empty arrays."""

    def __init__(self, path: Path) -> None:
        file = storage.regular_descriptor(path)  # a third of the time of `path.open`
        self.size = 0
        try:
            self.size = os.fstat(file).st_size
            self._bytes: npt.NDArray[np.uint8] | bytes = map_file(file, self.size) if self.size else b""
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({self.size:,} bytes to map)", str(path)) from None
        finally:
            os.close(file)

    def array(self, dtype: str | np.dtype[Any], count: int, offset: int = 0) -> npt.NDArray[Any]:
        """A view of the file."""
        return np.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset) if count else np.zeros(0, dtype)


class _Loaded(_Mapped):
    """A file that was read as a whole."""

    def __init__(self, path: Path) -> None:
        try:
            self._bytes = storage.read_bytes(path)
        except MemoryError:
            raise MachineError(
                f"{path} does not fit into the memory of this machine; look whether it is whole, or set "
                "data.loader.read: mmap"
            ) from None
        self.size = len(self._bytes)


class Descriptor:
    """A file that stays open as long as somebody holds this, like another thread in the middle of a read."""

    def __init__(self, path: Path) -> None:
        self.number = storage.regular_descriptor(path)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class TokenRanges(ABC):
    """Reads by ranges of tokens, counted from 0: of a part, or of a dataset."""

    place: Path
    """File or folder, for messages."""
    tokens: int
    dtype: np.dtype[Any]

    @abstractmethod
    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy token ids from token `start` on into `out`, which is as long as wanted, of a dtype that holds them."""

    @abstractmethod
    def starts_within(
        self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`document_starts` of many ranges at once, which all lie within."""

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """A copy of the token ids [start, start + count), in the dtype of the file.

        Raises:
            IndexError: outside of [0, tokens).
        """
        self.check_range(start, count)
        result = np.empty(count, self.dtype)
        self.fill(start, result)
        return result

    def document_starts(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens in [start, start + count) at which documents begin, ascending.

        A document without tokens (another program may have written one) begins where the next one does.
        """
        self.check_range(start, count)
        return self.starts_within(np.array([start]), np.array([count]))[1]

    def check_range(self, start: int, count: int) -> None:
        """Raise an `IndexError` for tokens outside of [0, tokens)."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) are outside of [0, {self.tokens}) of {self.place}")


class IndexedPart(TokenRanges):
    """Reader of PREFIX.bin and PREFIX.idx, by mmap.

    A document is one or more sequences, one after the other; tokens are counted from the start of the part. If reading
    fails while the file is open, the operating system kills the process: that is how mmap reports it.

    Raises:
        UserError: a file is missing, cut, or not of this format; the message names it.
        MachineError: the file system fails again and again.
    """

    def __init__(self, prefix: Path) -> None:
        self.bin_path, self.idx_path, _ = part_files(prefix)
        self.place = self.bin_path
        try:
            index_size, header = retried(self._read_header, self.idx_path, "opening it")
            size = retried(self._open_tokens, self.bin_path, "opening it")
        except FileNotFoundError as error:
            path = Path(error.filename)
            missing = f"{path.readlink()}, which {path} links to," if path.is_symlink() else f"{path}"
            raise UserError(f"{missing} is missing; a part needs both its .bin and its .idx") from None
        dtype, sequences, bounds = self._parse(index_size, header)
        # A sparse file costs nothing and may say any size: the index is not opened before the tokens explain it.
        if max(sequences, bounds) > _EMPTY + _PER_TOKEN * (size // dtype.itemsize):
            raise UserError(
                f"{self.idx_path}: {sequences:,} sequences and {bounds - 1:,} documents of {size // dtype.itemsize:,} "
                f"tokens ({self.bin_path.name}); one of both is damaged or not complete"
            )
        idx = retried(self._open_index, self.idx_path, "opening it")
        if idx.size != index_size:
            raise UserError(f"{self.idx_path} changed while it was opened")
        self.dtype = dtype
        self.sequences: int = sequences
        self.documents: int = bounds - 1
        self.lengths = idx.array("<i4", sequences, HEADER.size)
        self.pointers = idx.array("<i8", sequences, HEADER.size + 4 * sequences)
        self.bounds = idx.array("<i8", bounds, HEADER.size + 12 * sequences)
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * dtype.itemsize if sequences else 0
        if size != end:
            raise UserError(f"{self.bin_path}: {size} bytes, but {self.idx_path.name} describes {end}")
        if self.bounds[0] != 0 or self.bounds[-1] != sequences:
            raise UserError(
                f"{self.idx_path}: document bounds run from {self.bounds[0]} to {self.bounds[-1]}, "
                f"but should run from 0 to {sequences}"
            )
        self.tokens = end // dtype.itemsize
        # The same arrays; Python looks single numbers up in them several times faster than NumPy.
        self._pointer_view = self.pointers.view(np.uint8).data.cast("q")
        self._bound_view = self.bounds.view(np.uint8).data.cast("q")
        self._connect()

    def _read_header(self) -> tuple[int, bytes]:
        """Size of the .idx file, and its first bytes."""
        with storage.naming(self.idx_path):
            file = storage.regular_descriptor(self.idx_path)
            try:
                return os.fstat(file).st_size, os.pread(file, HEADER.size, 0)
            finally:
                os.close(file)

    def _parse(self, size: int, header: bytes) -> tuple[np.dtype[Any], int, int]:
        """Type of ids, and numbers of sequences and bounds, of a header that explains the size of its file."""
        if len(header) < HEADER.size:
            raise UserError(f"{self.idx_path}: {size} bytes are too few for an .idx file; it is truncated")
        magic, version, code, sequences, bounds = HEADER.unpack(header)
        if magic != MAGIC:
            raise UserError(f"{self.idx_path} is not an .idx file: it begins with {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise UserError(f"{self.idx_path}: version {version} of the format; this program reads {VERSION}")
        dtype = np.dtype(DTYPES.get(code, "V"))
        if dtype.kind not in "iu":
            raise UserError(f"{self.idx_path}: dtype code {code} is not an integer type (1 to 5 and 8 are)")
        expected = HEADER.size + 12 * sequences + 8 * bounds
        # With an i8 a sequence more, the file was written for several modalities.
        if bounds < 1 or size != expected:
            raise UserError(
                f"{self.idx_path}: {size} bytes, but its header needs {expected}; it is truncated or damaged"
            )
        return dtype, sequences, bounds

    def _open_index(self) -> _Mapped:
        return _Mapped(self.idx_path)

    def _open_tokens(self) -> int:
        """Open the .bin file and return its size."""
        self._data = _Mapped(self.bin_path)
        return self._data.size

    def _connect(self) -> None:
        """Make ready for `fill`; dtype and tokens are known now."""
        self._tokens = self._data.array(self.dtype, self.tokens)

    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy token ids from token `start` on into `out`, which is as long as wanted, of a dtype that holds them."""
        out[:] = self.view(start, start + len(out))

    def view(self, start: int, end: int) -> npt.NDArray[Any]:
        """The token ids [start, end), which lie in the file where that is mapped: nobody writes to them."""
        if start < 0 or end > self.tokens:
            self.check_range(start, end - start)
        return self._tokens[start:end]

    def document_start(self, document: int) -> int:
        """Token at which a document begins; for `documents`, the number of tokens."""
        if not 0 <= document <= self.documents:
            raise IndexError(f"document {document} is outside of [0, {self.documents}] of {self.idx_path}")
        sequence = int(self.bounds[document])
        return self.tokens if sequence == self.sequences else int(self.pointers[sequence]) // self.dtype.itemsize

    def starts_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`document_start` of many documents at once."""
        sequences = self.bounds[documents]
        offsets = np.full(len(documents), self.tokens * self.dtype.itemsize, np.int64)
        inside = sequences < self.sequences
        offsets[inside] = self.pointers[sequences[inside]]
        starts: npt.NDArray[np.int64] = offsets // self.dtype.itemsize
        return starts

    def document_at(self, token: int) -> int:
        """The document that a token belongs to."""
        self.check_range(token, 1)
        sequence = bisect_right(self._pointer_view, token * self.dtype.itemsize) - 1
        return bisect_right(self._bound_view, sequence) - 1

    def documents_at(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The documents that tokens belong to, which all lie within the part."""
        return self._first_after(tokens) - 1

    def starts_within(
        self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`document_starts` of many ranges at once, which all lie within the part.

        Args:
            starts: first token of each range.
            counts: tokens of each range.

        Returns:
            Two arrays, an element for each document that begins in a range: the number of the range, ascending, and
            the token, ascending within a range.
        """
        edges = self._first_after(np.concatenate([starts, starts + counts]) - 1)
        first = edges[: len(starts)]
        found = edges[len(starts) :] - first
        row = np.repeat(np.arange(len(found)), found)
        document = np.arange(row.size) + (first - (np.cumsum(found) - found))[row]
        tokens: npt.NDArray[np.int64] = self.pointers[self.bounds[document]] // self.dtype.itemsize
        return row, tokens.astype(np.int64, copy=False)

    def offsets_within(self, start: int, count: int) -> list[int]:
        """`starts_within` for one range, as offsets in bytes; quicker for a few ranges than all of them at once."""
        size, pointers = self.dtype.itemsize, self._pointer_view
        low = bisect_left(pointers, start * size)
        high = bisect_left(pointers, (start + count) * size, low)
        if low == high:
            return []
        # Where each document here and the one before are one sequence, so are the numbers of both.
        first = low - 1 if low else 0
        if high - low > _FEW or self._bound_view[first : high + 1].tolist() != [*range(first, high + 1)]:
            offsets: list[int] = (self.starts_within(np.array([start]), np.array([count]))[1] * size).tolist()
            return offsets
        return pointers[low:high].tolist()

    def _first_after(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each token the first document that begins after it; `documents` if there is none."""
        sequence = _bisect_right(self.pointers, tokens * self.dtype.itemsize)
        # Where each document is one sequence, so is the number of the document; else it is looked up in the bounds.
        document = np.minimum(sequence, self.documents)
        before = self.bounds[np.maximum(document - 1, 0)]
        other = (self.bounds[document] < sequence) | ((before >= sequence) & (document > 0))
        if other.any():
            document[other] = _bisect_right(self.bounds, sequence[other] - 1)
        return document


def document_lengths(part: IndexedPart) -> npt.NDArray[np.int64]:
    """Tokens of each document of a part."""
    return np.diff(part.starts_of(np.arange(part.documents + 1, dtype=np.int64)))


class PreadPart(IndexedPart):
    """An `IndexedPart` that is not mapped: the index is held in memory while the part is open, tokens are read.

    A read that fails is tried again, with the file opened anew.
    """

    def _open_index(self) -> _Mapped:
        return _Loaded(self.idx_path)

    def _open_tokens(self) -> int:
        self._file = Descriptor(self.bin_path)
        return os.fstat(self._file.number).st_size

    def _connect(self) -> None:
        """Nothing to do."""

    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Read token ids from token `start` on into `out`, which is as long as wanted, of a dtype that holds them.

        Raises:
            UserError: the file ends early; somebody has cut it since it was opened.
            MachineError: reading fails again and again.
        """
        self.check_range(start, len(out))
        same = out.dtype == self.dtype and out.flags.c_contiguous
        ids = out if same else np.empty(len(out), self.dtype)
        offset = start * self.dtype.itemsize
        retried(
            lambda: self._read(offset, ids), self.bin_path, f"reading {ids.nbytes} bytes at {offset}", self._open_tokens
        )
        if not same:
            out[:] = ids

    def view(self, start: int, end: int) -> npt.NDArray[Any]:
        """The token ids [start, end), read from the file."""
        return self.read(start, end - start)

    def _read(self, offset: int, ids: npt.NDArray[Any]) -> None:
        file, data = self._file, ids.data.cast("B")
        while data:
            count = os.preadv(file.number, [data], offset)
            if not count:
                raise UserError(f"{self.bin_path} ends at byte {offset}; it was longer when it was opened")
            offset, data = offset + count, data[count:]


_FEW = 64


def _bisect_right(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of elements of an ascending array that are at most each value.

    np.searchsorted would copy the array, which is not aligned. A few values are looked up one by one, which takes a
    microsecond each. Many are looked up together: in about as many elements as there are values, which are copied, and
    then by halves between two of those.
    """
    size = len(ascending)
    if len(values) <= _FEW:
        view = ascending.view(np.uint8).data.cast("q")
        return np.array([bisect_right(view, value) for value in values.tolist()], np.int64)
    bit = 1 << (size // len(values)).bit_length()
    result = ascending[bit - 1 :: bit].astype(np.int64).searchsorted(values, "right") * bit
    while bit := bit >> 1:
        # Steps beyond the end are taken only where all elements are at most the value.
        after = result + bit
        result += (ascending[np.minimum(after, size) - 1] <= values) * bit
    return np.minimum(result, size)
