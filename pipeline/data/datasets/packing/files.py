"""Files of packs, beside the manifest of their dataset: `DATASET/packs/L/`.

`packs.json` names the dataset by its fingerprint and has the size and hash of every other file: `groups.bin`, u64 for
each group, packs before it, and one at the end; and `blocks/`, a file for each million documents. A block is a header,
u32 first chunk of each pack and one at the end, filled up to 8 bytes, and u64 for each chunk. All is little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.common.mapped_file import map_file
from pipeline.common.retry import retried
from pipeline.data.datasets.dataset import READ_AT_ONCE, Dataset
from pipeline.data.datasets.indexed import Descriptor, numbered
from pipeline.data.datasets.packing import blocks
from pipeline.data.datasets.packing.best_fit import IntArray
from pipeline.data.datasets.packing.blocks import NumbersInMemory, PackArrays, PackBlock, PackSection, check_length

PACKS = "packs"
"""Folder of the packs, in that of a dataset."""
INDEX_FILE = "packs.json"
GROUPS_FILE = "groups.bin"
FORMAT_VERSION = 1
"""Raised whenever the files are others, or other packs are made of the same lengths."""
_HEADER = struct.Struct("<8sQQ")
"""Magic, packs, chunks."""
_MAGIC = b"PACKS\0\0\1"
_MAPPED_AT_ONCE = 1024


class FileListing(BaseModel):
    """Size in bytes and xxh3-64 of a file."""

    model_config = ConfigDict(strict=True, frozen=True)

    size: int = Field(ge=0)
    xxh3: str = Field(pattern="^[0-9a-f]{16}$")


class PackIndex(BaseModel):
    """Schema of `packs.json`.

    Attributes:
        dataset: fingerprint of the dataset.
        length: L, tokens of a pack.
        group_documents: documents that are packed together.
        block_documents: documents of a block.
        documents: of the dataset.
        tokens: of the dataset.
        packs: number of packs.
        chunks: number of chunks.
        cut: documents of several chunks.
        groups: the file with the packs before each group.
        blocks: the files of the blocks.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int
    dataset: str
    length: int
    group_documents: int
    block_documents: int
    documents: int
    tokens: int
    packs: int
    chunks: int
    cut: int
    groups: FileListing
    blocks: list[FileListing]

    @property
    def padding(self) -> float:
        """Share of the positions of all packs that have no token."""
        return 1 - self.tokens / (self.packs * self.length) if self.packs else 0.0

    @property
    def identity(self) -> dict[str, Any]:
        """As `identity` of the dataset and the length that it was written for."""
        return {name: getattr(self, name) for name in identity_keys()}


def identity_keys() -> tuple[str, ...]:
    """Keys of `identity`."""
    return ("format_version", "dataset", "length", "group_documents", "block_documents")


def identity(fingerprint: str, length: int) -> dict[str, Any]:
    """All that decides the packs: equal values, equal bytes."""
    values = (FORMAT_VERSION, fingerprint, length, blocks.GROUP, blocks.BLOCK)
    return dict(zip(identity_keys(), values, strict=True))


def packs_folder(dataset: Path, length: int) -> Path:
    """Folder of the packs of a dataset for one length."""
    return dataset / PACKS / str(length)


def block_path(folder: Path, block: int) -> Path:
    """File of a block."""
    return numbered(folder / "blocks", block).with_suffix(".bin")


def pack_command(dataset: Path, length: int) -> str:
    """The command that makes packs, and makes those again that are damaged."""
    return f"`pipeline data pack {dataset} --length {length}`"


def lengths_there(dataset: Path) -> list[int]:
    """Lengths for which a dataset has a folder of packs, ascending."""
    return sorted(int(path.name) for path in (dataset / PACKS).glob("*") if path.name.isdecimal() and path.is_dir())


def block_bounds(documents: int) -> list[tuple[int, int]]:
    """Documents [first, end) of each block of a dataset."""
    return list(pairwise([*range(0, documents, blocks.BLOCK), documents]))


