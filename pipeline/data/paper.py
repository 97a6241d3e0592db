"""`pipeline data plan`: a run on paper, with or without its datasets, before anybody pays for it.

Everything but the hash of the first steps comes from closed forms: a run of 10**13 tokens takes no longer than a small
one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console

from pipeline.config.base import parse_count
from pipeline.config.root import Config
from pipeline.console import say
from pipeline.data import store
from pipeline.data.accounting import (
    Account,
    Documents,
    RunLength,
    SliceAccount,
    accounts,
    run_length,
    skip_text,
    warnings,
)
from pipeline.data.blend import UNIT
from pipeline.data.checks import check_tokenizers
from pipeline.data.dataset import Dataset, Slice
from pipeline.data.instances import Windows
from pipeline.data.journal import Journal, Sized
from pipeline.data.opening import dataset_folder
from pipeline.data.phases import label, micro_batch_size
from pipeline.data.plan import check_settings
from pipeline.data.provenance import checkpoint_steps
from pipeline.data.receipts import MANIFEST_FILE, TRAIN
from pipeline.data.sampler import Sampler
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.tokenizer_stage import check_tokenizer_settings
from pipeline.errors import UserError

HASHED_STEPS = 1000
DOCUMENT_TOKENS = 1000
"""Of a document of a source that is assumed."""
SHOWN_CHARACTERS = 300
STATE_FILE = "state.json"
"""Of a checkpoint; it has the journal by which the steps before it were trained."""
_PATIENCE_S = 1.0
_NAMED = 5
"""Sources without a dataset in a message."""


@dataclass(frozen=True)
class Assumed:
    """A source that there is no dataset of yet. All its documents have the same length."""

    tokens: int
    """Tokens in all."""

    @property
    def documents(self) -> int:
        """Documents in all."""
        return max(1, self.tokens // DOCUMENT_TOKENS)

    def document_start(self, document: int) -> int:
        """The token at which a document begins; for `documents`, the number of tokens."""
        return self.tokens * document // self.documents


@dataclass(frozen=True)
class SliceRow:
    """A slice of a source in the plan."""

    source: str
    documents: Documents
    """The slice; None for all documents."""
    document_count: int
    """Documents in it."""
    assumed: bool
    """There is no dataset yet."""
    weights: dict[str, float]
    """Share of the samples by phase, where the slice takes part."""
    max_epochs: float | None
    on_exhausted: str
    exhausted_step: int | None
    """Step, from 1, with its last window, if it reaches max_epochs."""
    so_far: SliceAccount | None
    """What the run has drawn from it until now."""
    end: SliceAccount
    """What the whole run draws from it."""


@dataclass(frozen=True)
class SegmentRow:
    """A stretch of the run in which nothing changes, as far as the run goes. Steps are numbered from 1."""

    phase: str
    first_step: int
    last_step: int
    samples: int
    tokens: int
    batch_size: int
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    """Of a step on one rank."""
    padding: int
    """Masked samples that fill up a step."""


@dataclass(frozen=True)
class PreviewRow:
    """A window."""

    sample: int
    step: int
    source: str
    lap: int
    position: int
    documents: list[tuple[int, int, int]]
    """(document, first token of it, tokens) of each piece."""
    text: str | None
    """None where the source is assumed."""


@dataclass(frozen=True)
class Plan:
    """Everything that `pipeline data plan` says."""

    run: Path
    ranks: int
    steps: int
    samples: int
    tokens: int
    ends: str
    """Why it ends there."""
    steps_so_far: int | None
    """Of the newest checkpoint; None if the run has not begun."""
    sources: list[SliceRow]
    segments: list[SegmentRow]
    skips: list[str]
    warnings: list[str]
    hashed_steps: int
    order_hash: str
    """xxh3-64 of the first steps' order hashes, each a little-endian u64; 16 hexadecimal digits."""
    journal: str
    """Fingerprint of the journal: of all that decides the order of the whole run but the tokens."""
    preview: list[PreviewRow]

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        value = {**asdict(self), "run": str(self.run)}
        for row, json in zip(self.sources, value["sources"], strict=True):
            for name, account in (("so_far", row.so_far), ("end", row.end)):
                if account is not None:
                    json[name]["epochs"] = account.epochs
        return value


