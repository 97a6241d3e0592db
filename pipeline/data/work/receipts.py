"""Receipts: what was made of a chunk of a unit, and how to tell that it is still there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from pipeline.common import storage
from pipeline.common.hashing import has_broken_seal
from pipeline.data.datasets.files import RECEIPT_KEYS, receipt_path, rejected_path
from pipeline.data.datasets.indexed import named_files, part_prefix
from pipeline.data.tokenization.coverage import RoundTrip

_Count = Annotated[int, Field(ge=0)]
_Place = Annotated[list[int], Field(min_length=4, max_length=4)]
_Pair = Annotated[list[_Count], Field(min_length=2, max_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Input(_Strict):
    hash: str
    stat: str
    read: _Count


class _File(_Strict):
    size: _Count
    xxh3: Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]


class ReceiptSplit(_Strict):
    """Counts and files of a chunk in a split."""

    documents: _Count
    tokens: _Count
    text_bytes: _Count
    files: dict[str, _File]
    unknown_tokens: _Count | None = None
    round_trip: RoundTrip | None = None
    trained_tokens: _Count | None = None
    inner_ends: _Count = 0


class _Damage(_Strict):
    model_config = ConfigDict(strict=True, extra="forbid")
    piece: _Count
    reason: str
    detail: str
    lost: _Count
    salvaged: _Count = 0


class ReceiptCounts(_Strict):
    """The keys of a receipt that are added up; its pieces may be many."""

    unit: _Count
    link: _Count
    last: bool
    input: _Input
    engine: str
    records: _Count
    rejected: dict[str, _Count]
    splits: dict[str, ReceiptSplit]
    curated: dict[str, _Count] = {}
    """Documents that curation removed, by rule."""
    edited_bytes: int = 0
    """Bytes of text that edits of curation took out of documents that stay."""
    damaged: list[_Damage] = []


class Receipt(ReceiptCounts):
    """Schema of a receipt; others may have written to its folder."""

    start: _Place
    next: _Place | None
    config_hash: str
    pieces: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _Pair]
    checked: _Count
    dropped: list[str] = []
    salvage: bool = False
    """Damaged files were salvaged."""
    max_zstd_window: _Count | None = None
    """Where a file has a larger one."""


def read_receipt(source: Path, unit: int, chunk: int = 0) -> Any:
    """The receipt of a chunk; None if there is none that can be read, or it was changed."""
    receipt = storage.find_json(receipt_path(source, unit, chunk), *RECEIPT_KEYS)
    try:
        Receipt.model_validate(receipt)
    except ValueError:
        return None
    return None if has_broken_seal(receipt) else receipt


def read_receipts(source: Path, unit: int) -> Iterator[Any]:
    """The receipts of a unit from its first chunk on; the last one says so, or the next is missing."""
    for chunk in itertools.count():
        receipt = read_receipt(source, unit, chunk)
        if receipt is None:
            return
        yield receipt
        if receipt["last"]:
            return


class Receipts:
    """The receipts of a source, each as it was when it was asked for first: none is read twice.

    Memory: about a kilobyte a chunk.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._read: dict[int, list[bytes]] = {}

    def of(self, unit: int) -> Iterator[Any]:
        """As `read_receipts`."""
        if unit not in self._read:
            self._read[unit] = [orjson.dumps(receipt) for receipt in read_receipts(self._source, unit)]
        return map(orjson.loads, self._read[unit])


def files_are_there(source: Path, receipt: dict[str, Any], below: str = "") -> bool:
    """Tell whether all files of a chunk have the sizes in its receipt.

    Args:
        source: folder of the source.
        receipt: of the chunk.
        below: sub-folder of the dataset's folders that the parts are in.
    """
    unit, chunk = receipt["unit"], receipt["link"]
    sizes: dict[Path, int] = {}
    for listed, split in receipt["splits"].items():
        name = storage.plain_name(listed, receipt_path(source, unit, chunk))
        files = named_files(part_prefix(source / name / below, unit, chunk))
        sizes |= {files[file]: about["size"] for file, about in split["files"].items()}
    return storage.have_sizes(sizes) and (not receipt["rejected"] or rejected_path(source, unit, chunk).exists())
