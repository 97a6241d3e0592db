"""Verdict about a document, for people and as JSON."""

from __future__ import annotations

import difflib
import itertools
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.format import counted, cut
from pipeline.common.page.words import figure
from pipeline.data.curate.rules.of_run import LINES_RULE, PARAGRAPHS_RULE
from pipeline.data.curate.url_lists import PREFIX as URL_LISTS_PREFIX
from pipeline.data.provenance.run import first_lines
from pipeline.data.provenance.source_location import Origin
from pipeline.data.sources.records import Document, printable

_TEXT_LINES, _TEXT_CHARACTERS = 400, 100_000
_DIFF_LINES = 5000
_NARROWEST = 24


@dataclass(frozen=True)
class FiredRule:
    """A rule that removes a document.

    Attributes:
        bound: None for rules without one.
        keeps: `min` keeps values from the bound on, `max` up to it.
    """

    name: str
    key: str
    value: float
    bound: float | None
    keeps: str
    about: str

    @classmethod
    def of(cls, about: Mapping[str, Any], value: float) -> FiredRule:
        """A rule as `curation.json` has it, and its value."""
        return cls(about["name"], about["key"], value, about["bound"], about["keeps"], about["about"])

    def __str__(self) -> str:
        if self.name == LINES_RULE:
            return f"{self.name}: all of its lines are in other documents ({self.key})"
        if self.name.startswith(URL_LISTS_PREFIX):
            return f"{self.name}: {self.about} ({self.key})"
        if self.name == PARAGRAPHS_RULE:
            return f"{self.name}: {self.about} {figure(self.value)}, of at most {figure(self.bound)} ({self.key})"
        if self.name.startswith("duplicates."):
            return f"{self.name}: similarity {self.value:.4g}"
        if self._is_within:
            return f"{self.name}: another one, with score {figure(self.value)} ({self.key.rpartition('.')[0]}.keep)"
        sign = "at least" if self.keeps == "min" else "at most"
        return f"{self.name}: {self.about} {figure(self.value)}, kept if {sign} {figure(self.bound)} ({self.key})"

    def to_keep(self) -> str:
        """The change of the run file under which this rule would keep the document."""
        if self.name == "duplicates.near" and self.value < 1:
            return f"{self.key} at least {math.floor(self.value * 1e4 + 1) / 1e4:.4f}"
        if self.name == "duplicates.near":
            return f"{self.key.rpartition('.')[0]}: null"
        if self.name == PARAGRAPHS_RULE and self.value < 1:
            return f"{self.key} at least {_rounded(self.value, math.ceil)}"
        if self.name.startswith("duplicates."):
            return f"{self.key}: null"
        if self.name.startswith(URL_LISTS_PREFIX):
            return f"{self.key} without the entry, or without the list {self.name.removeprefix(URL_LISTS_PREFIX)}"
        if self.name == "clean.empty":
            return f"other edits ({self.key}): nothing is left of the text"
        if self._is_within:
            return f"{self.key.rpartition('.')[0]}.keep with its label"
        if self.keeps == "min":
            return f"{self.key} at most {_rounded(self.value, math.floor)}"
        return f"{self.key} at least {_rounded(self.value, math.ceil)}"

    @property
    def _is_within(self) -> bool:
        """True if the value is within the bound, so that the rule fires for another reason."""
        return self.bound is not None and (
            self.value >= self.bound if self.keeps == "min" else self.value <= self.bound
        )

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""
        return {**vars(self), "to_keep": self.to_keep()}


@dataclass(frozen=True)
class KeptDocument:
    """The document that stays for a duplicate.

    Attributes:
        document: None if it could not be read.
        text: as it was measured; None if it was not asked for.
        jaccard: similarity to the removed one, counted from both texts; None if it was not asked for.
        estimate: the same estimated, by the share of equal values of their signatures.
    """

    source: str
    unit: int
    row: int
    origin: Origin
    id: str | None
    document: Document | None
    text: str | None
    jaccard: float | None
    estimate: float | None

    def __str__(self) -> str:
        id = f", id {printable(self.id)}" if self.id is not None else ""
        return f"{self.source} {self.unit}:{self.row}, {printable(str(self.origin))}{id}"

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""
        about = {"source": self.source, "unit": self.unit, "row": self.row, "id": self.id, "text": self.text}
        about["jaccard"], about["estimate"] = self.jaccard, self.estimate
        return about | self.origin.json


