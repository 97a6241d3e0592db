"""A block of packs: what worker processes make; `make.py` has the whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, value_hash
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import HashedFile, numbered
from pipeline.data.datasets.packing import blocks
from pipeline.data.datasets.packing.best_fit import quickest
from pipeline.data.datasets.packing.files import FileListing, block_bytes, block_path, block_sizes
from pipeline.data.work.job import JobDone, ReceiptJob
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
class PackJob(ReceiptJob):
    """A block to make, in a folder of packs. `inputs` is a hash of all that decides the packs.

    Attributes:
        dataset: folder of the dataset.
        length: L, tokens of a pack.
        block: number of the block.
        documents: of the block, [first, end).
        group: documents that are packed together.
    """

    dataset: Path
    length: int
    block: int
    documents: tuple[int, int]
    group: int

    KEYS = ("groups", "chunks", "cut", "file")

    def __str__(self) -> str:
        return f"block {self.block} of the packs of {self.length:,} tokens of {self.dataset}"

    @property
    def receipt(self) -> Path:
        return receipt_file(self.folder, self.block)

    @property
    def identity(self) -> dict[str, Any]:
        return {"block": self.block, "identity": self.inputs}

    def files(self, receipt: dict[str, Any]) -> dict[Path, dict[str, Any]]:
        return {block_path(self.folder, self.block): receipt["file"]}

    def block_receipt(self, *, hashes: bool = False) -> BlockReceipt | None:
        """The receipt, if the block is there with the counts in it.

        Args:
            hashes: compare the hash of the file, too.
        """
        path = block_path(self.folder, self.block)
        try:
            receipt = BlockReceipt.model_validate(self.find())
            with storage.open_regular(path) as file:
                is_same = block_sizes(file.read(64)) == (sum(receipt.groups), receipt.chunks)
            is_same = is_same and (not hashes or f"{file_hash(path):016x}" == receipt.file.xxh3)
        except (FileNotFoundError, NotADirectoryError, UserError, ValidationError):
            return None
        return receipt if is_same else None

    def run(self, shared: Any, progress: Progress) -> JobDone:
        # Without a look: a damaged block may have a receipt that fits, and one command at a time packs a dataset.
        self.make(shared, progress)
        return JobDone()

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Make the block.

        Args:
            shared: documents that a worker will pack, about.
            progress: as in `StageJob.run`.

        Raises:
            UserError: a part of the dataset is missing or damaged, or a document too long.
        """
        dataset = _opened(self.dataset, (self.dataset / "manifest.json").stat().st_mtime_ns)
        lengths = blocks.group_lengths(dataset, *self.documents, self.group)
        progress(self.bytes // 2)
        arrays = blocks.pack_groups(lengths, self.length, quickest(shared))
        path = block_path(self.folder, self.block)
        storage.make_below(self.folder, path.parent)
        with HashedFile(path) as file:
            for data in block_bytes(arrays):
                file.write(data)
            file.commit()
        counts = {"groups": arrays.groups, "chunks": len(arrays.chunks), "cut": arrays.cut}
        return self.put_receipt(self.identity | counts | {"file": file.listing()})


def pack_job(folder: Path, dataset: Path, length: int, inputs: str, block: int, documents: tuple[int, int]) -> PackJob:
    """The job of a block.

    Args:
        folder: of the packs.
        dataset: folder of the dataset.
        length: L, tokens of a pack.
        inputs: hash of all that decides the packs.
        block: its number.
        documents: of the block, [first, end).
    """
    size = DOCUMENT_BYTES * (documents[1] - documents[0])
    return PackJob(folder, f"block-{block:08d}", inputs, size, dataset, length, block, documents, blocks.GROUP)


def receipt_file(folder: Path, block: int) -> Path:
    """Receipt of a block in a folder of packs."""
    return numbered(folder / "receipts", block).with_suffix(".json")


def hash_of(identity: dict[str, Any]) -> str:
    """Hash of all that decides the packs."""
    return value_hash(identity)


@lru_cache(maxsize=2)
def _opened(folder: Path, mtime_ns: int) -> Dataset:
    return Dataset.open(folder)
