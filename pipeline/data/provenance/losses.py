"""`pipeline data losses`: what is recorded of the samples of a run, in tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.common.format import aligned, counted, numbered
from pipeline.common.run_files import RunFiles
from pipeline.data.provenance.document_to_steps import find_documents
from pipeline.data.provenance.loss_documents import DocumentGroups, Found, Ranked
from pipeline.data.provenance.loss_export import export
from pipeline.data.provenance.loss_file import LossFile
from pipeline.data.provenance.loss_stream import LossView, TargetCounts, chosen_steps, located_documents
from pipeline.data.provenance.run import RunView, Say, newest_origin
from pipeline.data.sources.records import printable

_MOST_GROUPS = 1_000_000
_ROWS = 20
"""Rows of a table by step, unless `--every` is given."""
_ESTIMATE = (
    "the loss of a document is an estimate: the mean of the losses of the samples that hold it, weighted by its "
    "targets in each; a sample mostly holds pieces of several documents"
)
_WINDOWS = ("source", "epoch", "step")
_EPOCHS = 2**32
"""Epochs of a source are below it."""


@dataclass(frozen=True)
class LossTable:
    """A table of losses.

    Attributes:
        title: of the table.
        head: names of the columns, as in JSON.
        rows: values by column.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""
        return {"title": self.title, "rows": [dict(zip(self.head, row, strict=True)) for row in self.rows]}

    def lines(self) -> Iterator[str]:
        """For people: columns of equal width, numbers at the right."""
        yield f"{self.title}:"
        if not self.rows:
            yield "  nothing"
            return
        cells = [list(self.head), *([_cell(value) for value in row] for row in self.rows)]
        numbers = [not any(isinstance(value, str) for value in column) for column in zip(*self.rows, strict=True)]
        yield from (f"  {line}" for line in aligned(cells, numbers))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Losses:
    """Tables of losses, and what is to be said of them."""

    tables: Sequence[LossTable]
    warnings: Sequence[str]
    notes: Sequence[str]

    @property
    def json(self) -> dict[str, Any]:
        """For programs."""
        return {"tables": [table.json for table in self.tables], "notes": [*self.warnings, *self.notes]}

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from (f"note: {warning}" for warning in self.warnings)
        for table in self.tables:
            yield from table.lines()
        yield from self.notes


@dataclass(frozen=True)
class LossQuestion:
    """A question about losses, as the options of `pipeline data losses` have it."""

    by: str = "source"
    steps: str | None = None
    every: int | None = None
    source: str | None = None
    id: str | None = None
    document: int | str | None = None
    row: str | None = None
    highest: int | None = None
    lowest: int | None = None
    gain: bool = False
    parquet: Path | None = None
    documents: bool = False


def answer_losses(run: RunView, question: LossQuestion, *, ids: bool = False, say: Say) -> Losses:
    """Tables of the recorded losses of a run.

    Args:
        run: the run.
        question: what is asked for.
        ids: read ids of documents from the source files where they are not known without.
        say: called with what is about to be read.

    Raises:
        UserError: nothing is recorded, or not of these steps; or there is no such source, document or column.
    """
    _check(question)
    run = run.trained or run
    if question.source is not None:
        run.dataset(question.source)
        if question.source not in run.journal.names:
            raise UserError(f"--source: no step of the run has drawn from {question.source!r}")
    with LossFile(RunFiles(run.folder).losses) as file:
        view = LossView(run, file, chosen_steps(run, file, question.steps), question.source)
        return _answer(view, question, ids, say)


def _check(question: LossQuestion) -> None:
    """Refuse options that do not go together, which would be ignored.

    Raises:
        UserError: there are some.
    """
    given = {
        "--doc, --document or --row": (question.id, question.document, question.row) != (None, None, None),
        "--parquet": question.parquet is not None,
        "--gain, --highest or --lowest": question.gain or (question.highest, question.lowest) != (None, None),
        f"--by {question.by}": question.by != "source",
    }
    if len(several := [option for option, is_given in given.items() if is_given]) > 1:
        raise UserError(f"{' and '.join(several)} do not go together; ask for one of them at a time")
    if question.every is not None and question.by != "step":
        raise UserError("--every is the number of steps per row of --by step: also give --by step, or remove --every")
    if question.documents and question.parquet is None:
        raise UserError("--documents adds columns to the file of --parquet: also give --parquet FILE")