@dataclass(frozen=True)
class ClusterMember:
    """A removed document of a cluster."""

    source: str
    unit: int
    row: int
    value: float
    rule: str

    def __str__(self) -> str:
        return f"{self.source} {self.unit}:{self.row} ({self.rule}, {self.value:.4g})"


@dataclass(frozen=True)
class Edits:
    """Changes of a text before it is measured.

    Attributes:
        removed: lines, from 1 in the source's text, with their text.
        changed: lines, from 1 in the source's text, with their text before and after.
        repeated: lines of the edited text, from 1, that stay in another document.
    """

    removed: list[tuple[int, str]]
    changed: list[tuple[int, str, str]]
    repeated: list[tuple[int, str]]

    @classmethod
    def of(cls, before: str, after: str, repeated: Sequence[int]) -> Edits:
        """The changes between two texts, of which the second is known to be edited from the first.

        Args:
            before: text of the source.
            after: edited.
            repeated: numbers from 0 of lines of `after` that are removed besides.
        """
        left, right = before.split("\n"), after.split("\n")
        edits = cls([], [], [(number + 1, right[number]) for number in repeated if number < len(right)])
        if before == after or max(len(left), len(right)) > _DIFF_LINES:
            return edits
        for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            if tag == "equal":
                continue
            pairs = list(zip(range(a, b), range(c, d), strict=False))
            edits.changed.extend((one + 1, left[one], right[other]) for one, other in pairs)
            edits.removed.extend((one + 1, left[one]) for one in range(a + len(pairs), b))
        return edits

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "removed": [{"line": line, "text": text} for line, text in self.removed],
            "changed": [{"line": line, "before": before, "after": after} for line, before, after in self.changed],
            "repeated": [{"line": line, "text": text} for line, text in self.repeated],
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        shown: list[str] = [f"line {line} removed: {_short(text)}" for line, text in self.removed]
        for line, before, after in self.changed:
            shown += [f"line {line} was: {_short(before)}", f"line {line} is:  {_short(after)}"]
        shown += [f"line {line} of the edited text stays elsewhere: {_short(text)}" for line, text in self.repeated]
        yield from first_lines(shown)


@dataclass(frozen=True)
class FoundNgram:
    """N-gram of evaluations in a document.

    Attributes:
        start: first character of its first place in the edited text.
        end: character after that place.
        places: how often it is there.
        text: as the document has it.
        items: `task` and `item` of the first items that have it.
        common: true if it is in more than `max_documents` documents, and so removes nothing.
    """

    start: int
    end: int
    places: int
    text: str
    items: list[dict[str, str]]
    common: bool

    def __str__(self) -> str:
        items = ", ".join(f"{printable(each['task'])} item {printable(each['item'])}" for each in self.items)
        return f"{_short(self.text)}: {items}{'; common text, which does not count' if self.common else ''}"


@dataclass(frozen=True)
class Recheck:
    """Something stored, beside what the source files give."""

    name: str
    stored: str
    again: str
    agrees: bool

    def __str__(self) -> str:
        return f"{self.name}: stored {self.stored}, again {self.again}: {'agrees' if self.agrees else 'DIFFERS'}"


