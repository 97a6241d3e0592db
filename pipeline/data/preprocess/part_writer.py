"""The documents of one chunk and split: kept in reading order, then written as a part in keyed order."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import storage
from pipeline.common.hashing import mix
from pipeline.data.datasets.document_records import MetadataWriter, metadata_file
from pipeline.data.datasets.indexed import EDITED, PROVENANCE, SPLIT, HashedFile, IndexedWriter, part_files
from pipeline.data.datasets.target_mask import mask_file, write_mask_blocks
from pipeline.data.datasets.weights import write_weights
from pipeline.data.sources.records import Document

_BLOCK_BYTES = 2**22
"""Bytes of documents that are brought into order at a time."""
_HELD_BYTES = 2**24
"""Bytes of records that are kept in memory; more are kept in a file."""


class PartWriter:
    """Collects documents, then writes `.bin`, `.idx`, `.prov` and, where they are kept, `.meta`, `.weight`, `.mask`.

    As a context manager it removes what is not committed. Memory: 28 bytes per document, and 130 while it is committed;
    and up to `_HELD_BYTES` of tokens and of metadata.

    Args:
        prefix: of the part.
        unit: number of the unit, for the provenance.
        dtype: of the token ids.
        end: the end-of-document token.
        keeps_metadata: whether to write a `.meta` file.
        keeps_weights: whether to write a `.weight` file.
        keeps_mask: whether to write a `.mask` file.
    """

    def __init__(
        self,
        folder: Path,
        prefix: Path,
        unit: int,
        dtype: np.dtype[Any],
        end: int,
        keeps_metadata: bool,
        keeps_weights: bool = False,
        keeps_mask: bool = False,
    ) -> None:
        storage.make_below(folder, prefix.parent)
        self._prefix = prefix
        self._unit = unit
        self._dtype = dtype
        self._end = np.array([end], dtype).tobytes()
        self._lengths = array("q")
        self._rows = array("Q")
        self._id_hashes = array("Q")
        self._pieces: dict[int, list[int]] = {}
        # By document that was encoded in pieces: their lengths.
        self._edited: list[int] = []
        self._text_bytes = 0
        self._waiting: list[bytes | memoryview] = []
        self._scratch_files = ExitStack()
        self._tokens = self._scratch_files.enter_context(_Scratch(prefix))
        self._metadata: _Scratch | None = None
        if keeps_metadata:
            self._metadata = self._scratch_files.enter_context(_Scratch(metadata_file(prefix)))
        self._metadata_lengths = array("q")
        self._weights = array("d") if keeps_weights else None
        self._mask: _Scratch | None = None
        if keeps_mask:
            self._mask = self._scratch_files.enter_context(_Scratch(mask_file(prefix)))
        self._trained = array("q")

    def add(self, document: Document, text_bytes: int, ids: memoryview, mask: bytes = b"") -> None:
        """Take a document.

        Args:
            document: without its text.
            text_bytes: of its text.
            ids: bytes of the dtype, which have to stay as they are until `flush`; the end-of-document token follows.
            mask: for each token and the end-of-document token, where a `.mask` is written, see `target_mask`.
        """
        self._waiting += (ids, self._end)
        self._note(document, text_bytes, len(ids) // self._dtype.itemsize + 1)
        if self._mask is not None:
            assert len(mask) == self._lengths[-1], (len(mask), self._lengths[-1])
            self._mask.write(mask)
            self._trained.append(mask.count(1))

    def add_long(self, document: Document, text_bytes: int, pieces: Iterator[memoryview]) -> None:
        """Take a document in pieces, of which one is held at a time."""
        self.flush()
        lengths = []
        for ids in pieces:
            self._tokens.write(ids)
            lengths.append(len(ids) // self._dtype.itemsize)
        self._tokens.write(self._end)
        lengths[-1] += 1
        # A sequence of no tokens (text that a normalizer drops) would be no sequence to other programs.
        self._pieces[len(self._lengths)] = [length for length in lengths if length]
        self._note(document, text_bytes, sum(lengths))

    def _note(self, document: Document, text_bytes: int, length: int) -> None:
        if document.edited:
            self._edited.append(len(self._lengths))
        self._lengths.append(length)
        self._rows.append(document.row)
        self._id_hashes.append(xxhash.xxh3_64_intdigest(document.id.encode()))
        self._text_bytes += text_bytes
        if self._weights is not None:
            self._weights.append(document.weight)
        if self._metadata is not None:
            kept = document.metadata or b"{}"
            self._metadata.write(kept)
            self._metadata_lengths.append(len(kept))

    def flush(self) -> None:
        """Write what was added to the file."""
        self._tokens.write(b"".join(self._waiting))
        self._waiting.clear()

    def commit(self, order_key: int, check: Callable[[dict[str, HashedFile]], None]) -> dict[str, Any]:
        """Write the part and commit it if `check` of its files does not raise; counts, sizes and hashes."""
        self.flush()
        count = len(self._lengths)
        lengths = np.array(self._lengths, dtype=np.int64)
        rows = np.array(self._rows, dtype=np.uint64)
        order = np.argsort(mix(rows, order_key), kind="stable")
        records = np.zeros(count, PROVENANCE)
        records["unit"] = self._unit
        records["row"] = rows[order]
        records["id_hash"] = np.array(self._id_hashes, dtype=np.uint64)[order]
        place = np.empty_like(order)
        place[order] = np.arange(count)
        pieces = {int(place[document]): lengths for document, lengths in self._pieces.items()}
        records["flags"][list(pieces)] = SPLIT
        records["flags"][place[self._edited]] |= EDITED
        with ExitStack() as stack:
            provenance = stack.enter_context(HashedFile(part_files(self._prefix)[2]))
            writer = stack.enter_context(IndexedWriter(self._prefix, self._dtype))
            files = {"bin": writer.bin, "prov": provenance}
            provenance.write(records.tobytes())
            self._write_tokens(writer, lengths, order, pieces)
            if self._metadata is not None:
                files["meta"] = self._write_metadata(stack, order)
            if self._weights is not None:
                weights = np.array(self._weights, dtype=np.float64)[order]
                files["weight"] = stack.enter_context(write_weights(self._prefix, weights))
            if self._mask is not None:
                files["mask"] = self._write_mask(stack, lengths, order)
            check(files)
            for name in files.keys() - {"bin"}:
                files[name].commit()
        files["idx"] = writer.idx
        return {
            "documents": count,
            "tokens": int(lengths.sum()),
            "text_bytes": self._text_bytes,
            **({"trained_tokens": sum(self._trained)} if self._mask is not None else {}),
            "files": {name: file.listing() for name, file in files.items()},
        }

    def _write_tokens(
        self,
        writer: IndexedWriter,
        lengths: npt.NDArray[np.int64],
        order: npt.NDArray[np.int64],
        pieces: dict[int, list[int]],
    ) -> None:
        ordered = lengths[order]
        for first, last, data in self._tokens.gather(lengths * self._dtype.itemsize, order):
            longer = {at - first: pieces[at] for at in pieces if first <= at < last}
            sequences: Sequence[int] | npt.NDArray[np.int64] = ordered[first:last]
            if longer:
                each = [longer.get(at, [int(length)]) for at, length in enumerate(sequences)]
                sequences = [length for document in each for length in document]
            writer.add_documents(data, sequences, {at: len(parts) for at, parts in longer.items()})

    def _write_metadata(self, stack: ExitStack, order: npt.NDArray[np.int64]) -> HashedFile:
        assert self._metadata is not None
        lengths = np.array(self._metadata_lengths, dtype=np.int64)
        writer = MetadataWriter(self._prefix, lengths[order])
        stack.enter_context(writer.file)
        for _, _, data in self._metadata.gather(lengths, order):
            writer.write(data)
        return writer.file

    def _write_mask(self, stack: ExitStack, lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> HashedFile:
        assert self._mask is not None
        counts = np.array(self._trained, dtype=np.int64)[order]
        blocks = (data for _, _, data in self._mask.gather(lengths, order))
        return stack.enter_context(write_mask_blocks(self._prefix, counts, blocks))

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch_files.close()


class _Scratch(storage.NewFile):
    """Records that are read back in another order: few in memory, many in a file."""

    def __init__(self, final: Path) -> None:
        super().__init__(final, "w+b")
        self._held: bytearray | None = bytearray()
        # None from when all are in the file.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held is not None:
            self._held += data
            if len(self._held) <= _HELD_BYTES:
                return
            data, self._held = self._held, None
        with storage.naming(self.final):
            self.file.write(data)

    def gather(self, lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, bytes]]:
        """The records in `order`: (first, end, their bytes) for a few megabytes at a time."""
        self.file.flush()
        starts = np.cumsum(lengths) - lengths
        ends = np.cumsum(lengths[order])
        first = 0
        while first < len(order):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + _BLOCK_BYTES, side="right")), first + 1)
            chosen = order[first:last]
            yield first, last, b"".join(self._records(starts[chosen].tolist(), lengths[chosen].tolist()))
            first = last

    def _records(self, starts: list[int], lengths: list[int]) -> list[bytes] | list[memoryview]:
        wanted = zip(starts, lengths, strict=True)
        if self._held is not None:
            view = memoryview(self._held)
            return [view[start : start + length] for start, length in wanted]
        descriptor = self.file.fileno()
        return [os.pread(descriptor, length, start) for start, length in wanted]

    def __exit__(self, *error: Any) -> None:
        with suppress(OSError):  # a full disk; the write before has raised it
            self.file.close()
        super().__exit__(*error)