def _answer(view: LossView, question: LossQuestion, ids: bool, say: Say) -> Losses:
    id, document, row = question.id, question.document, question.row
    if (id, document, row) != (None, None, None):
        if view.source is None:
            raise UserError("--doc, --document and --row name a document of a source: also give --source")
        return document_losses(view, id=id, document=document, row=row, ids=ids, say=say)
    if question.parquet is not None:
        rows = export(view, question.parquet, documents=question.documents)
        return result(view, [], f"{question.parquet}: {counted(rows, 'row')}, a sample each, {_steps(view)}")
    if question.gain:
        return gains(view, question.highest, question.lowest, ids=ids, say=say)
    if question.highest is not None or question.lowest is not None:
        return ranked_documents(view, question.highest, question.lowest, ids=ids, say=say)
    if question.by in _WINDOWS:
        return by_samples(view, question.by, question.every)
    return by_documents(view, question.by, say)


def result(view: LossView, tables: Sequence[LossTable], *notes: str) -> Losses:
    """Tables with what is to be said of any of them."""
    first, run = view.file.head.first_step, view.run
    before = []
    if first:
        before = [f"{numbered('step', 1, first)} are not recorded here"]
        origin = newest_origin(run.folder)
        if origin.get("kind") == "fork" and origin["step"] >= first:
            before = [f"{numbered('step', 1, first)} are those of {origin['run']}, of which this run is a fork"]
    return Losses(tables, [*run.warnings], [*notes, *before])