@dataclass(frozen=True)
class Why:
    """Verdict about a document.

    Attributes:
        rejected: why the record is not a document; None if it is one.
        first: the rule of the verdict; None if the document is kept.
        others: further rules that would remove it.
        is_only_rule: no other rule would remove it.
        known: whether rules could be evaluated, so that `others` is complete.
        language: label and score, if it was measured.
        scores: of classifiers with a bound.
        kept: the document that it is a duplicate of.
        members: of its cluster, if they were asked for.
        ngrams: of evaluations that are in it, if they were looked for.
        edits: of its text, if that could be read.
        checks: comparisons with the source files.
        text: as it was measured, if it was asked for.
        notes: what else is to be said.
    """

    source: str
    unit: int
    row: int
    origin: Origin
    id: str | None
    mode: str
    rejected: str | None
    first: FiredRule | None
    others: list[FiredRule]
    is_only_rule: bool
    known: bool
    language: tuple[str, float] | None
    scores: dict[str, float]
    kept: KeptDocument | None
    members: list[ClusterMember] | None
    ngrams: list[FoundNgram]
    edits: Edits | None
    checks: list[Recheck]
    text: str | None
    notes: list[str]

    @property
    def state(self) -> str:
        """`kept`, `removed` or `rejected`."""
        return "rejected" if self.rejected is not None else "kept" if self.first is None else "removed"

    @property
    def agrees(self) -> bool:
        """True if nothing that was measured again differs."""
        return all(check.agrees for check in self.checks)

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""
        language = None if self.language is None else {"label": self.language[0], "score": self.language[1]}
        return {
            "source": self.source,
            "unit": self.unit,
            "row": self.row,
            "id": self.id,
            **self.origin.json,
            "mode": self.mode,
            "state": self.state,
            "reason": self.rejected,
            "rule": None if self.first is None else self.first.json,
            "others": [rule.json for rule in self.others],
            "language": language,
            "scores": self.scores,
            "kept": None if self.kept is None else self.kept.json,
            "members": None if self.members is None else [vars(each) for each in self.members],
            "ngrams": [vars(each) for each in self.ngrams],
            "edits": None if self.edits is None else self.edits.json,
            "checks": [vars(check) for check in self.checks],
            "agrees": self.agrees if self.checks else None,
            "text": self.text,
            "notes": list(dict.fromkeys(self.notes)),
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        id = f", id {printable(self.id)}" if self.id else ""
        yield f"{self.source} {self.unit}:{self.row}: {printable(str(self.origin))}{id}"
        yield from self._verdict()
        if self.language is not None:
            yield f"language: {printable(self.language[0])}, score {self.language[1]:.3f}"
        yield from (f"score of {name.split('.')[1]}: {value:.4f}" for name, value in self.scores.items())
        if self.kept is not None:
            yield f"kept instead: {self.kept}"
            if self.kept.jaccard is not None:
                estimate = self.kept.estimate
                beside = "" if estimate is None else f"; estimated from signatures {estimate:.4f}"
                yield f"  Jaccard similarity to it, counted from both texts: {self.kept.jaccard:.4f}{beside}"
        if self.members is not None:
            yield f"cluster: {counted(len(self.members), 'document')} removed for the kept one"
            yield from (f"  {line}" for line in first_lines([str(each) for each in self.members]))
        if self.ngrams:
            yield f"{counted(len(self.ngrams), 'n-gram')} of evaluations:"
            yield from (f"  {line}" for line in first_lines([str(each) for each in self.ngrams]))
        if self.edits is not None and (edits := list(self.edits.lines())):
            yield "edits of the text:"
            yield from (f"  {line}" for line in edits)
        if self.checks:
            yield "measured again from the source files:"
            yield from (f"  {check}" for check in self.checks)
        yield from (f"note: {note}" for note in dict.fromkeys(self.notes))
        yield from self._texts()

    def _verdict(self) -> Iterator[str]:
        if self.rejected is not None:
            yield f"rejected: {printable(self.rejected)}"
            return
        if self.first is None:
            yield "kept: no rule removes it"
            return
        observes = self.mode == "observe"
        yield f"{'would be removed (data.curate.mode is observe)' if observes else 'removed'} by {self.first}"
        for rule in self.others:
            yield f"  also by {rule}"
        if not self.others and self.known and self.is_only_rule:
            yield "  no other rule removes it"
        yield f"  kept with {'; and '.join(rule.to_keep() for rule in (self.first, *self.others))}"

    def _texts(self) -> Iterator[str]:
        if self.text is None:
            return
        yield ""
        other = self.kept.text if self.kept is not None else None
        if other is None:
            yield from _limited(iter(_shown(self.text).split("\n")))
            return
        width = max(_NARROWEST, (shutil.get_terminal_size((120, 24)).columns - 3) // 2)
        yield f"{'this document':{width}} | kept document"
        left, right = (_wrapped(each, width) for each in (self.text, other))
        rows = itertools.zip_longest(left, right, fillvalue="")
        yield from _limited(f"{one:{width}} {'|' if one == two else '<'} {two}".rstrip() for one, two in rows)


def _rounded(value: float, towards: Callable[[float], int]) -> str:
    """A bound that keeps a value: with six decimals, rounded to the side on which it does."""
    return f"{value:.0f}" if value == round(value) else f"{towards(value * 1e6) / 1e6:.6f}".rstrip("0")


def _short(text: str) -> str:
    return cut(printable(text), 120)


def _wrapped(text: str, width: int) -> Iterator[str]:
    for line in _shown(text).split("\n"):
        yield from textwrap.wrap(line, width, replace_whitespace=False, drop_whitespace=False) or [""]


def _shown(text: str) -> str:
    return printable(text[:_TEXT_CHARACTERS], "\n\t").expandtabs(4)


def _limited(lines: Iterator[str]) -> Iterator[str]:
    yield from itertools.islice(lines, _TEXT_LINES)
    if next(lines, None) is not None:
        yield "… the rest is not shown; --json has all of it"
