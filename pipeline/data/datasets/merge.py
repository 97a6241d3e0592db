"""`pipeline data merge`: a dataset as one pair of `.bin` and `.idx`, for tools that want a single file.

Everything streams: memory depends neither on the number of parts nor on that of documents.
"""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import links, storage
from pipeline.common.console import Console, byte_progress
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.data.datasets.indexed import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedPart,
    document_lengths,
    part_files,
    part_prefix,
)
from pipeline.data.datasets.manifest import (
    REPAIR,
    REPAIR_ADOPTED,
    REPAIR_DAMAGED,
    datasets_below,
    read_manifest,
    read_parts,
)
from pipeline.data.datasets.target_mask import COUNT, mask_bytes, mask_file, mask_problem
from pipeline.data.datasets.weights import WEIGHT, weights_file, weights_problem

BLOCK_BYTES = 2**20
"""Bytes that are read at a time."""
_MB = 10**6
_BOUND = struct.Struct("<q")


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge."""

    bin: Path
    idx: Path
    parts: int
    documents: int
    sequences: int
    tokens: int
    bytes: int
    """Size of both files."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.bin} and {self.idx.name}: {self.documents:,} documents with {self.tokens:,} tokens out of "
            f"{counted(self.parts, 'part')}, {self.bytes / _MB:,.1f} MB in {self.seconds:.1f} s"
        )


class StreamedIndex:
    """Writes an `.idx` file whose numbers of sequences and documents are known, block by block; constant memory.

    Lengths, offsets and document bounds are three tables, one behind the other; each block goes to three places.
    """

    def __init__(self, file: BinaryIO, dtype: npt.DTypeLike, sequences: int, documents: int) -> None:
        self._file = file
        self._size = np.dtype(dtype).itemsize
        self._expected = (sequences, documents)
        self._places = [HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences]
        self.sequences = self.documents = self.tokens = 0
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype(dtype)], sequences, documents + 1))
        self._put(2, _BOUND.pack(0))

    @staticmethod
    def file_size(sequences: int, documents: int) -> int:
        """Size of the file."""
        return HEADER.size + 12 * sequences + 8 * (documents + 1)

    def add_sequences(self, lengths: npt.NDArray[Any]) -> None:
        """Append sequences.

        Args:
            lengths: in tokens.
        """
        ends = self.tokens + np.cumsum(lengths, dtype=np.int64)
        self._put(0, lengths.astype("<i4").tobytes())
        self._put(1, ((ends - lengths) * self._size).astype("<i8").tobytes())
        self.sequences += len(lengths)
        self.tokens = int(ends[-1]) if len(lengths) else self.tokens

    def add_documents(self, bounds: npt.NDArray[Any]) -> None:
        """Append documents.

        Args:
            bounds: the sequence behind the last one of each, counted over the whole file.
        """
        self._put(2, bounds.astype("<i8").tobytes())
        self.documents += len(bounds)

    def finish(self) -> None:
        """Check that all of it was written."""
        assert (self.sequences, self.documents) == self._expected, (self.sequences, self.documents, self._expected)

    def _put(self, table: int, data: bytes) -> None:
        self._file.seek(self._places[table])
        self._file.write(data)
        self._places[table] += len(data)