def make_plan(
    config: Config,
    *,
    ranks: int = 1,
    hashed_steps: int = HASHED_STEPS,
    preview: int = 0,
    assume: Sequence[str] = (),
) -> Plan:
    """The plan of a run.

    Args:
        config: The run file.
        ranks: Data-parallel ranks.
        hashed_steps: Steps whose order is hashed, if the run has so many.
        preview: Windows to show.
        assume: `SOURCE=TOKENS` for sources that have no dataset yet.

    Raises:
        UserError: The run would be refused.
    """
    sized = open_sized(config, parse_assumed(config, assume))
    journal, done = planned_journal(config, sized)
    sampler = Sampler(journal, [segment.windows for segment in journal.segments])
    length = run_length(config, sampler)
    segments = _segment_rows(config, journal, length.steps, ranks)
    hashed = min(hashed_steps, length.steps)
    return Plan(
        run=config.run.dir,
        ranks=ranks,
        steps=length.steps,
        samples=sum(row.samples for row in segments),
        tokens=journal.tokens(length.steps),
        ends=length.reason,
        steps_so_far=done,
        sources=_slice_rows(config, sized, sampler, length, done),
        segments=segments,
        skips=[skip_text(skip) for skip in journal.skips],
        warnings=warnings(config, journal, sampler, length.steps),
        hashed_steps=hashed,
        order_hash=f"{order_hash(sampler, hashed):016x}",
        journal=journal.fingerprint,
        preview=list(_preview_rows(sampler, sized, min(preview, journal.samples(length.steps).start))),
    )


def parse_assumed(config: Config, assume: Sequence[str]) -> dict[str, Assumed]:
    """`web=1T` as sources by name.

    Raises:
        UserError: Something else.
    """
    names = [source.name for source in config.data.sources]
    result = {}
    for text in assume:
        name, _, count = text.partition("=")
        try:
            tokens = parse_count(count)
        except ValueError:
            tokens = 0
        if name not in names or tokens < 1:
            raise UserError(
                f"--assume {text}: must be SOURCE=TOKENS, like {names[0]}=1T, with one of data.sources "
                f"({', '.join(names)}) and a number of tokens (300, 2_000_000, 1e9, 1.5B)"
            )
        result[name] = Assumed(tokens)
    return result


def open_sized(config: Config, assumed: Mapping[str, Assumed]) -> dict[str, Dataset | Assumed]:
    """The training split of each source, or what is assumed in its place.

    Raises:
        UserError: A source has neither, or training would refuse the datasets.
    """
    found: dict[str, Dataset | Assumed] = {}
    missing = []
    for source in config.data.sources:
        folder = dataset_folder(config, source, TRAIN)
        if source.name in assumed:
            found[source.name] = assumed[source.name]
        elif (folder / MANIFEST_FILE).exists():
            found[source.name] = Dataset.open(folder)
        else:
            missing.append((source.name, folder))
    if missing:
        more = f"; and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise UserError(
            "; ".join(f"source {name!r} has no dataset yet ({folder})" for name, folder in missing[:_NAMED])
            + f"{more}: run `pipeline preprocess` first (or correct the key `dataset`, if it has one), or plan with "
            f"sizes that you assume: --assume {missing[0][0]}=1T"
        )
    datasets = {name: dataset for name, dataset in found.items() if isinstance(dataset, Dataset)}
    if datasets:
        check_tokenizers(datasets)
    if len(datasets) == len(found):
        check_settings(config, {name: dataset.manifest for name, dataset in datasets.items()})
        check_tokenizer_settings(config)
    return found


def planned_journal(config: Config, sized: Mapping[str, Sized]) -> tuple[Journal, int | None]:
    """The journal that training would start with, and the steps of the newest checkpoint if there is one.

    Raises:
        UserError: It changes steps that were trained.
    """
    journal = Journal.plan(config, sized)
    checkpoints = checkpoint_steps(config.run.dir)
    if not checkpoints:
        return journal, None
    done = max(checkpoints)
    saved = Journal.from_json(store.get_json(checkpoints[done] / STATE_FILE)["journal"])
    return journal.going_on(saved, done), done


def order_hash(sampler: Sampler, steps: int) -> int:
    """xxh3-64 of the order hashes of the first `steps` steps, each a little-endian u64."""
    digest = xxhash.xxh3_64()
    started, told = time.monotonic(), False
    for step in range(steps):
        digest.update(struct.pack("<Q", sampler.order_hash(step)))
        if not told and time.monotonic() - started > _PATIENCE_S:
            told = True
            say(Console(stderr=True), f"hashing the order of {steps:,} steps, {step + 1:,} done ...")
    return digest.intdigest()


