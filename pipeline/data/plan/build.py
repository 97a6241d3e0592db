"""`pipeline data plan`: a run on paper, with or without its datasets, before anybody pays for it.

Everything but the hash of the first steps comes from closed forms: a run of 10**13 tokens takes no longer than a small
one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from pipeline.common import storage
from pipeline.common.console import Console, say
from pipeline.common.errors import UserError
from pipeline.common.run_files import CHECKPOINT_STATE, RunFiles
from pipeline.config.base import parse_count
from pipeline.config.root import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, is_finished, open_datasets, open_set, open_split
from pipeline.data.datasets.remote.dataset import RemoteDataset
from pipeline.data.datasets.remote.opening import opening_requests
from pipeline.data.datasets.validate import check_datasets, check_tokenizers
from pipeline.data.loading.masked_sources import check_masked_datasets
from pipeline.data.loading.objectives.choice import check_objectives, uses
from pipeline.data.loading.stream_shape import padding_share, stream_shape
from pipeline.data.order.blend import UNIT
from pipeline.data.order.consumption import Account, Documents, SliceAccount, accounts
from pipeline.data.order.journal import Journal
from pipeline.data.order.journal_file import saved_journal
from pipeline.data.order.packs import open_instances
from pipeline.data.order.phases import (
    MUCH_PADDING,
    label,
    micro_batch_size,
    padding_warning,
    plan_journal,
    segment_phase,
)
from pipeline.data.order.run_length import (
    RunLength,
    check_end,
    last_window_step,
    run_length,
    skip_text,
    warnings,
)
from pipeline.data.order.sampler import Sampler
from pipeline.data.order.segments import Segment, Sized
from pipeline.data.plan.rows import DataPlan, ObjectiveRow, PreviewRow, RemoteRow, SegmentRow, SliceRow
from pipeline.data.preprocess.run_tokenizer import check_tokenizer_settings
from pipeline.data.preprocess.source_settings import check_heldout_settings, check_settings, unused_weights
from pipeline.data.provenance.run import shortened
from pipeline.data.tokenization.tokenizer import Tokenizer

HASHED_STEPS = 1000
DOCUMENT_TOKENS = 1000
"""Tokens of a document of a source that is assumed."""
SHOWN_CHARACTERS = 300
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


def make_data_plan(
    config: Config,
    *,
    ranks: int = 1,
    hashed_steps: int = HASHED_STEPS,
    preview: int = 0,
    assume: Sequence[str] = (),
    check: Callable[[Journal, int], Sequence[str]] = lambda journal, steps: (),
) -> DataPlan:
    """The data plan of a run.

    Args:
        config: The run file.
        ranks: Data-parallel ranks.
        hashed_steps: Steps whose order is hashed, at most those of the run.
        preview: Windows to show.
        assume: `SOURCE=TOKENS` for sources that have no dataset yet.
        check: Refuses what else training would refuse, by the journal and the steps of the run; returns warnings.

    Raises:
        UserError: The run would be refused.
    """
    sized = open_sized(config, parse_assumed(config, assume))
    check_masked_datasets(config, {name: each for name, each in sized.items() if isinstance(each, Dataset)})
    journal, done = planned_journal(config, sized)
    sampler = Sampler(journal)
    length = run_length(config, sampler)
    if length.steps == 0:
        raise UserError(f"the run has no step ({length.reason}); give it at least one")
    more = check(journal, length.steps)
    segments = _segment_rows(config, journal, length.steps, ranks, sized)
    hashed = min(hashed_steps, length.steps)
    return DataPlan(
        run=config.run.dir,
        ranks=ranks,
        steps=length.steps,
        samples=sum(row.samples for row in segments),
        tokens=journal.tokens(length.steps),
        ends=length.reason,
        steps_so_far=done,
        sources=_slice_rows(config, sized, sampler, length, done),
        segments=segments,
        objectives=list(_objective_rows(config, journal, segments)),
        skips=[skip_text(skip) for skip in journal.skips],
        warnings=[
            *warnings(config, journal, sampler, length.steps, done or 0),
            *_padding_warnings(segments, ranks),
            *more,
            *unused_weights(config, {n: each.manifest for n, each in sized.items() if isinstance(each, Dataset)}),
        ],
        hashed_steps=hashed,
        order_hash=f"{order_hash(sampler, hashed):016x}" if hashed else None,
        journal=journal.fingerprint,
        preview=list(_preview_rows(sampler, sized, min(preview, journal.samples(length.steps).start))),
        remote=list(_remote_rows(config, journal, sized, length.steps)),
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
        folder = dataset_place(config, source, TRAIN)
        if source.name in assumed:
            found[source.name] = assumed[source.name]
        elif is_finished(config, folder):
            found[source.name] = open_split(config, source, TRAIN)
        else:
            missing.append((source.name, folder))
    if missing:
        more = f"; and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise UserError(
            "; ".join(f"source {name!r} has no dataset yet ({folder})" for name, folder in missing[:_NAMED])
            + f"{more}: run `pipeline preprocess` first (or correct the key `dataset`, if it has one), or plan with "
            f"assumed sizes: {' '.join(f'--assume {name}=1T' for name, _ in missing)}"
        )
    datasets = {name: dataset for name, dataset in found.items() if isinstance(dataset, Dataset)}
    if datasets:
        check_datasets(datasets)
        first = next(iter(datasets.values()))
        check_objectives(config, first.manifest.tokenizer, first.folder)
    if len(datasets) == len(found):
        check_settings(config, {name: dataset.manifest for name, dataset in datasets.items()})
        check_tokenizer_settings(config)
        if config.train.validation.samples:
            check_datasets(open_datasets(config, config.train.validation.split))
        for name in config.heldout_sets:
            chosen = open_set(config, name)
            check_datasets(chosen)
            check_tokenizers({**datasets, **{f"{source} of heldout_sets.{name}": d for source, d in chosen.items()}})
        check_heldout_settings(config)
    return found


def planned_journal(config: Config, sized: Mapping[str, Sized]) -> tuple[Journal, int | None]:
    """The journal that training would start with, and the steps of the newest checkpoint if there is one.

    Raises:
        UserError: It changes steps that were trained.
    """
    checkpoints = RunFiles(config.run.dir).checkpoint_steps()
    if not checkpoints:
        return plan_journal(config, sized), None
    done = max(checkpoints)
    saved = saved_journal(config.run.dir, storage.get_json(checkpoints[done] / CHECKPOINT_STATE)["journal"], done)
    journal = plan_journal(config, sized, saved)
    check_end(Sampler(journal), done)
    return journal.going_on(saved, done), done


def order_hash(sampler: Sampler, steps: int) -> int:
    """xxh3-64 of the order hashes of the first `steps` steps, each a little-endian u64."""
    digest = xxhash.xxh3_64()
    started, is_announced = time.monotonic(), False
    for step in range(steps):
        digest.update(struct.pack("<Q", sampler.order_hash(step)))
        if not is_announced and time.monotonic() - started > _PATIENCE_S:
            is_announced = True
            say(Console(stderr=True), f"hashing the order of {steps:,} steps, {step + 1:,} done ...")
    return digest.intdigest()


def _segment_rows(
    config: Config, journal: Journal, steps: int, ranks: int, sized: Mapping[str, Dataset | Assumed]
) -> list[SegmentRow]:
    """The segments that begin before the end of the run."""
    rows = []
    for number, (segment, samples) in enumerate(journal.drawn(steps)):
        micro = micro_batch_size(config, journal, number, ranks)
        micro_batches = -(-segment.batch_size // (micro * ranks))
        rows.append(
            SegmentRow(
                phase=label(config, journal, number),
                first_step=segment.first_step + 1,
                last_step=segment.first_step + -(-samples // segment.batch_size),
                samples=samples,
                tokens=samples * segment.sequence_length,
                batch_size=segment.batch_size,
                sequence_length=segment.sequence_length,
                packing=segment.packing,
                micro_batch_size=micro,
                micro_batches=micro_batches,
                padding=micro_batches * micro * ranks - segment.batch_size,
                trained_per_step=_trained_per_step(segment, samples, sized),
            )
        )
    return rows


def _trained_per_step(segment: Segment, samples: int, sized: Mapping[str, Dataset | Assumed]) -> float | None:
    """Targets of a step that are trained on, on average; of a slice, by the share in all of its source."""
    if not any(state.target_mask for state in segment.sources.values()):
        return None
    trained = 0.0
    for (name, state), count in zip(segment.sources.items(), segment.order().counts(samples), strict=True):
        share, dataset = 1.0, sized[name]
        if state.target_mask and isinstance(dataset, Dataset):
            whole = dataset.whole
            share = (whole.trained_tokens or 0) / max(1, whole.tokens)
        trained += count * share * state.tokens / max(1, segment.epoch_samples[name])
    return trained / -(-samples // segment.batch_size)


def _objective_rows(config: Config, journal: Journal, rows: Sequence[SegmentRow]) -> Iterator[ObjectiveRow]:
    """The objectives of each segment: that of all sources, and those that single ones have."""
    for number, row in enumerate(rows):
        first, *others = uses(config, segment_phase(config, journal, number))
        of_sources = {other.key.removeprefix(f"{first.key}.by_source."): other for other in others}
        for source, use in [(None, first), *of_sources.items()]:
            if source is None or source in journal.segments[number].sources:
                shape = stream_shape(use.objective, row.sequence_length)
                yield ObjectiveRow(
                    phase=row.phase,
                    first_step=row.first_step,
                    last_step=row.last_step,
                    source=source,
                    objective=use.objective.type,
                    sequence_length=row.sequence_length,
                    encoder=shape.encoder,
                    decoder=shape.decoder,
                    predicted=shape.predicted,
                    padding=padding_share(use.objective, row.sequence_length),
                )


def _remote_rows(
    config: Config, journal: Journal, sized: Mapping[str, Dataset | Assumed], steps: int
) -> Iterator[RemoteRow]:
    """The sources whose datasets are in a bucket."""
    samples: dict[str, int] = {}
    for segment, count in journal.drawn(steps):
        for name, drawn in zip(segment.sources, segment.order().counts(count), strict=True):
            samples[name] = samples.get(name, 0) + drawn
    for name, dataset in sized.items():
        if isinstance(dataset, RemoteDataset):
            sizes = [file.size for file in dataset.files]
            yield RemoteRow(
                source=name,
                url=str(dataset.url),
                parts=len(sizes),
                bytes=sum(sizes),
                open_requests=opening_requests(dataset, config.pack_lengths),
                copy_requests=sum(-(-size // config.data.remote.request_bytes) for size in sizes),
                range_requests=samples.get(name, 0),
                ahead=config.stage.ahead,
            )


def _padding_warnings(rows: Sequence[SegmentRow], ranks: int) -> Iterator[str]:
    """Phases in which many of the samples that are computed are masked ones, a line each with the worst of a ramp."""
    worst: dict[str, tuple[float, SegmentRow]] = {}
    for row in rows:
        fraction = row.padding / (row.batch_size + row.padding)
        if fraction > max(MUCH_PADDING, worst.get(row.phase, (0.0, row))[0]):
            worst[row.phase] = fraction, row
    for phase, (fraction, row) in worst.items():
        text = f"phase {phase} from step {row.first_step:,} on"
        yield padding_warning(text, row.batch_size, row.micro_batch_size, ranks, fraction)


def _slice_rows(
    config: Config, sized: Mapping[str, Dataset | Assumed], sampler: Sampler, length: RunLength, done: int | None
) -> list[SliceRow]:
    """The slices of all sources that take part, in the order of the run file."""
    journal = sampler.journal
    weights, loss_weights, drawn, samples = _by_phase(config, journal, length.steps)
    ends = accounts(sampler, length.steps)
    now = {} if done is None else accounts(sampler, done)
    rows = []
    for source in config.data.sources:
        for account in ends[source.name].slices if source.name in ends else ():
            first, end = account.documents or (0, sized[source.name].documents)
            text, exhausted = (source.name, account.documents), account.exhausted
            rows.append(
                SliceRow(
                    source=source.name,
                    documents=account.documents,
                    document_count=end - first,
                    assumed=isinstance(sized[source.name], Assumed),
                    weights=weights.get(text, {}),
                    shares={phase: _nine_digits(n / samples[phase]) for phase, n in drawn.get(text, {}).items()},
                    share=_nine_digits(account.slots / journal.tokens(length.steps)),
                    loss_weights=loss_weights[text],
                    document_weights=source.weight_key is not None,
                    max_epochs=source.max_epochs,
                    on_exhausted=source.on_exhausted,
                    exhausted_step=None if exhausted is None else last_window_step(sampler, source.name, exhausted) + 1,
                    so_far=_same_slice(now.get(source.name), account),
                    end=account,
                )
            )
    return rows


_ByPhase = dict[tuple[str, Documents], dict[str, float]]


def _by_phase(config: Config, journal: Journal, steps: int) -> tuple[_ByPhase, _ByPhase, _ByPhase, dict[str, int]]:
    """Weights, loss weights and samples of each source and slice by phase, and all samples by phase."""
    weights: _ByPhase = {}
    loss_weights: _ByPhase = {}
    drawn: _ByPhase = {}
    total: dict[str, int] = {}
    for number, (segment, samples) in enumerate(journal.drawn(steps)):
        phase = label(config, journal, number)
        total[phase] = total.get(phase, 0) + samples
        for (name, state), count in zip(segment.sources.items(), segment.order().counts(samples), strict=True):
            text = name, state.documents
            weights.setdefault(text, {})[phase] = _nine_digits(state.weight / UNIT)
            loss_weights.setdefault(text, {})[phase] = state.loss_weight
            mine = drawn.setdefault(text, {})
            mine[phase] = mine.get(phase, 0) + count
    return weights, loss_weights, drawn, total


def _nine_digits(fraction: float) -> float:
    """The fraction as a run file has it: weights are integers of 32 bits, so that 0.7 is stored as one beside it."""
    return float(f"{fraction:.9g}")


def _same_slice(account: Account | None, end: SliceAccount) -> SliceAccount | None:
    return next((other for other in account.slices if other.documents == end.documents), None) if account else None


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
        epoch, position = int(draws.epoch[sample - first]), int(draws.position[sample - first])
        dataset, state = sized[name], journal.segments[number].sources[name]
        pieces, shown = [], None
        if isinstance(dataset, Dataset):
            assert tokenizer is not None
            instances = open_instances(dataset, state, journal.segments[number].sequence_length, journal.seed, name)
            pieces = [(span.document, span.start, span.length) for span in instances.at(epoch, position)]
            ids = [dataset.read(dataset.document_start(d) + start, length) for d, start, length in pieces]
            # Four tokens a character is the most: one for each byte of it.
            decoded = tokenizer.decode(np.concatenate(ids)[: 4 * SHOWN_CHARACTERS])
            shown = shortened(decoded, SHOWN_CHARACTERS)
        yield PreviewRow(sample, step + 1, name, epoch, position, pieces, shown)
