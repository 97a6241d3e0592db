"""Finished curations that a scope is compared with: their kept documents always win, and never go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.curation.curate import DuplicatesConfig
from pipeline.data.curate.duplicates.compared import ComparedChunk
from pipeline.data.curate.duplicates.kinds import SIGNATURES, kinds_of
from pipeline.data.curate.duplicates.measure import duplicate_settings
from pipeline.data.curate.files import CURATION_FILE, decisions_folder, verdicts_file
from pipeline.data.curate.scope import Chunk

FinishedChunks = Callable[[Path], Sequence[Chunk]]
"""Chunks of a finished curation by its folder, from its receipts."""


@dataclass(frozen=True)
class FinishedCuration:
    """A curation that is not of this run.

    Attributes:
        folder: `DATA_DIR/SOURCE/curate`.
        chunks: with their verdicts.
    """

    folder: Path
    chunks: tuple[ComparedChunk, ...]

    def numbered(self, source: int) -> tuple[ComparedChunk, ...]:
        """Its chunks as those of a source of a scope."""
        return tuple(replace(each, chunk=replace(each.chunk, source=source)) for each in self.chunks)


def read_curation(folder: Path, settings: DuplicatesConfig, finished_chunks: FinishedChunks) -> FinishedCuration:
    """Open a finished curation.

    Its `curation.json` needs `decide_hash`, `verdicts`, and `duplicates` in `settings`: what `duplicate_settings` gave.

    Args:
        folder: an entry of `data.curate.against`.
        settings: of the duplicates that are looked for.
        finished_chunks: gives its chunks.

    Raises:
        UserError: it is not finished, was measured in another way, or its runs are gone.
    """
    try:
        about = storage.get_json(folder / CURATION_FILE, "decide_hash", "verdicts", "settings")
    except FileNotFoundError:
        raise UserError(
            f"data.curate.against: {folder} is not a finished curation: it has no {CURATION_FILE}. Name the folder "
            "`curate` of a source, and finish `pipeline curate` there"
        ) from None
    _check_settings(folder, settings, about["settings"].get("duplicates") or {})
    decisions = decisions_folder(folder, about["decide_hash"])
    names = [*kinds_of(settings), *([SIGNATURES] if settings.near else [])]
    chunks = []
    for chunk in sorted(finished_chunks(folder), key=lambda each: (each.unit, each.chunk)):
        verdicts = verdicts_file(decisions, chunk.unit, chunk.chunk)
        xxh3 = about["verdicts"].get(str(verdicts.relative_to(decisions)))
        if xxh3 is None:
            raise UserError(f"data.curate.against: {folder / CURATION_FILE} does not list {verdicts}; curate it again")
        each = ComparedChunk(replace(chunk, hashes={**chunk.hashes, "verdicts": xxh3}), verdicts)
        _check_files(each, names)
        chunks.append(each)
    return FinishedCuration(folder, tuple(chunks))


def _check_settings(folder: Path, settings: DuplicatesConfig, theirs: dict[str, Any]) -> None:
    for name, value in duplicate_settings(settings).items():
        if name in kinds_of(settings) or name == "near":
            if theirs.get(name) == value:
                continue
            found = "does not measure it" if name not in theirs else f"has {theirs[name]}"
            raise UserError(
                f"data.curate.duplicates.{name}: {folder} {found}, but {value} is wanted here, and only measures of "
                "one definition can be compared. Curate it again with the same keys, or leave it out of "
                "data.curate.against"
            )


def _check_files(each: ComparedChunk, names: Sequence[str]) -> None:
    for name in names:
        if name not in each.chunk.hashes or not each.path(name).is_file():
            raise UserError(
                f"data.curate.against: {each.path(name)} is missing, by which duplicates are found; run "
                "`pipeline curate` there again, which makes what is missing"
            )
