"""`pipeline data when`: from a document to the steps of a run that train on it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.format import counted, numbered
from pipeline.data.datasets.manifest import datasets_below, read_manifest
from pipeline.data.order.segments import Segment
from pipeline.data.order.windows import Instances
from pipeline.data.provenance.adopted_location import AdoptedOrigins
from pipeline.data.provenance.document_search import documents_of_record, documents_with_id, hash_of_id
from pipeline.data.provenance.run import (
    DocumentInfo,
    Range,
    RunView,
    Say,
    first_lines,
    hint_of_ids,
    in_brackets,
    shortened,
    targets_in,
    unknown_origins,
)
from pipeline.data.provenance.source_location import Key, Origins, UnknownFile
from pipeline.data.provenance.why_removed import removed_note

_ROW = re.compile(r"(?P<file>.*?)(?::\s*(?:row|document|line)?\s*(?P<number>[0-9]{1,18}))?", re.DOTALL)
_KEY = re.compile(r"(?P<unit>[0-9]{1,9}):(?P<row>[0-9]{1,12})")
_EXHAUSTED = "the source has reached its max_epochs"
_BEYOND = "beyond the source's max_epochs"


@dataclass(frozen=True)
class Occurrence:
    """Tokens of a document as targets.

    Attributes:
        step: from 1.
        sample: global index.
        done: whether the step was trained.
        masked: why they have no weight, or are passed over; None if they are trained on.
    """

    lap: int
    step: int
    sample: int
    tokens: Range
    done: bool
    masked: str | None

    def __str__(self) -> str:
        state = f"; masked: {self.masked}" if self.masked else ""
        return (
            f"epoch {self.lap:,}: step {self.step:,}, sample {self.sample:,}, tokens {in_brackets(self.tokens)}; "
            f"{'done' if self.done else 'to come'}{state}"
        )


@dataclass(frozen=True)
class Gap:
    """Tokens of a document that are not targets in an epoch.

    Attributes:
        due: first and last step, from 1, at which they would come in a longer run; None if the run's end is not why.
    """

    lap: int
    tokens: Range
    why: str
    due: tuple[int, int] | None = None

    def __str__(self) -> str:
        due = f"due at {numbered('step', *self.due)}, " if self.due else ""
        return f"epoch {self.lap:,}: tokens {in_brackets(self.tokens)} not seen: {due}{self.why}"

    def and_next(self, other: Gap) -> Gap | None:
        """One of both, if they touch and have one reason."""
        together = self.lap == other.lap and self.tokens[1] == other.tokens[0] and self.why == other.why
        if not together or (self.due is None) != (other.due is None):
            return None
        steps = [*(self.due or ()), *(other.due or ())]
        due = (min(steps), max(steps)) if steps else None
        return Gap(self.lap, (self.tokens[0], other.tokens[1]), self.why, due)


@dataclass(frozen=True)
class Without:
    """Steps in which no epoch has a document: from 1, both ends included."""

    first_step: int
    last_step: int
    why: str

    def __str__(self) -> str:
        return f"{numbered('step', self.first_step, self.last_step)}: {self.why}"


@dataclass
class Times:
    """Steps at which a document is seen.

    Attributes:
        seen: with weight.
        masked: without, or skipped.
        unseen: what the epochs that the run reaches leave out.
        without: the steps that have none of these epochs.
        targets: tokens that the dataset's mask names as targets; None without a mask. Others are context where seen.
    """

    about: DocumentInfo
    targets: int | None = None
    seen: list[Occurrence] = field(default_factory=list)
    masked: list[Occurrence] = field(default_factory=list)
    unseen: list[Gap] = field(default_factory=list)
    without: list[Without] = field(default_factory=list)

    @property
    def json(self) -> dict[str, Any]:
        """For `--json`."""
        targets = {} if self.targets is None else {"targets": self.targets}
        return self.about.json | {
            **targets,
            "seen": [{name: value for name, value in vars(one).items() if name != "masked"} for one in self.seen],
            "masked": [vars(one) for one in self.masked],
            "unseen": [vars(one) for one in self.unseen],
            "without": [vars(one) for one in self.without],
        }

    def summary(self) -> str:
        """Tokens of the document that are trained on, to come or masked, and in how many steps."""
        texts: list[str] = []
        for what, found in (
            ("trained on" if self.targets is None else "seen", [seen for seen in self.seen if seen.done]),
            ("to come", [seen for seen in self.seen if not seen.done]),
            ("masked or skipped", self.masked),
        ):
            tokens, end = 0, 0
            for first, after in sorted(seen.tokens for seen in found):
                tokens, end = tokens + max(0, after - max(first, end)), max(end, after)
            if found or not texts:
                steps = f", in {counted(len({seen.step for seen in found}), 'step')}" if found else ""
                of = "" if texts else f" of {counted(self.about.tokens, 'token')}"
                texts.append(f"{what}: {tokens:,}{of}{steps}")
        return "; ".join(texts)

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield self.summary()
        if self.targets is not None:
            yield f"targets: {counted(self.targets, 'token')} by the mask of the dataset; the others are context"
        by_epoch: list[Occurrence | Gap] = [*self.seen, *self.masked, *self.unseen]
        by_epoch.sort(key=lambda one: one.lap)
        lines = [*map(str, by_epoch), *map(str, self.without)]
        yield from first_lines(lines)


@dataclass(frozen=True)
class When:
    """Steps at which documents are seen.

    Attributes:
        never: why a record is in no document that is trained on; empty if it is.
        warnings: what is to be known first.
        notes: what else is to be said.
        hints: what else is to be said to people.
    """

    source: str
    steps: int
    done: int
    documents: list[Times]
    never: str
    warnings: list[str]
    notes: list[str]
    hints: list[str]

    @property
    def json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "source": self.source,
            "steps": self.steps,
            "done": self.done,
            "documents": [times.json for times in self.documents],
            "never": self.never or None,
            "notes": [*self.warnings, *self.notes],
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield from (f"note: {warning}" for warning in self.warnings)
        for times in self.documents:
            about = times.about
            yield f"document {about.document} of {self.source}: {about}, {counted(about.tokens, 'token')}"
            yield from (f"  {line}" for line in times.lines())
        if self.never:
            yield f"never seen: {self.never}"
        yield from self.notes
        yield from self.hints


def when(
    run: RunView,
    source: str,
    *,
    id: str | None = None,
    document: int | str | None = None,
    row: str | None = None,
    ids: bool = False,
    say: Say,
) -> When:
    """The steps at which tokens of documents are targets, in every epoch that the run reaches.

    Args:
        run: the run.
        source: of the documents.
        id: of the documents, or `xxh3:` and its hash. Exactly one of `id`, `document` and `row` is to be given.
        document: number in the source's dataset, or a name as `data why` takes it: `row`, `UNIT:ROW` or an id.
        row: `FILE:LINE`, `FILE: row N`, or `FILE` for a text.
        ids: read ids from the source files where they are not known without.
        say: called with what is about to be read.

    Raises:
        UserError: there is no such source, document or record.
    """
    documents, never = find_documents(run, source, id=id, document=document, row=row, say=say)
    described = run.describe(source, documents, ids, say)
    if id is not None:
        for number, about in described.items():
            if about.id is None and about.id_hash == hash_of_id(id):
                described[number] = about._replace(id=id)
    found = [_Search(run, source, described[number]).times() for number in documents]
    end = [f"the run ends after step {run.steps:,}: {run.length.reason}"] if any(one.unseen for one in found) else []
    return When(
        source=source,
        steps=run.steps,
        done=run.done,
        documents=found,
        never=never,
        warnings=[*run.warnings],
        notes=[*unknown_origins(described.values()), *end, *run.notes],
        hints=hint_of_ids(described.values(), ids),
    )


def find_documents(
    run: RunView, source: str, *, id: str | None, document: int | str | None, row: str | None, say: Say
) -> tuple[list[int], str]:
    """Numbers of the documents that are meant, and why there are none; for the arguments see `when`.

    Raises:
        UserError: there is no such source, document or record.
    """
    if [id, document, row].count(None) != 2:
        raise UserError("say which document: give exactly one of --doc ID, --document N and --row FILE[:N]")
    dataset = run.dataset(source)
    never = ""
    if isinstance(document, str):
        if re.fullmatch(r"-?[0-9]{1,18}", document) is None:
            return _documents_named(run, source, document, say)
        document = int(document)
    if document is not None:
        if not 0 <= document < dataset.whole.documents:
            raise UserError(
                f"--document: {document}: {source} has {numbered('document', 0, dataset.whole.documents - 1)} only"
            )
        documents = [document]
    elif id is not None:
        documents = documents_with_id(dataset.folder, dataset.whole, id)
        if not documents:
            never = _split_of(dataset.folder, lambda folder: documents_with_id(folder, read_manifest(folder), id))
            if not never:
                example = run.describe(source, [0], True, say)[0].id
                like = f"; ids are like {shortened(example)!r}" if example else ""
                curated = run.config.data.curate is not None and "; if curation removed it, `pipeline data why` says so"
                raise UserError(
                    f"--doc: no document of source {source!r} has the id {id!r} in any split{like}{curated or ''}"
                )
    else:
        assert row is not None
        origins = run.origins(source)
        if origins is None:
            raise UserError(f"--row: no file beside {dataset.folder} says what it was made from; use --document N")
        return _documents_at(run, source, origins, _find_row(origins, row), row)
    return documents, never


def _documents_named(run: RunView, source: str, name: str, say: Say) -> tuple[list[int], str]:
    """`find_documents` by a name that `data why` takes as well: a place, `UNIT:ROW` or an id."""
    origins = run.origins(source)
    try:
        if origins is not None and (found := _KEY.fullmatch(name)):
            return _documents_at(run, source, origins, (int(found["unit"]), int(found["row"])), name)
        if origins is not None:
            with suppress(UnknownFile):
                return _documents_at(run, source, origins, _find_row(origins, name), name)
        return find_documents(run, source, id=name, document=None, row=None, say=say)
    except UserError as error:
        raise UserError(re.sub("^--(row|doc):", "--document:", str(error))) from None


def _documents_at(
    run: RunView, source: str, origins: Origins | AdoptedOrigins, key: Key, name: str
) -> tuple[list[int], str]:
    """`find_documents` of a record, which a user calls `name`."""
    dataset = run.dataset(source)
    documents = documents_of_record(dataset.folder, dataset.whole, *key)
    return documents, "" if documents else _why_not(run, source, origins, key, name)


def _find_row(origins: Origins | AdoptedOrigins, row: str) -> Key:
    found = _ROW.fullmatch(row)
    assert found is not None
    file, number = found["file"], found["number"]
    return origins.find(file, None if number is None else int(number))


def _why_not(run: RunView, source: str, origins: Origins | AdoptedOrigins, key: Key, row: str) -> str:
    """Reason why a record is not in the training split."""
    if reason := origins.rejected(key):
        return f"the record was rejected: {reason}"
    folder = run.dataset(source).folder
    split = _split_of(folder, lambda other: documents_of_record(other, read_manifest(other), *key))
    found = split or removed_note(run.config.data_dir, source, key)
    if not found:
        raise UserError(f"--row: {row} is not a document of {folder}, nor of another split")
    return found


def _split_of(folder: Path, find: Callable[[Path], list[int]]) -> str:
    """The split beside a dataset that has documents which `find` finds."""
    for other in datasets_below(folder.parent):
        if other != folder and (found := find(other)):
            return f"it is document {found[0]} of the split {other.name!r}"
    return ""


class _Search:
    """Looks for the steps of one document."""

    def __init__(self, run: RunView, source: str, about: DocumentInfo) -> None:
        self._run = run
        self._source = source
        dataset = run.datasets[source]
        masked = dataset.manifest.has_mask
        targets = int(dataset.trained_targets(np.array([about.document]))[0]) if masked else None
        self._times = Times(about, targets)
        # By epoch: the positions that were not drawn yet, each with the document's targets there.
        self._open: dict[int, dict[int, list[Range]]] = {}
        # By epoch: why the positions that are open will stay so, and whether anything can still change that.
        self._why: dict[int, str] = {}
        self._closed: set[int] = set()
        # By epoch: slice, sequence length, and whether samples are packs.
        self._text: dict[int, tuple[Range | None, int, bool]] = {}
        # Epochs and positions that come after all that max_epochs allows.
        self._beyond: set[tuple[int, int]] = set()
        # By epoch and position: the step at which it would be drawn, were the run longer.
        self._due: dict[tuple[int, int], int] = {}
        # Steps [first, stop) in which no epoch has the document, and why.
        self._without: list[tuple[int, int, str]] = []

    def times(self) -> Times:
        """All steps, and what is not seen."""
        run, times = self._run, self._times
        segments = run.journal.segments
        for number, segment in enumerate(segments):
            if segment.first_step >= run.steps:
                break
            stop = min(segments[number + 1].first_step, run.steps) if number + 1 < len(segments) else run.steps
            self._close_epochs(segment)
            if reason := self._not_in(segment) or self._look(number, segment, stop):
                first = segment.first_step
                if self._without and self._without[-1][1:] == (first, reason):
                    first = self._without.pop()[0]
                self._without.append((first, stop, reason))
        for epoch, positions in self._open.items():
            for position, ranges in positions.items():
                why, due = self._why[epoch], None
                if epoch not in self._closed and (epoch, position) in self._beyond:
                    why = _BEYOND
                elif (step := self._due.get((epoch, position))) is not None:
                    why, due = f"after the end of the run (step {run.steps:,})", (step + 1, step + 1)
                times.unseen += [Gap(epoch, tokens, why, due) for tokens in ranges]
        for seen in (times.seen, times.masked):
            seen.sort(key=lambda one: (one.lap, one.step, one.sample))
        merged: list[Gap] = []
        for unseen in sorted(times.unseen, key=lambda one: (one.lap, one.tokens)):
            both = merged[-1].and_next(unseen) if merged else None
            merged[-1:] = [both] if both else [*merged[-1:], unseen]
        times.unseen = merged
        times.without = [Without(first + 1, stop, reason) for first, stop, reason in self._without]
        return times

    def _not_in(self, segment: Segment) -> str:
        """Reason why a segment cannot have the document; empty if it can."""
        state, document = segment.sources.get(self._source), self._times.about.document
        if state is None:
            return "the source is not in the blend"
        if state.documents is not None and not state.documents[0] <= document < state.documents[1]:
            return f"the slice has {numbered('document', state.documents[0], state.documents[1] - 1)} only"
        return ""

    def _close_epochs(self, segment: Segment) -> None:
        """Say why epochs end before a segment that has other ones. One that was drawn to its end has nothing open."""
        state = segment.sources.get(self._source)
        if state is None:
            return
        for epoch in self._open.keys() - self._closed:
            (documents, length, packed), before = self._text[epoch], f"before step {segment.first_step + 1:,}"
            changed = ["slice"] if documents != state.documents else []
            changed += ["sequence_length"] if length != segment.sequence_length else []
            changed += ["packing"] if packed != segment.packed else []
            if changed:
                verb = "changes" if len(changed) == 1 else "change"
                self._closed.add(epoch)
                self._why[epoch] = f"the epoch was closed {before}, where {' and '.join(changed)} {verb}"

    def _look(self, number: int, segment: Segment, stop: int) -> str:
        """Find the document in the epochs of a segment, up to step `stop`; returns why there is none, empty if any."""
        run, state = self._run, segment.sources[self._source]
        instances = run.instances[number][self._source]
        before, after = (run.sampler.slots(step)[self._source] for step in (segment.first_step, stop))
        drawn = (after - before) // segment.sequence_length
        # A segment that goes on with the epoch, or closes it, says another reason.
        why = f"not drawn by step {stop:,}, " + (
            "the end of the run" if stop == run.steps else "after which the source is not in the blend"
        )
        if drawn == state.cap:
            why = _EXHAUSTED
        self._why |= dict.fromkeys(self._open.keys() - self._closed, why)
        if drawn == 0:
            return _EXHAUSTED if state.cap == 0 else "the source is not drawn"
        shifts = run.shifts(number, self._source)
        for epoch in range(state.lap, state.lap + (state.cursor + drawn - 1) // instances.count + 1):
            self._open_epoch(instances, segment.sequence_length, epoch, shifts)
            self._text[epoch] = state.documents, segment.sequence_length, segment.packed
            self._why[epoch] = why
            positions = np.array(list(self._open[epoch]), np.int64)
            found = run.sampler.find(self._source, number, epoch, positions)
            before_epoch = (epoch - state.lap) * instances.count - state.cursor
            for position, sample in zip(positions.tolist(), found.tolist(), strict=True):
                if state.cap is not None and before_epoch + position >= state.cap:
                    self._beyond.add((epoch, position))
                    continue
                if sample < 0:
                    continue
                step = run.journal.step_of(sample)
                if step >= stop:
                    self._due[epoch, position] = step
                    continue
                masked = run.masked(step, sample, self._source, self._times.about.document)
                into = self._times.seen if masked is None else self._times.masked
                into += [
                    Occurrence(epoch, step + 1, sample, tokens, step < run.done, masked)
                    for tokens in self._open[epoch].pop(position)
                ]
        if drawn == state.cap:
            self._closed |= self._open.keys()
        return ""

    def _open_epoch(self, instances: Instances, length: int, epoch: int, shifts: bool | None) -> None:
        """Note where in an epoch the document is, and what of it the epoch leaves unseen."""
        if epoch in self._open:
            return
        about = self._times.about
        positions: dict[int, list[Range]] = {}
        for position in instances.containing(epoch, about.document, shifts=bool(shifts)).tolist():
            spans = instances.at(epoch, position)
            positions[position] = [
                (first, end)
                for place, span in enumerate(spans)
                for first, end in [targets_in(span, place, len(spans), shifts)]
                if span.document == about.document and first < end
            ]
        self._open[epoch] = positions
        why = f"among the {instances.tokens - instances.count * length:,} tokens that the epoch leaves out"
        end = 0
        for first, after in [*sorted(itertools.chain(*positions.values())), (about.tokens, about.tokens)]:
            if first > end:
                self._times.unseen.append(Gap(epoch, (end, first), why))
            end = max(end, after)