def block_bytes(arrays: PackArrays) -> Iterator[bytes]:
    """The bytes of a block's file."""
    yield _HEADER.pack(_MAGIC, len(arrays.begins) - 1, len(arrays.chunks))
    yield arrays.begins.tobytes() + bytes(-arrays.begins.nbytes % 8)
    yield arrays.chunks.tobytes()


def block_sizes(head: bytes) -> tuple[int, int]:
    """Packs and chunks of a block, by the first bytes of its file; (-1, -1) if they are not those of a block."""
    if len(head) < _HEADER.size:
        return -1, -1
    magic, packs, chunks = _HEADER.unpack_from(head)
    return (packs, chunks) if magic == _MAGIC else (-1, -1)


def groups_bytes(counts: list[int]) -> bytes:
    """The bytes of `groups.bin`.

    Args:
        counts: packs of each group.
    """
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype("<u8").tobytes()


def read_index(dataset: Path, fingerprints: Sequence[str], length: int) -> PackIndex:
    """Read `packs.json` of a dataset.

    Args:
        dataset: its folder.
        fingerprints: of the dataset; those that it has grown to do as well, since groups of documents stay.
        length: tokens of a pack.

    Raises:
        UserError: there is none, or it is damaged, or of another dataset; the message names the command.
    """
    check_length(length)
    path = packs_folder(dataset, length) / INDEX_FILE
    command = pack_command(dataset, length)
    try:
        index = PackIndex.model_validate(storage.get_json(path))
    except FileNotFoundError:
        raise UserError(
            f"{dataset} has no packs of {length:,} tokens, which `data.loader.packing: best_fit` needs; make them with "
            f"{command}, or with `pipeline preprocess` if that makes the dataset"
        ) from None
    except (UserError, ValidationError):
        raise UserError(f"{path} is damaged; make it again with {command}") from None
    if index.identity not in [identity(fingerprint, length) for fingerprint in fingerprints]:
        raise UserError(f"{path} is of another dataset, or of another version of the program; run {command}")
    if len(index.blocks) != len(block_bounds(index.documents)):
        raise UserError(f"{path} is damaged; make it again with {command}")
    return index


def read_groups(dataset: Path, index: PackIndex) -> IntArray:
    """Read `groups.bin`: packs before each group, and of all.

    Raises:
        UserError: it is missing or damaged.
    """
    path = packs_folder(dataset, index.length) / GROUPS_FILE
    try:
        data = storage.read_bytes(path, index.groups.size)
    except (FileNotFoundError, UserError):
        data = b""
    if len(data) != index.groups.size or xxhash.xxh3_64_hexdigest(data) != index.groups.xxh3:
        raise UserError(f"{path} is missing or damaged; make it again with {pack_command(dataset, index.length)}")
    return np.frombuffer(data, "<u8").astype(np.int64)


def file_hashes(dataset: Path, fingerprints: Sequence[str], length: int) -> dict[str, int]:
    """xxh3-64 of all files that readers of packs need, by their names in the folder of the packs.

    Raises:
        UserError: the packs were not made, or the index is damaged.
    """
    folder = packs_folder(dataset, length)
    index = read_index(dataset, fingerprints, length)
    hashes = {INDEX_FILE: file_hash(folder / INDEX_FILE), GROUPS_FILE: int(index.groups.xxh3, 16)}
    for number, listed in enumerate(index.blocks):
        hashes[str(block_path(folder, number).relative_to(folder))] = int(listed.xxh3, 16)
    return hashes