def _segment_rows(config: Config, journal: Journal, steps: int, ranks: int) -> list[SegmentRow]:
    """The segments that begin before the end of the run."""
    rows = []
    for number, (segment, samples) in enumerate(journal.drawn(steps)):
        micro = micro_batch_size(config, journal, number, ranks)
        micro_batches = -(-segment.batch_size // (micro * ranks))
        rows.append(
            SegmentRow(
                phase=label(config, journal, number),
                first_step=segment.first_step + 1,
                last_step=segment.first_step + samples // segment.batch_size,
                samples=samples,
                tokens=samples * segment.sequence_length,
                batch_size=segment.batch_size,
                sequence_length=segment.sequence_length,
                micro_batch_size=micro,
                micro_batches=micro_batches,
                padding=micro_batches * micro * ranks - segment.batch_size,
            )
        )
    return rows


def _slice_rows(
    config: Config, sized: Mapping[str, Dataset | Assumed], sampler: Sampler, length: RunLength, done: int | None
) -> list[SliceRow]:
    """The slices of all sources that take part, in the order of the run file."""
    journal = sampler.journal
    phases = [label(config, journal, number) for number in range(len(journal.drawn(length.steps)))]
    ends = accounts(sampler, length.steps)
    now = {} if done is None else accounts(sampler, done)
    rows = []
    for source in config.data.sources:
        for part in ends[source.name].slices if source.name in ends else ():
            first, end = part.documents or (0, sized[source.name].documents)
            rows.append(
                SliceRow(
                    source=source.name,
                    documents=part.documents,
                    document_count=end - first,
                    assumed=isinstance(sized[source.name], Assumed),
                    weights={
                        phase: state.weight / UNIT
                        for phase, segment in zip(phases, journal.segments, strict=False)
                        if (state := segment.sources.get(source.name)) is not None and state.documents == part.documents
                    },
                    max_epochs=source.max_epochs,
                    on_exhausted=source.on_exhausted,
                    exhausted_step=_exhausted_step(sampler, source.name, part),
                    so_far=_same_slice(now.get(source.name), part),
                    end=part,
                )
            )
    return rows


def _same_slice(account: Account | None, part: SliceAccount) -> SliceAccount | None:
    return next((other for other in account.slices if other.documents == part.documents), None) if account else None


def _exhausted_step(sampler: Sampler, name: str, part: SliceAccount) -> int | None:
    """The step, from 1, in which a source gives the last window that max_epochs allows; None if it does not."""
    if part.exhausted is None:
        return None
    segment = sampler.journal.segments[part.exhausted]
    state = segment.sources[name]
    assert state.cap
    laps, position = divmod(state.cursor + state.cap - 1, segment.windows[name])
    (sample,) = sampler.find(name, part.exhausted, state.lap + laps, np.array([position]))
    return sampler.journal.step_of(int(sample)) + 1


def _preview_rows(sampler: Sampler, sized: Mapping[str, Dataset | Assumed], count: int) -> Iterator[PreviewRow]:
    """The first windows."""
    journal = sampler.journal
    # All datasets of a run have one tokenizer.
    folders = [dataset.folder for dataset in sized.values() if isinstance(dataset, Dataset)]
    tokenizer = Tokenizer.open(folders[0]) if folders and count else None
    for sample in range(count):
        step = journal.step_of(sample)
        number, first = journal.segment_number(step), journal.samples(step).start
        draws = sampler.step(step)
        name = journal.names[int(draws.source[sample - first])]
        lap, position = int(draws.lap[sample - first]), int(draws.position[sample - first])
        dataset, documents = sized[name], journal.segments[number].sources[name].documents
        pieces, shown = [], None
        if isinstance(dataset, Dataset):
            assert tokenizer is not None
            text = dataset if documents is None else Slice(dataset, *documents)
            windows = Windows(text, journal.segments[number].sequence_length, journal.seed, name)
            pieces = [(span.document, span.start, span.length) for span in windows.at(lap, position)]
            ids = [dataset.read(dataset.document_start(d) + start, length) for d, start, length in pieces]
            # Four tokens a character is the most: one for each byte of it.
            decoded = tokenizer.decode(np.concatenate(ids)[: 4 * SHOWN_CHARACTERS])
            shown = decoded[:SHOWN_CHARACTERS] + ("…" if len(decoded) > SHOWN_CHARACTERS else "")
        yield PreviewRow(sample, step + 1, name, lap, position, pieces, shown)
