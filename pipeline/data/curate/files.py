"""Names and records of what curation writes.

Below the folder of a source:

- `curate/plan.json`: files, units and all that decides the measures; the form is that of `preprocess`
- `curate/receipts/`: of the chunks of units, in the form of those of `preprocess`, so places are found in the same way
- `curate/measured/00000/00000012-00003.NAME`: what was measured of a chunk
- `curate/excerpts/`: beginnings of some documents, for reports
- `curate/decisions/HASH/`: verdicts under one set of bounds, with their receipts, report and `curation.json`
- `curate/curation.json`: the decisions that hold

Below the data folder, `curate/SCOPE/` has what compares documents of several sources.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.data.datasets.indexed import numbered

CURATE = "curate"
"""Folder below that of a source, and below the data folder."""
CURATION_FILE = "curation.json"
MEASURES = "measures"
"""Name of the table of measures of a chunk: a record per row of the unit."""
IDS = "ids"
"""Name of the file of a chunk with the xxh3 of the id of each row, u64; `NOBODY` for a record without one. By it
`data why` finds documents. It decides nothing, and measures of earlier versions do not have it."""
VERDICT = np.dtype(
    [
        ("rule", "<u2"),  # 0: kept; else the number of the rule that removed it, from 1, in `curation.json`
        ("flags", "<u2"),
        ("value", "<f4"),  # of that rule: a measure, a score or a similarity
        ("kept", "<u8"),  # the document (`scope.document`) that it is a duplicate of; else NOBODY
    ]
)
"""Record of a row of a unit; the verdicts of a chunk are an array of these."""
REJECTED = 1
"""Flag of a record that is no document."""
EDITED = 2
"""Flag of a document whose text is edited."""
FIRES_ALONE = 4
"""Flag of a removed document that only this rule removes."""
NOBODY = 2**64 - 1


def curate_folder(source: Path) -> Path:
    """Folder of the curation of a source, by the source's folder."""
    return source / CURATE


def portable(path: Path, data_dir: Path) -> str:
    """Name of a path in files of a data folder: relative if the path is inside, so that the folder may be moved.

    `data_dir / name` is the path again, whichever the name is.
    """
    return str(path.relative_to(data_dir) if path.is_relative_to(data_dir) else path)


def measured_file(curation: Path, unit: int, chunk: int, name: str) -> Path:
    """A file of a chunk, by the folder of the curation."""
    path = numbered(curation / "measured", unit, chunk)
    return path.with_name(f"{path.name}.{name}")


def decisions_folder(curation: Path, decide_hash: str) -> Path:
    """Folder of the decisions under one set of bounds."""
    return curation / "decisions" / decide_hash[:16]


def verdicts_file(decisions: Path, unit: int, chunk: int) -> Path:
    """Verdicts of a chunk, by the folder of the decisions."""
    path = numbered(decisions / "verdicts", unit, chunk)
    return path.with_name(f"{path.name}.verdicts")