def by_samples(view: LossView, by: str, every: int | None) -> Losses:
    """Losses by source, by epoch of each source, or by steps.

    Args:
        view: the samples that are asked for.
        by: `source`, `epoch` or `step`.
        every: steps of a row, with `step`.
    """
    names, (first, end) = view.run.journal.names, view.steps
    every = every or max(1, -(-(end - first) // _ROWS))
    counts, sums = TargetCounts(view.run), dict[int, npt.NDArray[np.float64]]()
    for block in view.blocks():
        number = (block.step - 1 - first) // every
        keys = {"source": block.source * _EPOCHS, "epoch": block.source * _EPOCHS + block.epoch, "step": number}[by]
        groups, place = np.unique(keys, return_inverse=True)
        targets, finite = counts.of(block), block.known
        weights = (
            *(finite, block.recorded & np.isnan(block.loss), block.recorded & np.isinf(block.loss), ~block.recorded),
            *(targets, np.where(finite, block.loss, 0).astype(np.float64) * targets),
        )
        found = np.stack([np.bincount(place, weight, len(groups)) for weight in weights], axis=1)
        for group, each in zip(groups.tolist(), found, strict=True):
            sums[group] = sums.get(group, 0) + each
    rows = []
    for group, (*numbers, nats) in sorted(sums.items()):
        source, epoch = divmod(group, _EPOCHS)
        low = first + group * every
        if by == "step":
            what: list[Any] = [low + 1, min(low + every, end)]
        else:
            what = [names[source], epoch] if by == "epoch" else [names[source]]
        rows.append([*what, *map(int, numbers), float(nats / numbers[-1]) if numbers[-1] else None])
    group_head = {"source": ["source"], "epoch": ["source", "epoch"], "step": ["first_step", "last_step"]}[by]
    head = [*group_head, "samples", "masked", "not_finite", "not_recorded", "targets", "loss"]
    return result(view, [LossTable(f"loss by {by}, {_steps(view)}", head, rows)])


def by_documents(view: LossView, column: str, say: Say) -> Losses:
    """Losses by file, or by a column of metadata that was kept of documents.

    Raises:
        UserError: no source keeps this column, or it has too many values.
    """
    run, groups = view.run, DocumentGroups()
    if column != "file":
        kept = {name: run.datasets[name].manifest.settings.get("metadata") or [] for name in run.journal.names}
        if not any(column in keys for keys in kept.values()):
            have = ", ".join(sorted({key for keys in kept.values() for key in keys})) or "none"
            raise UserError(
                f"--by: {column!r}: give source, file, epoch, step or a column that was kept of documents "
                f"(data.sources.N.metadata): {have}"
            )
    say("looking up the documents of the samples")
    found = Found(view)
    for name in found.sources:
        group_of = _file_of(run, name) if column == "file" else _column_of(run, name, column)
        for documents, values, targets in found.blocks(name):
            for document, value, count in zip(documents.tolist(), values.tolist(), targets.tolist(), strict=True):
                groups.add((name, group_of(document)), count, value)
            if len(groups.sums) > _MOST_GROUPS:
                raise UserError(
                    f"--by: {column!r} has more than {_MOST_GROUPS:,} values; --parquet with --documents exports them"
                )
    rows = [
        [name, value, int(documents), int(targets), nats / targets]
        for (name, value), (documents, targets, nats) in sorted(groups.sums.items(), key=lambda one: one[0])
    ]
    head = ["source", column, "documents", "targets", "loss"]
    return result(view, [LossTable(f"loss by {column}, {_steps(view)}", head, rows)], _ESTIMATE)


def _file_of(run: RunView, name: str) -> Callable[[int], str]:
    dataset, origins = run.datasets[name], run.origins(name)

    def file_of(document: int) -> str:
        unit, row, _, _ = dataset.provenance(document)
        file = None if origins is None else origins.file_of(unit, row)
        return f"unit {unit}" if file is None else printable(file)

    return file_of


def _column_of(run: RunView, name: str, column: str) -> Callable[[int], str]:
    dataset = run.datasets[name]

    def column_of(document: int) -> str:
        value = dataset.metadata(document).get(column)
        return "(none)" if value is None else printable(str(value))

    return column_of


def ranked_documents(view: LossView, highest: int | None, lowest: int | None, *, ids: bool, say: Say) -> Losses:
    """The documents with the highest and the lowest losses."""
    found = Found(view)
    tables = [
        _documents(view.run, found.ranked(count, highest=is_high), f"{word} losses, {_steps(view)}", "loss", ids, say)
        for word, count, is_high in (("highest", highest, True), ("lowest", lowest, False))
        if count is not None
    ]
    return result(view, tables, _ESTIMATE)


def gains(view: LossView, highest: int | None, lowest: int | None, *, ids: bool, say: Say) -> Losses:
    """Losses of the second epoch of each source beside those of the first, and the documents that gained most."""
    names = view.run.journal.names
    by_epoch = {(row[0], row[1]): row for row in by_samples(view, "epoch", None).tables[0].rows}
    found = Found(view, (0, 1))
    rows = []
    for name in names if view.source is None else [view.source]:
        one, two = ((by_epoch.get((name, epoch)) or [None])[-1] for epoch in (0, 1))
        documents, targets, gained = 0, 0.0, 0.0
        for numbers, values, counts in found.blocks(name) if name in found.sources else ():
            documents += len(numbers)
            targets += float(counts.sum())
            gained += float((values * counts).sum())
        rows.append([name, one, two, None if one is None or two is None else one - two, documents])
        rows[-1].append(gained / targets if targets else None)
    head = ["source", "loss_epoch_0", "loss_epoch_1", "gain", "documents_in_both", "their_gain"]
    tables = [LossTable(f"gain of epoch 1 over epoch 0, {_steps(view)}", head, rows)]
    for word, count, is_high in (("highest", highest, True), ("lowest", lowest, False)):
        if count is not None:
            best = found.ranked(count, highest=is_high)
            tables.append(_documents(view.run, best, f"{word} gains, {_steps(view)}", "gain", ids, say))
    trend = "a gain holds what the model learned from all other data between the two epochs, too: compare gains"
    return result(view, tables, trend, _ESTIMATE)


def document_losses(
    view: LossView, *, id: str | None, document: int | str | None, row: str | None, ids: bool, say: Say
) -> Losses:
    """The samples that hold a document, with their losses.

    Args:
        view: the samples that are asked for; it has a source.
        id: of the document. Exactly one of `id`, `document` and `row` is to be given, as for `when`.
        document: its number.
        row: its file and line.
        ids: read ids from the source files.
        say: called with what is about to be read.
    """
    assert view.source is not None
    run, name = view.run, view.source
    documents, never = find_documents(run, name, id=id, document=document, row=row, say=say)
    tables = []
    for number, about in run.describe(name, documents, ids, say).items():
        rows = list(_occurrences(view, number))
        targets = sum(found[3] for found in rows)
        nats = sum(found[3] * found[4] for found in rows)
        mean = f"loss {nats / targets:.4f} over {counted(targets, 'target')}" if targets else "in no recorded sample"
        title = f"document {number} of {name}: {printable(str(about))}, {counted(about.tokens, 'token')}: {mean}"
        tables.append(LossTable(title, ["step", "epoch", "sample", "targets", "loss"], rows))
    return result(view, tables, *([f"never seen: {never}"] if never else []), _ESTIMATE)


def _occurrences(view: LossView, document: int) -> Iterator[tuple[int, int, int, int, float]]:
    """Step, epoch, sample, targets of the document, and loss of each sample that holds it, in their order."""
    run, source = view.run, view.index(view.source or "")
    wanted = _samples_with(view, document)
    for sample in wanted:
        step = run.journal.step_of(sample)
        if not view.steps[0] <= step < view.steps[1]:
            continue
        one = LossView(run, view.file, (step, step + 1), view.source)
        for block in one.blocks():
            mine = block.only((block.sample == sample) & block.known)
            if len(mine.step):
                found = located_documents(run, mine, source)
                targets = int(found.targets[found.document == document].sum())
                if targets:
                    yield step + 1, int(mine.epoch[0]), sample, targets, float(mine.loss[0])


def _samples_with(view: LossView, document: int) -> list[int]:
    """Samples of the recorded steps that hold a document as targets, ascending."""
    run, name, found = view.run, view.source or "", list[int]()
    for number, segment in enumerate(run.journal.segments):
        state = segment.sources.get(name)
        if state is None or segment.first_step >= view.steps[1]:
            continue
        if state.documents is not None and not state.documents[0] <= document < state.documents[1]:
            continue
        following = [each.first_step for each in run.journal.segments[number + 1 : number + 2]]
        stop = min([view.steps[1], *following])
        before, after = (run.sampler.slots(step)[name] for step in (segment.first_step, stop))
        drawn = (after - before) // segment.sequence_length
        instances, shifts = run.instances[number][name], run.objectives[number][name].shifts
        for epoch in range(
            state.lap, state.lap + (state.cursor + drawn - 1) // instances.count + 1 if drawn else state.lap
        ):
            positions = instances.containing(epoch, document, shifts=shifts)
            samples = run.sampler.find(name, number, epoch, positions)
            found += [int(sample) for sample in samples if sample >= 0]
    return sorted(found)


def _documents(run: RunView, ranked: Sequence[Ranked], title: str, what: str, ids: bool, say: Say) -> LossTable:
    """A table of documents, with their places and first words."""
    about = {
        name: run.describe(name, sorted({one.document for one in ranked if one.source == name}), ids, say)
        for name in dict.fromkeys(one.source for one in ranked)
    }
    rows = []
    for one in ranked:
        info = about[one.source][one.document]
        words = run.words(one.source, info, (0, info.tokens))
        place = printable(str(info.origin)) if info.origin is not None else "origin unknown"
        rows.append([one.value, one.targets, one.source, one.document, place, printable(words)])
    return LossTable(title, [what, "targets", "source", "document", "place", "text"], rows)


def _steps(view: LossView) -> str:
    return numbered("step", view.steps[0] + 1, view.steps[1]) if view.steps[0] < view.steps[1] else "no step"
