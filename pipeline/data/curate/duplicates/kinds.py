"""Runs of a chunk by what they compare, and where the files of the passes lie."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipeline.config.curation.curate import DuplicatesConfig

Kind = Literal["exact", "url", "bands", "lines", "paragraphs"]
RUN_TYPES: dict[Kind, np.dtype[np.void]] = {
    "exact": np.dtype([("hash", "<u8"), ("rest", "<u8"), ("row", "<u4")]),
    "url": np.dtype([("hash", "<u8"), ("rest", "<u8"), ("row", "<u4")]),
    "bands": np.dtype([("hash", "<u8"), ("row", "<u4")]),
    "lines": np.dtype([("hash", "<u8"), ("row", "<u4"), ("line", "<u4")]),
    "paragraphs": np.dtype([("hash", "<u8"), *((name, "<u4") for name in ("row", "line", "lines", "blank", "bytes"))]),
}
"""Records of the runs; `row` is that of the chunk."""
SIGNATURES = "signatures"
"""File of a chunk: uint32 of shape (records, bands * rows)."""
CHECK_COLUMN = "signature_check"
"""Column of the table of measures: `signature_checks` of the document."""
NEAR_SIMILARITY, COUNTED = "near_similarity", "counted"
"""Key of the settings of decisions, and its value: similarity is counted from sets of shingles. Decisions without the
key, of 0.2.0 and earlier, are by its estimate from signatures."""
PassName = Literal["match", "join", "shingles", "rank", "choose", "kept", "lines", "paragraphs"]
RepeatedKind = Literal["lines", "paragraphs"]
"""Kinds of pieces of documents that are compared."""


def kinds_of(settings: DuplicatesConfig) -> tuple[Kind, ...]:
    """Kinds of runs that documents are compared by; pieces of them apart."""
    wanted: dict[Kind, object] = {"exact": settings.exact, "url": settings.url, "bands": settings.near}
    return tuple(kind for kind, value in wanted.items() if value is not None)


def date_keys(settings: DuplicatesConfig) -> tuple[str, ...]:
    """Keys of metadata whose dates `keep` reads, sorted."""
    return tuple(sorted({entry.split(":", 1)[1] for entry in settings.keep if ":" in entry}))


def date_column(key: str) -> str:
    """Column of the table of measures with the date of a key."""
    return f"date:{key}"


def pass_names(settings: DuplicatesConfig) -> tuple[PassName, ...]:
    """Passes that are needed, in their order."""
    found: tuple[PassName, ...] = ()
    if kinds_of(settings):
        found += ("match", "join", *(("shingles",) if settings.near is not None else ()), "rank", "choose")
    if repeated := repeated_kinds(settings):
        found += (*(() if found else ("rank",)), "kept", *repeated)
    return found


def repeated_kinds(settings: DuplicatesConfig) -> tuple[RepeatedKind, ...]:
    """Kinds of pieces that are compared."""
    wanted: dict[RepeatedKind, object] = {"lines": settings.lines, "paragraphs": settings.paragraphs}
    return tuple(kind for kind, value in wanted.items() if value is not None)
