"""Receipts: what was made of a link of a unit, and how to tell that it is still there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from pipeline.data import store
from pipeline.data.indexed import metadata_file, numbered, part_files, part_prefix
from pipeline.errors import UserError

TRAIN = "train"
"""The split of the documents that no other split takes."""
MANIFEST_FILE = "manifest.json"
RECEIPT_KEYS = (
    "unit",
    "link",
    "last",
    "start",
    "next",
    "input",
    "config_hash",
    "engine",
    "pieces",
    "records",
    "rejected",
    "checked",
    "splits",
)


def receipt_path(source: Path, unit: int, link: int = 0) -> Path:
    """Receipt of a link."""
    return _beside(source, unit, link, ".json")


def rejected_path(source: Path, unit: int, link: int = 0) -> Path:
    """Rejected records of a link; there is a file only if there are any."""
    return _beside(source, unit, link, ".rejected.jsonl")


def _beside(source: Path, unit: int, link: int, suffix: str) -> Path:
    path = numbered(source / "receipts", unit, link)
    return path.with_name(path.name + suffix)


def read_receipt(source: Path, unit: int, link: int = 0) -> Any:
    """The receipt of a link; None if there is none that can be read."""
    try:
        receipt = store.get_json(receipt_path(source, unit, link), *RECEIPT_KEYS)
    except (FileNotFoundError, UserError):
        return None
    return receipt if _is_sound(receipt) else None


def _is_sound(receipt: Any) -> bool:
    """Whether what a receipt says of damaged files is of the right kinds."""
    damaged, dropped = receipt.get("damaged", []), receipt.get("dropped", [])
    if not (isinstance(damaged, list) and isinstance(dropped, list) and all(isinstance(name, str) for name in dropped)):
        return False
    kinds = {"piece": int, "reason": str, "detail": str, "lost": int}
    return all(
        isinstance(each, dict)
        and each.keys() == kinds.keys()
        and all(type(each[name]) is kind for name, kind in kinds.items())
        and min(each["piece"], each["lost"]) >= 0
        for each in damaged
    )


def read_receipts(source: Path, unit: int) -> Iterator[Any]:
    """The receipts of a unit from its first link on; the last one says so, or the next is missing."""
    for link in itertools.count():
        receipt = read_receipt(source, unit, link)
        if receipt is None:
            return
        yield receipt
        if receipt["last"]:
            return


class Receipts:
    """The receipts of a source, each as it was when it was asked for first: none is read twice.

    Memory: about a kilobyte a link.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._read: dict[int, list[bytes]] = {}

    def of(self, unit: int) -> Iterator[Any]:
        """As `read_receipts`."""
        if unit not in self._read:
            self._read[unit] = [orjson.dumps(receipt) for receipt in read_receipts(self._source, unit)]
        return map(orjson.loads, self._read[unit])


def link_files(folder: Path, unit: int, link: int, split: dict[str, Any]) -> dict[str, Path]:
    """Paths of the files of a link's part, by the names in its receipt.

    Args:
        folder: of the dataset.
        unit: of the link.
        link: its number.
        split: what the receipt says of the split.
    """
    prefix = part_prefix(folder, unit, link)
    files = dict(zip(("bin", "idx", "prov"), part_files(prefix), strict=True)) | {"meta": metadata_file(prefix)}
    return {name: files[name] for name in split["files"]}


def files_are_there(source: Path, receipt: dict[str, Any], below: str = "") -> bool:
    """Whether all files of a link have the sizes in its receipt.

    Args:
        source: folder of the source.
        receipt: of the link.
        below: sub-folder of the dataset's folders that the parts are in.
    """
    unit, link = receipt["unit"], receipt["link"]
    try:
        for listed, split in receipt["splits"].items():
            name = store.plain_name(listed, receipt_path(source, unit, link))
            for file, path in link_files(source / name / below, unit, link, split).items():
                if os.stat(path).st_size != split["files"][file]["size"]:
                    return False
        return not receipt["rejected"] or rejected_path(source, unit, link).exists()
    except FileNotFoundError:
        return False