def merge(dataset: Path, prefix: Path, *, force: bool = False, console: Console | None = None) -> MergeReport:
    """Write the documents of a dataset, in their order, to PREFIX.bin and PREFIX.idx.

    Every part is compared with its hash on the way. Provenance and metadata have no place in the format; they stay in
    the dataset, whose document n is document n here. Loss weights go to PREFIX.weight and trained targets to
    PREFIX.mask, which `adopt` takes up.

    Args:
        dataset: folder of a dataset.
        prefix: path of the files without a suffix; one of the suffixes is taken off.
        force: replace files that are there.
        console: for the progress bar.

    Raises:
        UserError: there is no dataset, it is damaged, the files are there already, or the disk is too full.
    """
    started = time.monotonic()
    folder = _one_dataset(dataset)
    manifest = read_manifest(folder)
    if manifest.has_pairs:
        raise UserError(
            f"{folder}: its documents are pairs of conversations, and no merged file can say so; use the dataset as it "
            "is, or copy its folder"
        )
    table = read_parts(folder, manifest)
    dtype = np.dtype(manifest.dtype)
    repair = REPAIR_ADOPTED if "adopted" in manifest.settings else None
    parts = _Parts(folder, table, dtype, repair)
    bin_path, idx_path = _output_paths(prefix, force)
    sequences = sum(parts.sequences(index) for index in range(len(table)))
    size = manifest.tokens * dtype.itemsize + StreamedIndex.file_size(sequences, manifest.documents)
    size += manifest.documents * WEIGHT.itemsize if manifest.has_weights else 0
    size += mask_bytes(manifest.documents, manifest.tokens) if manifest.has_mask else 0
    weight_path, mask_path = (path(bin_path.with_suffix("")) for path in (weights_file, mask_file))
    check_space(bin_path.parent, size)
    with (
        byte_progress(console or Console(), "merge", size) as copied,
        storage.NewFile(bin_path) as merged_bin,
        storage.NewFile(idx_path) as merged_idx,
        storage.NewFile(weight_path) as merged_weights,
        storage.NewFile(mask_path) as merged_mask,
        storage.naming(bin_path),
    ):
        index = StreamedIndex(merged_idx.file, dtype, sequences, manifest.documents)
        for number in range(len(table)):
            parts.copy(number, merged_bin.file, index, copied)
            if manifest.has_weights:
                parts.copy_weights(number, merged_weights.file, copied)
            if manifest.has_mask:
                parts.copy_mask(number, merged_mask.file, manifest.documents, copied)
        if (index.sequences, index.documents, index.tokens) != (sequences, manifest.documents, manifest.tokens):
            raise UserError(f"{folder}: its parts and its manifest have different totals; {repair or REPAIR}")
        merged_bin.file.close()
        merged_idx.file.close()
        merged_weights.file.close()
        merged_mask.file.close()
        for path in (idx_path, weight_path, mask_path):  # so that old and new files never belong together
            links.remove(path, missing_ok=True)
        if manifest.has_weights:
            merged_weights.commit()
        if manifest.has_mask:
            merged_mask.commit()
        merged_bin.commit()
        merged_idx.commit()
    return MergeReport(
        bin_path,
        idx_path,
        len(table),
        manifest.documents,
        sequences,
        manifest.tokens,
        size,
        time.monotonic() - started,
    )