class PackFiles:
    """The packs of a dataset on disk. Opening reads 8 bytes for each group; blocks are opened when touched."""

    def __init__(self, dataset: Dataset, index: PackIndex, groups: IntArray) -> None:
        self.index = index
        self.dataset = dataset
        self._groups = groups

    @classmethod
    def open(cls, dataset: Dataset, length: int) -> PackFiles:
        """Open the packs of a dataset.

        Raises:
            UserError: they were not made, or are damaged; the message names the command.
        """
        index = read_index(dataset.folder, dataset.newer, length)
        return cls(dataset, index, read_groups(dataset.folder, index))

    def sections(self, first: int, end: int) -> list[PackSection]:
        """The packs of documents [first, end), which are all documents of some groups."""
        found = []
        for number in range(first // blocks.BLOCK, -(-end // blocks.BLOCK)) if first < end else ():
            base = number * blocks.BLOCK
            low, high = max(first, base), min(end, base + blocks.BLOCK)
            edges = np.array([*range(low, high, blocks.GROUP), high])
            # Packs are counted from the first of the block.
            of_block, group = base // blocks.GROUP, low // blocks.GROUP
            groups = self._groups[group : group + len(edges)] - self._groups[of_block]
            found.append(PackSection(partial(self._block, number), base, groups, edges))
        return found

    def packs_of_block(self, number: int) -> int:
        """Packs that a block has, by the packs of its groups."""
        edges = np.minimum(np.array([number, number + 1]) * (blocks.BLOCK // blocks.GROUP), len(self._groups) - 1)
        first, end = self._groups[edges].tolist()
        return int(end - first)

    def _block(self, number: int) -> PackBlock:
        return _mapped_block(self, number) if self.dataset.read_by == "mmap" else _pread_block(self, number)


def _open_block(files: PackFiles, number: int) -> PackBlock:
    """A block, compared with what the index says of it."""
    folder, length, size = files.dataset.folder, files.index.length, files.index.blocks[number].size
    path, command = block_path(packs_folder(folder, length), number), pack_command(folder, length)
    try:
        file = retried(lambda: Descriptor(path), path, "opening it")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; make it again with {command}") from None
    found = os.fstat(file.number).st_size
    packs, chunks = block_sizes(os.pread(file.number, _HEADER.size, 0))
    behind = _HEADER.size + (packs + 2) // 2 * 8
    if found != size or size != behind + 8 * chunks or packs != files.packs_of_block(number):
        raise UserError(f"{path} is truncated or damaged; make it again with {command}")
    if files.dataset.read_by == "pread":
        return PackBlock(_NumbersInFile(path, "<u4", _HEADER.size), _NumbersInFile(path, "<u8", behind))
    data = map_file(file.number, size)
    begins: npt.NDArray[Any] = np.frombuffer(data, "<u4", packs + 1, _HEADER.size)
    return PackBlock(NumbersInMemory(begins), NumbersInMemory(np.frombuffer(data, "<u8", chunks, behind)))


_mapped_block = lru_cache(maxsize=_MAPPED_AT_ONCE)(_open_block)
_pread_block = lru_cache(maxsize=max(8, READ_AT_ONCE // 4))(_open_block)


class _NumbersInFile:
    """Numbers of a file that is read, not mapped. A read that fails is tried again, with the file opened anew."""

    def __init__(self, path: Path, dtype: str, offset: int) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._offset = offset
        self._open()

    def _open(self) -> None:
        self._file = Descriptor(self._path)

    def ranges(self, first: IntArray, counts: IntArray) -> IntArray:
        """The numbers [first, first + count) of each range, one range after the other."""
        data = bytearray()
        for start, count in zip(first.tolist(), counts.tolist(), strict=True):
            data += retried(partial(self._read, start, count), self._path, "reading it", self._open)
        return np.frombuffer(data, self._dtype).astype(np.int64)

    def _read(self, first: int, count: int) -> bytes:
        offset, size = self._offset + first * self._dtype.itemsize, count * self._dtype.itemsize
        file, data = self._file, b""
        while len(data) < size:
            more = os.pread(file.number, size - len(data), offset + len(data))
            if not more:
                raise UserError(f"{self._path} ends at byte {offset + len(data)}; it was longer when it was opened")
            data += more
        return data
