"""`pipeline data where`: from a step of a run to the documents in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.format import numbered
from pipeline.data.order.balance import rank_rows
from pipeline.data.order.locate import RankSamples
from pipeline.data.order.permutation import IntArray
from pipeline.data.order.phases import micro_batch_size
from pipeline.data.order.sampler import Draws
from pipeline.data.order.segments import Segment
from pipeline.data.order.windows import Span
from pipeline.data.provenance.run import (
    DocumentInfo,
    Range,
    RunView,
    Say,
    hint_of_ids,
    in_brackets,
    newest_ranks,
    targets_in,
    unknown_origins,
)
from pipeline.data.sources.records import printable
from pipeline.data.tokenization.chat_encoding import TRAINED

_SHOWN_RANGES = 8


@dataclass(frozen=True)
class Predicted:
    """Tokens of a document in a sample that its objective chose to predict.

    Attributes:
        tokens: of the document, [first, end) each.
        words: the first of them as text, with … where others lie between them.
    """

    tokens: list[Range]
    words: str


@dataclass(frozen=True)
class DocumentInSample:
    """A document in a sample.

    Attributes:
        about: the document.
        tokens: those of it that are in the sample.
        targets: those that are targets; all but the first token of the sample, which may leave none.
        words: the first of them as text.
        predicted: which of the targets are predicted, if the objective or a mask of targets chooses them, and the
            first of these as text.
        masked: why they have no weight; None if they have.
        loss_weight: weight of the targets in the training loss; None where the segment has no weights.
    """

    about: DocumentInfo
    tokens: Range
    targets: Range
    words: str
    masked: str | None
    predicted: Predicted | None = None
    loss_weight: float | None = None


@dataclass(frozen=True)
class SampleInfo:
    """A sample of a step.

    Attributes:
        sample: global index.
        micro_batch: which one it is in, if a rank was asked for.
        masked: why it has no weight; None if it has.
    """

    sample: int
    source: str
    epoch: int
    position: int
    micro_batch: int | None
    masked: str | None
    pieces: list[DocumentInSample]


@dataclass(frozen=True)
class Where:
    """Documents of a step.

    Attributes:
        step: from 1.
        steps: of the whole run.
        done: whether it was trained.
        skipped: whether it is passed over.
        samples: global indices [first, end) of the step.
        tokens: target tokens of the run [first, end); slots, where packs come before the end.
        slots: whether packs do.
        rank: (rank, ranks, micro-batch size), if the samples are those of a rank.
        shown: the samples.
        warnings: what is to be known first.
        notes: what else is to be said.
        hints: what else is to be said to people.
    """

    step: int
    steps: int
    done: bool
    skipped: bool
    samples: Range
    tokens: Range
    slots: bool
    rank: tuple[int, int, int] | None
    shown: list[SampleInfo]
    warnings: list[str]
    notes: list[str]
    hints: list[str]

    @property
    def json(self) -> dict[str, Any]:
        """For `--json`."""
        rank = dict(zip(("rank", "ranks", "micro_batch_size"), self.rank, strict=True)) if self.rank else {}
        return {
            "step": self.step,
            "steps": self.steps,
            "done": self.done,
            "skipped": self.skipped,
            "first_sample": self.samples[0],
            "end_sample": self.samples[1],
            "first_token": self.tokens[0],
            "end_token": self.tokens[1],
            **rank,
            "samples": [
                {
                    "sample": sample.sample,
                    "source": sample.source,
                    "lap": sample.epoch,
                    "position": sample.position,
                    **({} if sample.micro_batch is None else {"micro_batch": sample.micro_batch}),
                    "masked": sample.masked,
                    "documents": [
                        piece.about.json
                        | {
                            "tokens": piece.tokens,
                            "targets": piece.targets,
                            "text": piece.words,
                            "masked": piece.masked,
                        }
                        | (
                            {"predicted": piece.predicted.tokens, "predicted_text": piece.predicted.words}
                            if piece.predicted
                            else {}
                        )
                        | ({} if piece.loss_weight is None else {"loss_weight": piece.loss_weight})
                        for piece in sample.pieces
                    ],
                }
                for sample in self.shown
            ],
            "notes": [*self.warnings, *self.notes],
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        state = "skipped" if self.skipped else "done" if self.done else "not yet trained"
        samples, tokens = (
            numbered(noun, first, end - 1)
            for noun, (first, end) in (
                ("sample", self.samples),
                ("slot" if self.slots else "target token", self.tokens),
            )
        )
        yield from (f"note: {warning}" for warning in self.warnings)
        yield f"step {self.step:,} of {self.steps:,}: {samples}, {tokens} of the run; {state}"
        if self.rank:
            padding = "" if self.shown else ": all its samples of this step are padding"
            yield f"rank {self.rank[0]:,} of {self.rank[1]:,}, with micro-batches of {self.rank[2]:,}{padding}"
        for sample in self.shown:
            micro_batch = "" if sample.micro_batch is None else f", micro-batch {sample.micro_batch:,}"
            masked = f"; masked: {sample.masked}" if sample.masked else ""
            yield (
                f"sample {sample.sample:,}: {sample.source}, epoch {sample.epoch:,}, position {sample.position:,}"
                f"{micro_batch}{masked}"
            )
            for piece in sample.pieces:
                masked = f"; masked: {piece.masked}" if piece.masked and piece.masked != sample.masked else ""
                weight = "" if piece.loss_weight is None else f"; loss weight {piece.loss_weight:g}"
                first, end = piece.targets
                tokens = f"tokens {in_brackets(piece.targets)}"
                if first == end:
                    what = "input only" if first > piece.tokens[0] else "behind what the model gets"
                    tokens = f"token {piece.tokens[0]:,}, {what},"
                yield (
                    f"  document {piece.about.document}: {piece.about}, {tokens} of "
                    f'{piece.about.tokens:,}{weight}{masked}: "{printable(piece.words)}"'
                )
                if piece.predicted:
                    yield f"    predicted: {_ranges_text(piece.predicted)}"
        yield from self.notes
        yield from self.hints


def where(
    run: RunView, step: int, *, rank: int | None = None, ranks: int | None = None, ids: bool = False, say: Say
) -> Where:
    """The samples of a step, and the documents in them.

    Args:
        run: the run.
        step: from 1.
        rank: only the samples of this data-parallel rank.
        ranks: how many there are; by default as many as saved the newest checkpoint.
        ids: read ids from the source files where they are not known without.
        say: called with what is about to be read.

    Raises:
        UserError: there is no such step, or no such rank.
    """
    if run.trained is not None and step <= run.trained.done:
        run = run.trained
    if not 1 <= step <= run.steps:
        raise UserError(
            f"--step: {step}: the run has {numbered('step', 1, run.steps)} only ({run.length.reason} ends it)"
        )
    step -= 1
    journal = run.journal
    samples, draws = journal.samples(step), run.sampler.step(step)
    number = journal.segment_number(step)
    chosen: list[tuple[int, int | None]] = [(index, None) for index in range(len(samples))]
    only = _chosen_rank(run, number, rank, ranks)
    if only is not None:
        mine = RankSamples(journal.segments[number].batch_size, only[2], *only[:2]).first(len(samples))
        micro_batches = rank_rows(mine, _costs(run, number, draws) if run.config.model.document_attention else None)
        chosen = [(index, micro_batch) for micro_batch, rows in enumerate(micro_batches) for index in rows.tolist()]
    drawn = []
    for index, micro_batch in chosen:
        name = journal.names[int(draws.source[index])]
        epoch, position = int(draws.epoch[index]), int(draws.position[index])
        spans = run.instances[number][name].at(epoch, position)
        drawn.append((samples[index], name, epoch, position, micro_batch, spans))
    wanted: dict[str, set[int]] = defaultdict(set)
    for _, name, _, _, _, spans in drawn:
        wanted[name].update(span.document for span in spans)
    described = {name: run.describe(name, sorted(documents), ids, say) for name, documents in wanted.items()}
    shown, objectives = [], run.objectives[number]
    for sample, name, epoch, position, micro_batch, spans in drawn:
        pieces, shifts, chosen_tokens = [], run.shifts(number, name), None
        offset = 1 if shifts is None else 0  # targets of a pack are numbered from 1
        if objectives[name].chooses:
            chosen_tokens = run.arranged(number, name, epoch, position, sample).predicted_tokens
        is_masked = journal.segments[number].sources[name].target_mask
        for place, span in enumerate(spans):
            tokens = span.start, span.start + span.length
            about = described[name][span.document]
            pieces.append(
                DocumentInSample(
                    about,
                    tokens,
                    targets_in(span, place, len(spans), shifts),
                    run.words(name, about, tokens),
                    run.masked(step, sample, name, span.document),
                    None if chosen_tokens is None else _predicted(run, name, span, offset, chosen_tokens),
                    _loss_weight(run, journal.segments[number], name, span.document),
                )
            )
            if is_masked:
                pieces[-1] = replace(pieces[-1], predicted=_trained(run, name, span))
            offset += span.length
        shown.append(SampleInfo(sample, name, epoch, position, micro_batch, run.masked(step, sample, name), pieces))
    everything = [about for of_source in described.values() for about in of_source.values()]
    return Where(
        step=step + 1,
        steps=run.steps,
        done=step < run.done,
        skipped=journal.is_skipped(step),
        samples=(samples.start, samples.stop),
        tokens=(journal.tokens(step), journal.tokens(step + 1)),
        slots=any(segment.packed for segment in journal.segments[: number + 1]),
        rank=only,
        shown=shown,
        warnings=[*run.warnings],
        notes=[*unknown_origins(everything), *run.notes],
        hints=hint_of_ids(everything, ids),
    )


def _costs(run: RunView, number: int, draws: Draws) -> IntArray | None:
    """Costs by which ranks balance a step of packs; None for windows."""
    if not run.journal.segments[number].packed:
        return None
    by_source = run.instances[number]
    samples = zip(*(array.tolist() for array in draws), strict=True)
    spans = [by_source[run.journal.names[source]].at(epoch, position) for source, epoch, position in samples]
    return np.array([sum(span.length**2 for span in row) for row in spans])


def _loss_weight(run: RunView, segment: Segment, source: str, document: int) -> float | None:
    """Weight of a document's targets in the training loss; None where the segment has no weights."""
    if not segment.weighs:
        return None
    state = segment.sources[source]
    return state.loss_weight * (run.datasets[source].weight(document) if state.document_weights else 1)


