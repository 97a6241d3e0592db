"""Two decisions about the same documents, compared one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import rich.console
from rich.table import Table

from pipeline.common.console import echo, print_table, say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, percent
from pipeline.common.hashing import key, mix
from pipeline.data.curate.duplicates.kinds import COUNTED, NEAR_SIMILARITY
from pipeline.data.curate.files import REJECTED
from pipeline.data.curate.passes.excerpts import ReadTexts
from pipeline.data.curate.report.build import Excerpt, Key
from pipeline.data.curate.verdicts import Curation, read_curation, read_decisions

KEPT = "kept"
EXAMPLES = 10


class Changed(NamedTuple):
    """A document about which two decisions differ."""

    unit: int
    row: int
    first: str
    """Rule of the first decisions that removed it, or `KEPT`."""
    second: str
    """The same of the second ones."""


@dataclass
class Differences:
    """Differences of two decisions about a source.

    Attributes:
        documents: of the source.
        pairs: documents by (first, second): names of rules, or `KEPT`.
        examples: some documents that one keeps and the other does not, by a keyed hash.
    """

    documents: int = 0
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[Changed] = field(default_factory=list)

    def count(self, first: bool, second: bool) -> int:
        """Documents that the first keeps or does not, and the second."""
        return sum(n for (a, b), n in self.pairs.items() if ((a == KEPT), (b == KEPT)) == (first, second))

    @property
    def changed(self) -> int:
        """Documents that one keeps and the other does not."""
        return self.count(True, False) + self.count(False, True)

    def removed(self, side: int, rule: str) -> int:
        """Documents that a rule removes.

        Args:
            side: 0 for the first decisions, 1 for the second.
            rule: name.
        """
        return sum(count for pair, count in self.pairs.items() if pair[side] == rule)


def find_differences(first: Curation, second: Curation, seed: int) -> Differences:
    """Compare two decisions about a source.

    Args:
        first: decisions.
        second: others, of the same measures.
        seed: of the examples.
    """
    found = Differences()
    drawn: list[tuple[int, Changed]] = []
    for unit, row, a, b in _chunks(first, second):
        found.documents += int((a >= 0).sum())
        numbers, counts = np.unique(np.stack([a, b])[:, a >= 0], axis=1, return_counts=True)
        for (x, y), count in zip(numbers.T.tolist(), counts.tolist(), strict=True):
            found.pairs[_name(first, x), _name(second, y)] += count
        rows = np.flatnonzero((a >= 0) & ((a == 0) != (b == 0)))
        order = mix((rows + row).astype(np.uint64), key(seed, "what if", unit))
        for place in np.argsort(order, kind="stable")[:EXAMPLES].tolist():
            at = int(rows[place])
            changed = Changed(unit, row + at, _name(first, int(a[at])), _name(second, int(b[at])))
            drawn.append((int(order[place]), changed))
        drawn = sorted(drawn)[:EXAMPLES]
    found.examples = [changed for _, changed in drawn]
    return found


def estimated_before(before: Curation, now: Curation) -> bool:
    """True if near duplicates were removed by estimated similarity, and are by counted similarity of the same text."""
    counted = [each.about["settings"].get(NEAR_SIMILARITY) == COUNTED for each in (before, now)]
    had_near = "duplicates.near" in before.rules
    return had_near and counted == [False, True] and before.about["measure_hash"] == now.about["measure_hash"]


def all_changed(first: Curation, second: Curation) -> Iterator[Changed]:
    """All documents that one keeps and the other does not, in their order."""
    for unit, row, a, b in _chunks(first, second):
        for at in np.flatnonzero((a >= 0) & ((a == 0) != (b == 0))).tolist():
            yield Changed(unit, row + at, _name(first, int(a[at])), _name(second, int(b[at])))


def _name(curation: Curation, rule: int) -> str:
    return curation.rules[rule - 1] if rule else KEPT


def _chunks(
    first: Curation, second: Curation
) -> Iterator[tuple[int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(unit, row of the first record, rules of the first, of the second) of each chunk; -1 for rejected records."""
    if first.about["measure_hash"] != second.about["measure_hash"] or first.chunks != second.chunks:
        raise UserError(
            f"{first.decisions} and {second.decisions} are about other documents: their sources were measured with "
            "other settings or files"
        )
    for unit in sorted(first.chunks):
        row = 0
        for a, b in zip(first.read(unit), second.read(unit), strict=True):
            bad = a["flags"] & REJECTED != 0
            yield (
                unit,
                row,
                np.where(bad, -1, a["rule"].astype(np.int64)),
                np.where(bad, -1, b["rule"].astype(np.int64)),
            )
            row += len(a)


_SHOWN = 200


def show_differences(
    console: rich.console.Console, first: Curation, second: Curation, found: Differences, names: tuple[str, str]
) -> None:
    """Print how many documents each rule removes under both, and how many documents one keeps and the other does not.

    Args:
        console: where to.
        first: decisions.
        second: others.
        found: their differences.
        names: of both, for the head of the table.
    """
    source = first.about["source"]
    table = Table("", *names, "change", title=source)
    for column in table.columns[1:]:
        column.justify = "right"
    bounds = [{rule["name"]: rule["bound"] for rule in each.about["rules"]} for each in (first, second)]
    for rule in (KEPT, *dict.fromkeys([*first.rules, *second.rules])):
        counts = [found.removed(side, rule) for side in (0, 1)]
        changed = [_bound(each.get(rule)) for each in bounds]
        bound = f" ({changed[0]} -> {changed[1]})" if changed[0] != changed[1] else ""
        if any(counts) or bound:
            table.add_row(rule + bound, f"{counts[0]:,}", f"{counts[1]:,}", f"{counts[1] - counts[0]:+,}")
    print_table(console, table)
    share = percent(found.changed / max(found.documents, 1), 2)
    say(
        console,
        f"{source}: {counted(found.changed, 'document')} of {found.documents:,} ({share}) change: "
        f"{found.count(True, False):,} kept by {names[0]} alone, {found.count(False, True):,} by {names[1]} alone",
    )


def show_examples(
    console: rich.console.Console, curation: Curation, differences: Differences, read_texts: ReadTexts | None
) -> None:
    """Print documents that change, with their beginnings as far as they can be read, and the number of the others."""
    found: Sequence[Changed] = differences.examples
    texts: Mapping[Key, Excerpt] = {}
    if read_texts is not None:
        texts = read_texts(curation.folder, [(each.unit, each.row) for each in found])
    for each in found:
        excerpt = texts.get((each.unit, each.row))
        where = f"unit {each.unit} row {each.row}" if excerpt is None else excerpt.place
        begin = "" if excerpt is None else f": {' '.join(excerpt.text.split())[:_SHOWN]}"
        say(console, f"  {each.first} -> {each.second}  {where}{begin}")
    if more := differences.changed - len(found):
        say(console, f"  and {more:,} more; --list prints all of them")


def list_changed(first: Curation, second: Curation) -> None:
    """Print all documents that change as JSON Lines."""
    for each in all_changed(first, second):
        line = {"source": first.about["source"], **each._asdict()}
        echo(orjson.dumps(line).decode())


def _bound(bound: float | None) -> str:
    return "off" if bound is None else f"{bound:g}"


def compare(
    folders: tuple[Path, Path],
    console: rich.console.Console,
    read_texts: ReadTexts | None = None,
    *,
    listed: bool = False,
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
