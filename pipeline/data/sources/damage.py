"""Files that cannot be read to their end: what was found of them, and what a user is told."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.data.sources.compression import StreamError
from pipeline.data.sources.globs import File
from pipeline.data.sources.reader import Reader
from pipeline.data.sources.records import Damage, Unit

DAMAGED_FILE = "damaged.jsonl"
"""In a source's folder: what could not be read, a line for each place."""
_SHOWN = 20
_WAYS = "Fetch them again, or leave them out with exclude"
_READERS = 8
"""Files that are looked at at once: a network file system takes its time for each."""


class DamagedFile(NamedTuple):
    """A file that cannot be read to its end."""

    file: File
    reason: str
    detail: str
    lost: int
    """Bytes on disk whose text is missing."""
    salvaged: int = 0
    """Bytes of text that are used all the same, without a checksum."""

    @property
    def is_cut(self) -> bool:
        """Tell whether a part of it is missing, so that nobody knows how much was lost."""
        return "truncated" in self.reason

    def __str__(self) -> str:
        if self.salvaged:
            return f"{self.file.path}: {self.reason}: {self.detail}"
        lost = "all of it" if self.lost >= self.file.size else f"{size(self.lost)} of {size(self.file.size)}"
        return f"{self.file.path}: {self.reason}, {lost} is lost: {self.detail}"


def damaged_files(unit: Unit, damage: Sequence[Damage]) -> list[DamagedFile]:
    """Damage of pieces of a unit, with their files."""
    return [
        DamagedFile(unit.pieces[each.piece].file, each.reason, each.detail, each.lost, each.salvaged)
        for each in damage
        if each.piece < len(unit.pieces)
    ]


def damage_in(unit: Unit, receipt: Any) -> list[DamagedFile]:
    """Damage in the files of a chunk, by its receipt."""
    return damaged_files(unit, [Damage(**damage) for damage in receipt.get("damaged", [])])


def in_words(damaged: Sequence[DamagedFile], total: int) -> str:
    """Number of damaged files, and their loss.

    Args:
        damaged: what was found.
        total: bytes of all files of the source.
    """
    files, lost = len({each.file.name for each in damaged}), sum(each.lost for each in damaged)
    salvaged = sum(each.salvaged for each in damaged)
    used = f"; {size(salvaged)} of text before a break are used without a checksum" if salvaged else ""
    missing = ", besides what is missing behind a break" if any(each.is_cut for each in damaged) else ""
    return (
        f"{counted(files, 'file')} cannot be read to {'its' if files == 1 else 'their'} end; {size(lost)} of "
        f"{size(total)} ({100 * lost / max(total, 1):.3g} %) {'is' if files == 1 else 'are'} lost{used}{missing}"
    )


def damaged_error(source: str, damaged: Sequence[DamagedFile], total: int, ways: str = _WAYS) -> UserError:
    """The error about damaged files of a source.

    Args:
        source: its name.
        damaged: what was found.
        total: bytes of all its files.
        ways: what a user may do besides setting `on_damaged_file`.
    """
    lines = "\n".join(f"  {each}" for each in damaged[:_SHOWN])
    more = f"\n  and {len(damaged) - _SHOWN:,} more" if len(damaged) > _SHOWN else ""
    return UserError(
        f"source {source!r}: {in_words(damaged, total)}:\n{lines}{more}\n{ways}. Or set "
        "data.preprocess.on_damaged_file: keep to use the text before the damage as far as checksums hold (nothing of "
        "a file of one gzip member or zstd frame), salvage to use also the unchecked text before the break of a cut "
        "file, or drop to use nothing of these files"
    )


def find_damaged_ends(files: Sequence[File], reader: Reader) -> list[DamagedFile]:
    """Files of which their first or last bytes say that they are damaged: empty, of another kind, without a footer.

    Most damage is seen only by reading a file to its end. This costs one read a file.
    """
    suspects = reader.suspects(files)
    with ThreadPoolExecutor(_READERS) as readers:
        return [found for found in readers.map(partial(_look, reader), suspects) if found is not None]


def _look(reader: Reader, file: File) -> DamagedFile | None:
    try:
        reader.check_ends(file)
    except StreamError as error:
        return DamagedFile(file, error.reason, error.detail, file.size)
    return None
