"""Texts of a measured chunk, read again from the source files and cleaned as they were when they were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import CleanConfig, PiiConfig
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.measurers import CLEAN
from pipeline.data.curate.scope import Chunk
from pipeline.data.datasets.files import receipt_path
from pipeline.data.sources.reader import UnitReader
from pipeline.data.work.planned_units import PlannedUnits
from pipeline.data.work.receipts import read_receipt
from pipeline.data.work.worker_pool import Progress

ChunkTexts = Callable[[Chunk, npt.NDArray[np.int64], Progress], Iterator[str]]
"""Reads the texts of some rows of a chunk, ascending; importable, because jobs are pickled."""


def read_chunk_texts(chunk: Chunk, rows: npt.NDArray[np.int64], progress: Progress) -> Iterator[str]:
    """Cleaned texts of rows of a chunk.

    Args:
        chunk: of this run, or of a finished curation; its folder has all that is needed.
        rows: in the chunk, ascending, of documents.
        progress: called with 0 as a sign of life.

    Raises:
        UserError: the files changed since they were measured, or cannot be cleaned in the same way here.
    """
    planned = _planned(chunk.curation)
    receipt = read_receipt(chunk.curation, chunk.unit, chunk.chunk)
    if receipt is None:
        path = receipt_path(chunk.curation, chunk.unit, chunk.chunk)
        raise UserError(f"{path} is missing or damaged; run `pipeline curate` again, which measures its chunk again")
    dropped = dict.fromkeys(receipt.get("dropped", []), ("damaged", ""))
    unit = planned.unit(chunk.unit)
    as_measured = {"dropped": dropped, "salvage": receipt.get("salvage", False)}
    if refused := receipt.get("max_zstd_window"):
        as_measured["max_zstd_window"] = refused
    reader = UnitReader(unit, replace(planned.reader, **as_measured), tuple(receipt["start"]))
    reader.beat = lambda: progress(0)
    cleaner = cleaner_of(planned.plan["settings"].get(CLEAN, {}), chunk.curation)
    end = receipt["next"] and tuple(receipt["next"])
    wanted = iter((rows + chunk.first).tolist())
    row = next(wanted, None)
    for document in reader:
        if document.row == row:
            yield cleaner.clean(document.text)
            row = next(wanted, None)
        if reader.position == end:
            break
    if row is not None or reader.input_hash != receipt["input"]["hash"]:
        raise UserError(
            f"the input of {unit} changed since `pipeline curate` measured it; restore the files, or remove "
            f"{chunk.curation} to measure them as they are now"
        )


def cleaner_of(settings: dict[str, Any], curation: Path) -> Cleaner:
    """The cleaner whose `settings` a plan has.

    Args:
        settings: of the plan, by `Cleaner.settings`.
        curation: folder of the plan, for messages.

    Raises:
        UserError: this version cleans otherwise, or a library is another one.
    """
    pii = settings.get("pii", {})
    config = CleanConfig(
        mojibake="mojibake" in settings,
        pii=PiiConfig(**dict.fromkeys(pii.get("kinds", ()), "mask")),
        lines=[name for name, _ in settings.get("lines", {}).get("presets", ())],
    )
    cleaner = Cleaner(config, pii.get("seed", 0))
    if cleaner.settings() != settings:
        raise UserError(
            f"{curation} has texts that were cleaned by {settings}, which is {cleaner.settings()} here; curate it "
            "again, or install the versions that it was made with"
        )
    return cleaner


@lru_cache(maxsize=4)
def _planned(curation: Path) -> PlannedUnits:
    return PlannedUnits(curation)
