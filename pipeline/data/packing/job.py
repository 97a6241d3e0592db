"""A block of packs: what worker processes make; `make.py` has the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipeline.common import storage
from pipeline.common.hashing import value_hash
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import HashedFile, numbered
from pipeline.data.datasets.packing.best_fit import Place, quickest
from pipeline.data.datasets.packing.blocks import group_lengths, pack_groups
from pipeline.data.datasets.packing.files import FileListing, block_bytes, block_path, packs_folder
from pipeline.data.work.worker_pool import Progress

DOCUMENT_BYTES = 8
"""Bytes that are read of a document: where it begins."""


class BlockReceipt(BaseModel):
    """Schema of the receipt of a block.

    Attributes:
        block: its number.
        identity: hash of all that decides the packs.
        groups: packs of each group.
        chunks: number of chunks.
        cut: documents of several chunks.
        file: of the block.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    block: int
    identity: str
    groups: list[int] = Field(min_length=1)
    chunks: int
    cut: int
    file: FileListing


@dataclass(frozen=True)
class PackJob:
    """A block to make.

    Attributes:
        dataset: folder of the dataset.
        length: L, tokens of a pack.
        block: number of the block.
        documents: of the block, [first, end).
        group: documents that are packed together.
        identity: hash of all that decides the packs.
    """

    dataset: Path
    length: int
    block: int
    documents: tuple[int, int]
    group: int
    identity: str

    @property
    def bytes(self) -> int:
        """Bytes that are read, for progress."""
        return DOCUMENT_BYTES * (self.documents[1] - self.documents[0])

    def __str__(self) -> str:
        return f"block {self.block} of the packs of {self.length:,} tokens of {self.dataset}"


def receipt_file(folder: Path, block: int) -> Path:
    """Receipt of a block in a folder of packs."""
    return numbered(folder / "receipts", block).with_suffix(".json")


def hash_of(identity: dict[str, Any]) -> str:
    """Hash of all that decides the packs."""
    return value_hash(identity)


def make_packer(documents: int) -> Callable[[PackJob, Progress], BlockReceipt]:
    """In a worker process: the function that runs a `PackJob`.

    Args:
        documents: that the worker will pack, about.
    """
    return partial(pack_block, quickest(documents))


def pack_block(engine: Place, job: PackJob, progress: Progress) -> BlockReceipt:
    """Make a block: commit its file, then its receipt, which is returned.

    Raises:
        UserError: a part of the dataset is missing or damaged, or a document too long.
        OSError: the disk is full, say; nothing half-written stays.
    """
    dataset = _opened(job.dataset, (job.dataset / "manifest.json").stat().st_mtime_ns)
    lengths = group_lengths(dataset, *job.documents, job.group)
    progress(job.bytes // 2)
    arrays = pack_groups(lengths, job.length, engine)
    folder = packs_folder(job.dataset, job.length)
    path, receipt_path = block_path(folder, job.block), receipt_file(folder, job.block)
    with storage.naming(folder):
        storage.make_below(folder, path.parent)
        with HashedFile(path) as file:
            for data in block_bytes(arrays):
                file.write(data)
            file.commit()
        receipt = BlockReceipt(
            block=job.block,
            identity=job.identity,
            groups=arrays.groups,
            chunks=len(arrays.chunks),
            cut=arrays.cut,
            file=FileListing(**file.listing()),
        )
        storage.make_below(folder, receipt_path.parent)
        storage.put_json(receipt_path, receipt.model_dump())
    progress(job.bytes - job.bytes // 2)
    return receipt


@lru_cache(maxsize=2)
def _opened(folder: Path, mtime_ns: int) -> Dataset:
    return Dataset.open(folder)
