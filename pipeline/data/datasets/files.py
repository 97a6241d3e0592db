"""Names of the files in the folder of a source, and of a dataset in it."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.datasets.indexed import numbered

TRAIN = "train"
"""The split of the documents that no other split takes."""
MANIFEST_FILE = "manifest.json"
PARTS_FILE = "parts.bin"
PLAN_FILE = "plan.json"
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
MORE_RECEIPT_KEYS = ("curated", "damaged", "dropped", "edited_bytes", "max_zstd_window", "salvage")
"""Those that a receipt need not have."""


def receipt_path(source: Path, unit: int, chunk: int = 0) -> Path:
    """Receipt of a chunk."""
    return _beside(source, unit, chunk, ".json")


def rejected_path(source: Path, unit: int, chunk: int = 0) -> Path:
    """Rejected records of a chunk; there is a file only if there are any."""
    return _beside(source, unit, chunk, ".rejected.jsonl")


def _beside(source: Path, unit: int, chunk: int, suffix: str) -> Path:
    path = numbered(source / "receipts", unit, chunk)
    return path.with_name(path.name + suffix)
