"""`pipeline data why`: the verdict about a document, what decided it, and whether the source files say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config.root import Config
from pipeline.data.curate.decontamination.measure import CONTAMINATED
from pipeline.data.curate.decontamination.rule import RULE as CONTAMINATION_RULE
from pipeline.data.curate.duplicates.kinds import COUNTED, NEAR_SIMILARITY
from pipeline.data.curate.files import CURATE, FIRES_ALONE, NOBODY, curate_folder, verdicts_file
from pipeline.data.curate.passes.contamination import common_of
from pipeline.data.curate.report.clusters import VerdictFile, members_of
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.scope import document as document_number
from pipeline.data.curate.scope import place
from pipeline.data.curate.verdicts import Curation, Verdict, read_curation
from pipeline.data.provenance.document_search import records_with_id
from pipeline.data.provenance.measured_again import Measured, Remeasurer
from pipeline.data.provenance.run import Say
from pipeline.data.provenance.source_location import Key, Origins, UnknownFile
from pipeline.data.provenance.why_show import ClusterMember, Edits, FiredRule, FoundNgram, KeptDocument, Recheck, Why
from pipeline.data.sources.records import Document

_KEY = re.compile(r"(?P<unit>[0-9]{1,9}):(?P<row>[0-9]{1,12})")
_PLACE = re.compile(r"(?P<file>.*?)(?::\s*(?:row|line)?\s*(?P<number>[0-9]{1,18}))?", re.DOTALL)
_TOLERANCE = 1.01 / 65535
"""Scores of models may differ in the last step between machines."""


def why(
    config: Config,
    source: str,
    document: str,
    *,
    cluster: bool = False,
    text: bool = False,
    verify: bool = True,
    say: Say,
) -> Why:
    """The verdict about a document.

    Args:
        config: of the run.
        source: of the document.
        document: `UNIT:ROW`, `FILE:LINE`, `FILE: row N`, a file that is one document, or an id.
        cluster: list all documents that were removed for the same one.
        text: give the texts.
        verify: measure the document again.
        say: called with what is about to be read, if that may take long.

    Raises:
        UserError: there is no such source, document or curation.
    """
    asked = CurationView(config, source, say)
    return asked.explain(asked.find(document), cluster=cluster, text=text, verify=verify)


def removed_note(data_dir: Path, source: str, key: Key) -> str:
    """Reason why curation left out a record, in a sentence; empty if it did not.

    Args:
        data_dir: of the run.
        source: name.
        key: of the record.
    """
    try:
        curation = read_curation(curate_folder(data_dir / source))
        verdict = curation.read(key[0]).verdict(key[1])
    except UserError:
        return ""
    if verdict.rule is None:
        return ""
    rule = next(each for each in curation.about["rules"] if each["name"] == verdict.rule)
    return (
        f"curation removed it by {verdict.rule} ({rule['about']}: {verdict.value:g}); "
        f"see `pipeline data why RUN --source {source} --document {key[0]}:{key[1]}`"
    )


def find_document(origins: Origins, text: str, say: Say) -> Key:
    """A record of a curated source by what a user calls it.

    Raises:
        UserError: there is none, or several have the id.
    """
    if not text.strip():
        raise UserError(
            "--document: it is empty; name the document as FILE:LINE, FILE: row N, UNIT:ROW (as the report shows it) "
            "or by its id"
        )
    if found := _KEY.fullmatch(text):
        return int(found["unit"]), int(found["row"])
    parts = _PLACE.fullmatch(text)
    assert parts is not None, "it matches any text"
    try:
        return origins.find(parts["file"], None if parts["number"] is None else int(parts["number"]))
    except UnknownFile:
        pass
    except UserError as error:
        raise UserError(str(error).replace("--row:", "--document:", 1)) from None
    keys = origins.find_id(text, records_with_id(origins.folder, text), report=say)
    if len(keys) == 1:
        return keys[0]
    if keys:
        shown = ", ".join(f"{unit}:{row}" for unit, row in keys[:5])
        raise UserError(f"--document: {len(keys):,} documents have the id {text!r}: name one as UNIT:ROW, like {shown}")
    numbers = "; numbers of a dataset's documents are for `pipeline data when`" if text.strip().isdecimal() else ""
    raise UserError(
        f"--document: {text!r} is not a file of the source, nor the id of one of its documents; name the document as "
        f"FILE:LINE, FILE: row N, UNIT:ROW (as the report shows it) or by its id{numbers}"
    )


class CurationView:
    """A curated source to ask.

    Args:
        config: of the run.
        source: name.
        say: called with what is about to be read, if that may take long.

    Raises:
        UserError: there is no such source, or no curation of it.
    """

    def __init__(self, config: Config, source: str, say: Say) -> None:
        if config.data.curate is None:
            raise UserError("data.curate is not set in the run file, so no document was removed by it")
        names = [each.name for each in config.data.sources]
        if source not in names:
            raise UserError(f"--source: {source!r} is not one of the sources {', '.join(names)}")
        self._config = config
        self._source = source
        self._say = say
        self._folder = curate_folder(config.data_dir / source)
        self._curation = read_curation(self._folder)
        self._origins = Origins(self._folder)
        self._again = Remeasurer(config, source, self._folder)
        self._notes: list[str] = []

    def find(self, document: str) -> Key:
        """Key of a document."""
        return find_document(self._origins, document, self._say)

    def explain(self, key: Key, *, cluster: bool = False, text: bool = False, verify: bool = True) -> Why:
        """All about the verdict about a document. The arguments are those of `why`."""
        unit, row = key
        self._notes = []
        verdicts = self._curation.read(unit)
        if unit not in self._curation.chunks:
            units = counted(len(self._curation.chunks), "unit")
            raise UserError(f"--document: the source has {units}, counted from 0, so it has no unit {unit}")
        if not 0 <= row < verdicts.rows:
            raise UserError(f"--document: unit {unit} has {verdicts.rows:,} rows, so it has no row {row}")
        verdict, record = verdicts.verdict(row), verdicts.record(row)
        rejected = self._origins.rejected(key) or "the record is rejected" if verdict.is_rejected else None
        document = self._read(self._origins, key)
        measured = self._measured(document) if document is not None and rejected is None and verify else None
        kept = self._kept(verdict.kept, measured, text=text)
        ngrams = self._ngrams(document) if rejected is None else []
        fired, values = self._fired(key, verdict, measured, ngrams)
        return Why(
            source=self._source,
            unit=unit,
            row=row,
            origin=self._origins.places([key])[key],
            id=document.id if document is not None else None,
            mode=self._curation.about["mode"],
            rejected=rejected,
            first=fired[0] if verdict.rule is not None else None,
            others=fired[verdict.rule is not None :],
            is_only_rule=bool(int(record["flags"]) & FIRES_ALONE),
            known=bool(values),
            language=self._language(key, measured) if rejected is None else None,
            scores={name: value for name, value in values.items() if name.startswith("classifiers.")},
            kept=kept,
            members=list(self._members(key, verdict)) if cluster else None,
            ngrams=ngrams,
            edits=None
            if document is None or measured is None
            else Edits.of(document.text, measured.texts[0], verdicts.lines(row)),
            checks=list(self._checks(key, verdict, document, measured, kept, ngrams))
            if measured is not None and document is not None
            else [],
            text=(measured.texts[0] if measured is not None else document.text) if text and document else None,
            notes=self._notes,
        )

    def _read(self, origins: Origins, key: Key) -> Document | None:
        try:
            found = origins.read([key], report=self._say).get(key)
        except (UserError, OSError) as error:
            self._notes.append(f"the text cannot be read: {error}")
            return None
        if found is None:
            self._notes.append("the text cannot be read: the source no longer has such a record")
        return found

    def _measured(self, *documents: Document) -> Measured | None:
        if differences := self._again.differences:
            self._notes.append(
                f"not measured again: the run file sets {', '.join(differences)} otherwise than when it was measured"
            )
            return None
        return self._again.measure(documents)

    @cached_property
    def _common(self) -> npt.NDArray[np.bool_] | None:
        """N-grams of evaluations that are common text, and remove nothing."""
        return common_of(self._config.data_dir / CURATE / self._curation.about["scope"], self._curation.about)

    def _ngrams(self, document: Document | None) -> list[FoundNgram]:
        """N-grams of evaluations in a document, each once, in the order of its text."""
        if document is None or self._again.differences:
            return []
        found: dict[int, FoundNgram] = {}
        for each in self._again.ngrams(self._again.clean(document.text), self._common):
            number = each.pop("ngram")
            before = found.get(number)
            found[number] = (
                FoundNgram(**each, places=1) if before is None else replace(before, places=before.places + 1)
            )
        return list(found.values())

    @cached_property
    def _about(self) -> dict[str, Mapping[str, Any]]:
        """Rules of the decisions by name."""
        return {rule["name"]: rule for rule in self._curation.about["rules"]}

    def _rules(self) -> Iterator[DocumentRule]:
        """Rules over measures, with the bounds of the decisions."""
        known = {rule.name: rule for rule in self._again.rules}
        for name, about in self._about.items():
            if name in known:
                if known[name].bound != about["bound"]:
                    self._notes.append(
                        f"{about['key']} was {about['bound']:g} when it was decided, and is "
                        f"{known[name].bound:g} in the run file: run `pipeline curate` to apply it"
                    )
                yield replace(known[name], bound=about["bound"])
            elif not name.startswith("duplicates."):
                self._notes.append(f"{about['key']} is not in the run file any more, so {name} is not evaluated")

    def _fired(
        self, key: Key, verdict: Verdict, measured: Measured | None, ngrams: list[FoundNgram]
    ) -> tuple[list[FiredRule], dict[str, float]]:
        """Rules that fire, the one of the verdict first; and the values of all rules over measures."""
        table = self._table(key, measured)
        if table is not None and CONTAMINATED in (table.dtype.names or ()):
            table = table.copy()
            table[CONTAMINATED] = _uncommon(ngrams)  # all of them are stored
        values: dict[str, float] = {}
        fired: list[FiredRule] = []
        if table is not None and not verdict.is_rejected:
            for rule in self._rules():
                values[rule.name] = float(rule.values(table)[0])
                looks = (rule.name == "clean.empty") == (int(table["state"][0]) == 2)
                if looks and bool(rule.fires(table)[0]):
                    fired.append(FiredRule.of(self._about[rule.name], values[rule.name]))
        if verdict.rule is not None:
            first = FiredRule.of(self._about[verdict.rule], verdict.value)
            fired = [first, *(each for each in fired if each.name != verdict.rule)]
        return fired, values

    def _table(self, key: Key, measured: Measured | None) -> Any:
        """The stored record of measures, as a table of one row; else the one that was measured again."""
        if not self._again.differences and (at := self._origins.chunk_of(key)) is not None:
            stored = self._again.stored(key[0], at[0], key[1] - at[1])
            if stored is not None:
                return np.array([stored])
        return measured.table if measured is not None else None

    def _language(self, key: Key, measured: Measured | None) -> tuple[str, float] | None:
        labels = (self._again.settings.get("data.curate.language") or {}).get("labels", [])
        table = self._table(key, measured)
        if table is None or "language" not in (table.dtype.names or ()):
            return None
        number = int(table["language"][0])
        return (labels[number] if number < len(labels) else "unknown", int(table["language_score"][0]) / 65535)

    def _kept(self, number: int, measured: Measured | None, *, text: bool) -> KeptDocument | None:
        """The document that stays for a duplicate."""
        if number == NOBODY:
            return None
        source, unit, row = place(number)
        name = self._curation.about["sources"][source]
        origins = Origins(self._folder_of(name))
        document = self._read(origins, (unit, row))
        edited = None if document is None else self._again.clean(document.text)
        jaccard = estimate = None
        if measured is not None and document is not None and edited is not None:
            jaccard = self._again.jaccard(measured.texts[0], edited)
            estimate = self._again.estimate(measured, document)
        return KeptDocument(
            source=name,
            unit=unit,
            row=row,
            origin=origins.places([(unit, row)])[unit, row],
            id=document.id if document is not None else None,
            document=document,
            text=edited if text else None,
            jaccard=jaccard,
            estimate=estimate,
        )

    def _folder_of(self, name: str) -> Path:
        """Folder of the curation of a source of the scope, or of a finished one that it was compared with."""
        return self._config.data_dir / name if "/" in name else curate_folder(self._config.data_dir / name)

    def _members(self, key: Key, verdict: Verdict) -> Iterator[ClusterMember]:
        """Documents that were removed for the same one as this, or for this one."""
        names: list[str] = self._curation.about["sources"]
        keeper = verdict.kept
        if keeper == NOBODY:
            keeper = document_number(names.index(self._source), *key)
        for name in names:
            if "/" in name:
                continue
            try:
                curation = read_curation(self._folder_of(name))
            except UserError as error:
                self._notes.append(f"members in {name} are not known: {error}")
                continue
            for unit, row, value, rule in members_of(verdict_files(curation), keeper):
                yield ClusterMember(name, unit, row, value, curation.rules[rule - 1])

    def _checks(
        self,
        key: Key,
        verdict: Verdict,
        document: Document,
        measured: Measured,
        kept: KeptDocument | None,
        ngrams: list[FoundNgram],
    ) -> Iterator[Recheck]:
        """Comparisons of what is stored with what the source files give."""
        at = self._origins.chunk_of(key)
        stored = None if at is None else self._again.stored(key[0], at[0], key[1] - at[1])
        if stored is not None:
            names = [name for name in stored.dtype.names or () if not _equal(name, stored, measured.table[0])]
            count = len(stored.dtype.names or ())
            again = f"{count} columns equal" if not names else f"{', '.join(names)} differ"
            yield Recheck("measures", f"{count} columns", again, not names)
        rule = next((each for each in self._rules() if each.name == verdict.rule), None)
        if rule is not None and rule.name == CONTAMINATION_RULE:
            count = _uncommon(ngrams)
            if self._common is not None:
                yield Recheck(rule.name, f"{verdict.value:.0f}", f"{count}", verdict.value == count)
        elif rule is not None:
            again_value = float(np.float32(rule.values(measured.table)[0]))
            yield Recheck(rule.name, f"{verdict.value:.6g}", f"{again_value:.6g}", _near(verdict.value, again_value))
        if kept is not None and kept.document is not None:
            yield from self._similarity(verdict, document, kept)

    def _similarity(self, verdict: Verdict, document: Document, kept: KeptDocument) -> Iterator[Recheck]:
        if verdict.rule == "duplicates.exact" and kept.document is not None:
            both = self._again.measure([document, kept.document])
            hashes = np.concatenate(both.output.runs["exact"])
            same = (
                len(hashes) == 2 and hashes["hash"][0] == hashes["hash"][1] and hashes["rest"][0] == hashes["rest"][1]
            )
            same = bool(same)
            yield Recheck(verdict.rule, "equal", "equal" if same else "different", same)
        is_counted = self._curation.about["settings"].get(NEAR_SIMILARITY) == COUNTED
        again = kept.jaccard if is_counted else kept.estimate
        if verdict.rule == "duplicates.near" and again is not None:
            yield Recheck(verdict.rule, f"{verdict.value:.4f}", f"{again:.4f}", _near(verdict.value, again))


def verdict_files(curation: Curation) -> Iterator[VerdictFile]:
    """Files of the verdicts of a source, ascending."""
    for unit, chunks in sorted(curation.chunks.items()):
        first = 0
        for chunk in range(chunks):
            path = verdicts_file(curation.decisions, unit, chunk)
            file = VerdictFile(path, unit, first)
            first += len(file.read())
            yield file


def _uncommon(ngrams: list[FoundNgram]) -> int:
    return sum(not each.common for each in ngrams)


def _near(stored: float, again: float) -> bool:
    return abs(stored - again) <= _TOLERANCE if abs(stored) <= 1 else stored == again


def _equal(name: str, stored: Any, again: Any) -> bool:
    """Tell whether two values of a column are equal; scores of models up to the last step."""
    apart = abs(int(stored[name]) - int(again[name]))
    return apart <= ("score" in name)