def _predicted(run: RunView, source: str, span: Span, offset: int, tokens: list[Range]) -> Predicted:
    """Predicted tokens of a document in a sample.

    Args:
        run: the run.
        source: of the document.
        span: what the sample has of it.
        offset: of that in the sample.
        tokens: that are predicted, of the sample.
    """
    move = span.start - offset
    inside = [(max(a, offset), min(b, offset + span.length)) for a, b in tokens]
    found = [(a + move, b + move) for a, b in inside if a < b]
    return Predicted(found, run.words_of(source, span.document, found))


def _trained(run: RunView, source: str, span: Span) -> Predicted:
    """Tokens of a document in a sample that its mask names."""
    mask = run.datasets[source].mask(span.document)[span.start : span.start + span.length] == TRAINED
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)) + span.start
    found = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return Predicted(found, run.words_of(source, span.document, found))


def _ranges_text(predicted: Predicted) -> str:
    """`tokens 3, 7-9 and 4 more ranges: "..."`."""
    if not predicted.tokens:
        return "nothing"
    shown = [f"{a:,}" if b - a == 1 else f"{a:,}-{b - 1:,}" for a, b in predicted.tokens[:_SHOWN_RANGES]]
    more = len(predicted.tokens) - len(shown)
    count = sum(b - a for a, b in predicted.tokens)
    return (
        f"{count:,} of its tokens, {', '.join(shown)}{f' and {more:,} more ranges' if more else ''}: "
        f'"{printable(predicted.words)}"'
    )


def _chosen_rank(run: RunView, segment: int, rank: int | None, ranks: int | None) -> tuple[int, int, int] | None:
    """(rank, ranks, micro-batch size) that were asked for; None if nothing was."""
    if rank is None and ranks is None:
        return None
    if rank is None:
        raise UserError(f"--ranks: {ranks}: also give the rank with --rank, from 0")
    ranks = ranks if ranks is not None else newest_ranks(run.folder)
    if ranks is None:
        raise UserError(
            f"--rank: {rank}: also give the number of ranks with --ranks; {run.folder} has no checkpoint that has it"
        )
    if not 0 <= rank < ranks:
        raise UserError(
            f"--rank: {rank}: the run has {numbered('rank', 0, ranks - 1)} only; --ranks gives another number of them"
        )
    return rank, ranks, micro_batch_size(run.config, run.journal, segment, ranks)
