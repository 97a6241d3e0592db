"""Decisions in a folder, compared with the active ones or with those in another folder."""

from __future__ import annotations

from pathlib import Path

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.data.curate.passes.excerpts import ReadTexts
from pipeline.data.curate.results.differences import find_differences
from pipeline.data.curate.results.show_differences import list_changed, show_differences, show_examples
from pipeline.data.curate.verdicts import Curation, read_curation, read_decisions


def compare(
    folders: tuple[Path, Path], console: Console, read_texts: ReadTexts | None = None, *, listed: bool = False
) -> None:
    """Print which documents two decisions keep, and the examples that differ.

    Args:
        folders: each of decisions (`SOURCE/curate/decisions/HASH`), or of a curation (`SOURCE/curate`) for the active
            ones.
        console: where to.
        read_texts: reads the beginnings of documents.
        listed: list all documents that differ, as JSON Lines.

    Raises:
        UserError: they are not decisions about the same documents.
    """
    first, second = map(open_decisions, folders)
    if listed:
        list_changed(first, second)
        return
    found = find_differences(first, second, 0)
    names = (first.decisions.name, second.decisions.name)
    show_differences(console, first, second, found, names if names[0] != names[1] else ("first", "second"))
    show_examples(console, first, found, read_texts)


def open_decisions(folder: Path) -> Curation:
    """Decisions in a folder: of decisions, or of a curation for the active ones."""
    folder = folder.absolute()
    if folder.parent.name == "decisions":
        return read_decisions(folder)
    if (folder / "decisions").is_dir():
        return read_curation(folder)
    raise UserError(f"{folder} has no decisions; name SOURCE/curate, or SOURCE/curate/decisions/HASH")
