"""A bucket of the global shuffle: what worker processes run; `external_sort.py` has the whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import mix
from pipeline.data.datasets.document_records import MetadataWriter, metadata_file
from pipeline.data.datasets.indexed import (
    PROVENANCE,
    HashedFile,
    IndexedPart,
    IndexedWriter,
    named_files,
    numbered,
    part_files,
    part_prefix,
)
from pipeline.data.datasets.target_mask import COUNT, mask_file, write_mask_blocks
from pipeline.data.datasets.weights import WEIGHT, weights_file, write_weights
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.worker_pool import Progress

UNSHUFFLED = "unshuffled"
"""Folder of the runs, below the split's."""
RANGE = 2**64
"""Keyed numbers are below it."""
_WINDOW = 256
"""Documents that are looked at for one guess."""
_WRITE_BYTES = 2**20


@dataclass(frozen=True)
class ShuffleJob(ReceiptJob):
    """A bucket to fill. It is small: the runs are read from a file. `inputs` is a hash of all that the runs are.

    Attributes:
        bytes: of token ids that it is expected to have.
        split: name of the split.
        bucket: number of the bucket.
        buckets: number of buckets of the split.
        config_hash: of the plan.
    """

    split: str
    bucket: int
    buckets: int
    config_hash: str

    KEYS = ("documents", "tokens", "files")

    def __str__(self) -> str:
        return f"bucket {self.bucket} of {self.buckets} of the global shuffle of {self.folder / self.split}"

    @property
    def receipt(self) -> Path:
        return numbered(self.folder / "receipts" / "shuffle" / self.split, self.bucket).with_suffix(".json")

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "bucket": self.bucket,
            "buckets": self.buckets,
            "config_hash": self.config_hash,
            "runs": self.inputs,
        }

    def files(self, receipt: dict[str, Any]) -> dict[Path, dict[str, Any]]:
        paths = named_files(part_prefix(self.folder / self.split, self.bucket))
        return {paths[name]: about for name, about in receipt["files"].items()}

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Fill the bucket: commit its part, then its receipt.

        Raises:
            UserError: a run is not what its receipt says.
        """
        path = runs_file(self.folder, self.split)
        table = _read_runs(path, path.stat().st_mtime_ns)
        if table["runs_hash"] != self.inputs:
            raise UserError(f"{path} was written by another command in the meantime; run the same command again")
        first, end = (-(-RANGE * bucket // self.buckets) for bucket in (self.bucket, self.bucket + 1))
        gathered = _Gathered(self.folder / self.split / UNSHUFFLED, table, first, end)
        progress(self.bytes // 2)
        prefix = part_prefix(self.folder / self.split, self.bucket)
        storage.make_below(self.folder, prefix.parent)
        counts = {"documents": gathered.documents, "tokens": gathered.tokens}
        return self.put_receipt(self.identity | counts | {"files": gathered.write(prefix)})


def runs_file(folder: Path, split: str) -> Path:
    """The list of runs, for the workers; it goes with the runs."""
    return folder / split / UNSHUFFLED / "runs.json"


@lru_cache(maxsize=2)
def _read_runs(path: Path, mtime_ns: int) -> Any:
    return storage.get_json(path, "runs", "runs_hash", "config_hash", "dtype", "metadata")


@dataclass(frozen=True)
class _Slice:
    """The documents of a run that belong to a bucket: a range of each of its files."""

    prefix: Path
    documents: range
    all_documents: int
    tokens: range
    """Tokens of the part."""


class _Gathered:
    """All documents of a bucket, run after run.

    Memory: the token ids, the metadata, and `DOCUMENT_BYTES` a document.
    """

    def __init__(self, folder: Path, table: Any, first: int, end: int) -> None:
        self._dtype = np.dtype(table["dtype"])
        self._has_metadata: bool = table["metadata"]
        slices: list[_Slice] = []
        numbers, records, counts, lengths = [], [], [], []
        for unit, chunk, key, documents, tokens in table["runs"]:
            if not documents:
                continue
            prefix = part_prefix(folder, unit, chunk)
            part = IndexedPart(prefix)
            if (part.documents, part.tokens, part.dtype) != (documents, tokens, self._dtype):
                raise _damaged(part.idx_path)
            low, high, found = _documents_between(part_files(prefix)[2], documents, key, first, end)
            if low == high:
                continue
            bounds = part.bounds[low : high + 1].astype(np.int64)
            tokens_here = range(part.document_start(low), part.document_start(high))
            sequences = part.lengths[int(bounds[0]) : int(bounds[-1])].astype(np.int64)
            if (np.diff(bounds) < 1).any() or int(sequences.sum()) != len(tokens_here):
                raise _damaged(part.idx_path)
            slices.append(_Slice(prefix, range(low, high), documents, tokens_here))
            numbers.append(mix(found["row"], key))
            records.append(found)
            counts.append(np.diff(bounds))
            lengths.append(sequences)
        self._records = _joined(records, PROVENANCE)
        self._counts = _joined(counts, np.int64)
        self._lengths = _joined(lengths, np.int64)
        # The runs come in the order of (unit, chunk) and rows of one unit never tie.
        self._order = np.argsort(_joined(numbers, np.uint64), kind="stable")
        del numbers, records, counts, lengths
        self._ids = bytearray(sum(len(piece.tokens) for piece in slices) * self._dtype.itemsize)
        offset = 0
        for piece in slices:
            start, size = piece.tokens.start * self._dtype.itemsize, len(piece.tokens) * self._dtype.itemsize
            _read_into(part_files(piece.prefix)[0], start, memoryview(self._ids)[offset : offset + size])
            offset += size
        self._weights = _weights(slices) if table.get("weights") else None
        self._mask = _mask(slices) if table.get("mask") else None
        self._objects, self._object_sizes = _metadata(slices if self._has_metadata else [])
        self.documents = len(self._records)
        self.tokens = len(self._ids) // self._dtype.itemsize

    def write(self, prefix: Path) -> dict[str, dict[str, Any]]:
        """Write the part in the order of z and commit its files; their sizes and hashes by name."""
        with ExitStack() as stack:
            provenance = stack.enter_context(HashedFile(part_files(prefix)[2]))
            for block in np.array_split(self._order, -(-len(self._order) // _WRITE_BYTES) or 1):
                provenance.write(self._records[block].tobytes())
            files = {"prov": provenance}
            if self._has_metadata:
                metadata = MetadataWriter(prefix, self._object_sizes[self._order])
                files["meta"] = stack.enter_context(metadata.file)
                for _, objects in self._in_order(self._objects, self._object_sizes):
                    metadata.write(objects)
            if self._weights is not None:
                files["weight"] = stack.enter_context(write_weights(prefix, self._weights[self._order]))
            if self._mask is not None:
                counts, mask = self._mask
                blocks = (tokens for _, tokens in self._in_order(mask, self._document_lengths()))
                files["mask"] = stack.enter_context(write_mask_blocks(prefix, counts[self._order], blocks))
            with IndexedWriter(prefix, self._dtype) as writer:
                self._write_tokens(writer)
            for file in files.values():
                file.commit()
        files |= {"bin": writer.bin, "idx": writer.idx}
        return {name: file.listing() for name, file in files.items()}

    def _document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, as they were gathered."""
        ends: npt.NDArray[np.int64] = np.cumsum(self._lengths)[np.cumsum(self._counts) - 1]
        return np.diff(ends, prepend=0)

    def _write_tokens(self, writer: IndexedWriter) -> None:
        first = np.cumsum(self._counts) - self._counts
        sizes = self._document_lengths() * self._dtype.itemsize
        for block, tokens in self._in_order(self._ids, sizes):
            counts = self._counts[block]
            # The sequences of the block: `counts` of them from `first` on, for every document.
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            lengths = self._lengths[np.repeat(first[block], counts) + within]
            longer = {place: int(counts[place]) for place in np.flatnonzero(counts > 1).tolist()}
            writer.add_documents(tokens, lengths, longer)

    def _in_order(self, data: bytearray, sizes: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], bytes]]:
        """Blocks of the order with their bytes, about `_WRITE_BYTES` at a time.

        Args:
            data: bytes of all documents as they were gathered.
            sizes: of each.
        """
        view = memoryview(data)
        starts = np.cumsum(sizes) - sizes
        ends = np.cumsum(sizes[self._order])
        limits = np.arange(_WRITE_BYTES, int(ends[-1]) if len(ends) else 0, _WRITE_BYTES)
        for block in np.split(self._order, np.unique(np.searchsorted(ends, limits) + 1)):
            if len(block):
                pairs = zip(starts[block].tolist(), sizes[block].tolist(), strict=True)
                yield block, b"".join([view[start : start + size] for start, size in pairs])