def check_space(folder: Path, size: int) -> None:
    """Refuse to begin to write what the disk has no room for.

    Raises:
        UserError: less than `size` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"{folder}: {size:,} bytes must be written there, but {free:,} are free; free some space or choose "
            "another disk"
        )


def _one_dataset(folder: Path) -> Path:
    found = datasets_below(folder)
    if len(found) > 1:
        raise UserError(f"{folder} has {len(found)} datasets; name one of them: {', '.join(map(str, found[:5]))}")
    return found[0]


def _output_paths(prefix: Path, force: bool) -> tuple[Path, Path]:
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    if prefix.is_dir():
        raise UserError(f"{prefix} is a folder; give the path of the files without suffix, like {prefix / 'train'}")
    bin_path, idx_path, _ = part_files(prefix)
    paths = (bin_path, idx_path, weights_file(prefix), mask_file(prefix))
    present = [str(path) for path in paths if path.exists()]
    if present and not force:
        raise UserError(f"{' and '.join(present)} exist already; choose another name, or replace with --force")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for path in prefix.parent.iterdir():
        if path.name.startswith(tuple(f".{made.name}." for made in paths)):
            storage.remove_if_stale(path)
    return bin_path, idx_path


class _Parts:
    """The parts of a dataset, read in blocks and compared with their hashes."""

    def __init__(self, folder: Path, table: npt.NDArray[Any], dtype: np.dtype[Any], repair: str | None) -> None:
        self._folder = folder
        self._table = table
        self._dtype = dtype
        self._missing, self._damaged = repair or REPAIR, repair or REPAIR_DAMAGED

    def sequences(self, index: int) -> int:
        """Number of sequences of a part, from the sizes of its files. Reads none of them."""
        record = self._table[index]
        bin_path, idx_path = self._paths(index)
        try:
            sizes = bin_path.stat().st_size, idx_path.stat().st_size
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} is missing; {self._missing}") from None
        if sizes[0] != int(record["tokens"]) * self._dtype.itemsize:
            raise UserError(f"{bin_path}: {sizes[0]} bytes do not hold its {record['tokens']} tokens; {self._missing}")
        sequences, rest = divmod(sizes[1] - StreamedIndex.file_size(0, int(record["documents"])), 12)
        if sequences < 0 or rest:
            raise UserError(f"{idx_path}: {sizes[1]} bytes do not match its documents; {self._missing}")
        return sequences

    def copy(self, index: int, data: BinaryIO, merged: StreamedIndex, copied: Callable[[int], None]) -> None:
        """Append a part to both files."""
        bin_path, idx_path = self._paths(index)
        with _Hashed(bin_path) as source:
            for block in source.blocks(bin_path.stat().st_size):
                data.write(block)
                copied(len(block))
        self._check(index, "bin", source)
        sequences, documents = self.sequences(index), int(self._table[index]["documents"])
        first = merged.sequences
        with _Hashed(idx_path) as source:
            for block in source.blocks(HEADER.size):
                if block != HEADER.pack(MAGIC, VERSION, CODES[self._dtype], sequences, documents + 1):
                    raise UserError(f"{idx_path} is damaged: its header is not that of the part; {self._damaged}")
            for block in source.blocks(4 * sequences):
                merged.add_sequences(np.frombuffer(block, "<i4"))
            for _ in source.blocks(8 * sequences):  # offsets follow from the lengths
                pass
            for _ in source.blocks(8):  # the first bound is 0
                pass
            for block in source.blocks(8 * documents):
                merged.add_documents(np.frombuffer(block, "<i8") + first)
        copied(source.size)
        self._check(index, "idx", source)

    def copy_weights(self, index: int, data: BinaryIO, copied: Callable[[int], None]) -> None:
        """Append the loss weights of a part."""
        path = weights_file(self._paths(index)[0].with_suffix(""))
        if problem := weights_problem(path, int(self._table[index]["documents"])):
            raise UserError(f"{problem}; {self._damaged}")
        with _Hashed(path) as source:
            for block in source.blocks(path.stat().st_size):
                data.write(block)
                copied(len(block))
        self._check(index, "weight", source)

    def copy_mask(self, index: int, data: BinaryIO, documents: int, copied: Callable[[int], None]) -> None:
        """Write the trained targets of a part to their two places in the merged file.

        Args:
            index: of the part.
            data: the merged file: counts of all documents, then a byte for each token.
            documents: of all parts.
            copied: told the bytes that were copied.
        """
        bin_path, _ = self._paths(index)
        path, part = mask_file(bin_path.with_suffix("")), IndexedPart(bin_path.with_suffix(""))
        if problem := mask_problem(path, document_lengths(part)):
            raise UserError(f"{problem}; {self._damaged}")
        before = {name: int(self._table[name][:index].sum()) for name in ("documents", "tokens")}
        with _Hashed(path) as source:
            for size, place in (
                (part.documents * COUNT.itemsize, before["documents"] * COUNT.itemsize),
                (part.tokens, documents * COUNT.itemsize + before["tokens"]),
            ):
                data.seek(place)
                for block in source.blocks(size):
                    data.write(block)
                    copied(len(block))
        self._check(index, "mask", source)

    def _paths(self, index: int) -> tuple[Path, Path]:
        record = self._table[index]
        return part_files(part_prefix(self._folder, int(record["unit"]), int(record["link"])))[:2]

    def _check(self, index: int, name: str, source: _Hashed) -> None:
        if source.digest.intdigest() != int(self._table[index][name]):
            raise UserError(
                f"{source.path}: its bytes differ from those that were written (other xxh3), so nothing was merged; "
                f"{self._damaged}"
            )


class _Hashed:
    """A file that is read from its beginning in blocks, with the hash of what was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = xxhash.xxh3_64()
        self.size = 0
        self._file = storage.open_regular(path)

    def blocks(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, as many as there are; blocks but the last are multiples of 8 bytes."""
        while size:
            block = self._file.read(min(size, BLOCK_BYTES))
            if not block:
                return
            size -= len(block)
            self.size += len(block)
            self.digest.update(block)
            yield block

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