def _joined(arrays: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _documents_between(path: Path, documents: int, key: int, first: int, end: int) -> tuple[int, int, npt.NDArray[Any]]:
    """The documents of a run with first <= z < end: their range, and their records of the `.prov` file.

    Raises:
        UserError: the file is cut, or the run is not sorted.
    """
    with storage.open_regular(path) as file:
        if file.seek(0, os.SEEK_END) != documents * PROVENANCE.itemsize:
            raise _damaged(path)

        def records(start: int, stop: int) -> npt.NDArray[Any]:
            data = os.pread(file.fileno(), (stop - start) * PROVENANCE.itemsize, start * PROVENANCE.itemsize)
            return np.frombuffer(data, PROVENANCE)

        def numbers_of(start: int, stop: int) -> npt.NDArray[np.uint64]:
            return mix(records(start, stop)["row"], key)

        low = _first_at_least(numbers_of, first, 0, documents) if first else 0
        high = _first_at_least(numbers_of, end, low, documents, first) if end < RANGE else documents
        found = records(low, high)
    numbers = mix(found["row"], key)
    inside = not len(numbers) or (int(numbers[0]) >= first and int(numbers[-1]) < end)
    if len(found) != high - low or not inside or (numbers[1:] <= numbers[:-1]).any():
        raise _damaged(path)
    return low, high, found


def _first_at_least(
    read: Callable[[int, int], npt.NDArray[np.uint64]], bound: int, low: int, high: int, below: int = 0
) -> int:
    """The first place in [low, high) whose number is at least `bound`; `high` if there is none.

    The numbers there are at least `below`.

    The numbers are evenly spread, so a guess in proportion is nearly right and two or three reads are enough; every
    fourth guess is the middle, whatever they are.
    """
    above = RANGE
    for step in itertools.count():
        begin, stop = low, high
        if high - low > _WINDOW:
            guess = low + (high - low) * max(bound - below, 0) // max(above - below, 1)
            middle = (low + high) // 2 if step % 4 == 3 else guess
            begin = min(max(low, middle - _WINDOW // 2), high - _WINDOW)
            stop = begin + _WINDOW
        numbers = read(begin, stop)
        place = int(np.searchsorted(numbers, np.uint64(bound)))
        if place == 0 and begin > low:
            high, above = begin, int(numbers[0])
        elif place == len(numbers) and stop < high:
            low, below = stop, int(numbers[-1])
        else:
            return begin + place
    raise AssertionError


def _metadata(slices: list[_Slice]) -> tuple[bytearray, npt.NDArray[np.int64]]:
    """The objects of all documents back to back, and the size of each."""
    ranges, sizes = [], []
    for piece in slices:
        path = metadata_file(piece.prefix)
        low, high = piece.documents.start, piece.documents.stop
        table = bytearray(8 * (high - low + 1))
        _read_into(path, 8 * low, memoryview(table))
        offsets = np.frombuffer(table, "<u8").astype(np.int64)
        if (np.diff(offsets) < 0).any():
            raise _damaged(path)
        ranges.append((path, 8 * (piece.all_documents + 1) + int(offsets[0]), int(offsets[-1] - offsets[0])))
        sizes.append(np.diff(offsets))
    objects = bytearray(sum(size for _, _, size in ranges))
    done = 0
    for path, start, size in ranges:
        _read_into(path, start, memoryview(objects)[done : done + size])
        done += size
    return objects, _joined(sizes, np.int64)


def _weights(slices: list[_Slice]) -> npt.NDArray[np.float32]:
    """Loss weights of all documents."""
    weights = np.empty(sum(len(piece.documents) for piece in slices), WEIGHT)
    done, view = 0, weights.data.cast("B")
    for piece in slices:
        size = len(piece.documents) * WEIGHT.itemsize
        _read_into(weights_file(piece.prefix), piece.documents.start * WEIGHT.itemsize, view[done : done + size])
        done += size
    return weights


def _mask(slices: list[_Slice]) -> tuple[npt.NDArray[np.uint32], bytearray]:
    """Trained targets of all documents, and of their tokens."""
    counts = np.empty(sum(len(piece.documents) for piece in slices), COUNT)
    mask = bytearray(sum(len(piece.tokens) for piece in slices))
    documents = tokens = 0
    for piece in slices:
        path, at = mask_file(piece.prefix), piece.documents
        some = counts[documents : documents + len(at)]
        _read_into(path, at.start * COUNT.itemsize, some.data.cast("B") if len(at) else memoryview(b""))
        offset = piece.all_documents * COUNT.itemsize + piece.tokens.start
        _read_into(path, offset, memoryview(mask)[tokens : tokens + len(piece.tokens)])
        documents, tokens = documents + len(at), tokens + len(piece.tokens)
    return counts, mask


def _read_into(path: Path, offset: int, target: memoryview) -> None:
    """Fill a buffer from a place of a file."""
    with storage.open_regular(path) as file:
        file.seek(offset)
        while len(target):
            count = file.readinto(target)
            if not count:
                raise _damaged(path)
            target = target[count:]


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged: it is not what the first pass of the shuffle wrote; remove it and run "
        "`pipeline preprocess RUN.yaml` again, which makes it again"
    )
