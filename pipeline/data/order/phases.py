"""Plan a run: phases, slices, limits of epochs and the batch ramp of the run file become the segments of a journal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pipeline.common.errors import UserError
from pipeline.common.format import percent
from pipeline.config import Config
from pipeline.config.base import Duration
from pipeline.config.blend import Bound, PhaseConfig
from pipeline.config.data import SourceConfig
from pipeline.data.order.blend import exact_number, integer_weights, keyed_offset, tempered
from pipeline.data.order.journal import Journal, version_of
from pipeline.data.order.segments import Interval, Segment, Sized, Skip, SourceState


def plan_journal(config: Config, datasets: Mapping[str, Sized], saved: Journal | None = None) -> Journal:
    """The journal of a run that starts now. What follows an end of the order (`Sampler.end`) is left out.

    A run that was forked from another one has the segments of that one up to there, and each source continues at its
    position then, as it does from one phase to the next. Phases that are over by then do not count.

    Args:
        config: The run file.
        datasets: The training split of every source by name.
        saved: What the run has had so far, if anything.

    Raises:
        UserError: A phase ends before it begins, a slice is empty, too short for a window or beyond the documents, or
            a source's share is too small; the message names the phase. Or the duration is in epochs, and the run has
            something else than the packs of one source.
    """
    planner = _Planner(config, datasets)
    fork_step = saved.fork_step if saved is not None else 0
    if saved is not None and fork_step:
        _check_past(saved, fork_step, datasets)
        if saved.is_padded(fork_step):
            raise UserError(
                f"step {fork_step:,} ends the epochs of the parent and is filled up with padding, so no step can "
                "follow it: fork from an earlier checkpoint"
            )
        planner.take_over(saved, fork_step)
    past = len(planner.segments)
    for number, phase in enumerate(_phases(config)):
        if past and phase.until is not None and planner.is_over(phase.until):
            continue
        if not planner.add(number, phase):
            break
    segments = planner.segments
    # A phase of the parent that began at the fork, and changed nothing, stays noted as its journal has it.
    begun = saved is not None and any(segment.first_step == fork_step for segment in saved.segments)
    if past and not begun and _goes_on(segments[past - 1], segments[past]):
        del segments[past]
    return Journal(
        order_version=version_of(segments),
        seed=config.run.seed,
        segments=segments,
        skips=_skips(config, datasets),
        fork_step=fork_step,
        end_sample=_end_sample(config.train.duration, segments),
    )


def _end_sample(duration: Duration, segments: list[Segment]) -> int | None:
    """Samples of a run whose duration is in epochs; None for others.

    Raises:
        UserError: Its epochs are not those of the packs of one source.
    """
    if duration.unit != "epochs":
        return None
    key = f"train.duration: {duration.count:,} epochs"
    windows = any(not segment.packed for segment in segments)
    texts = {(name, state.text) for segment in segments for name, state in segment.sources.items()}
    if windows or len(texts) > 1:
        names = ", ".join(sorted({name for name, _ in texts}))
        found = "reads windows" if windows else f"has several sources, slices or sequence lengths ({names})"
        raise UserError(
            f"{key} needs one source of packs for the whole run (data.loader.packing: best_fit), and this run {found}: "
            "give train.duration in steps or tokens, with max_epochs and on_exhausted: stop for the epochs of a source"
        )
    if duration.count < 1:
        raise UserError(f"{key} trains nothing; give 1 epoch or more")
    ((_, (_, _, packs)),) = texts
    assert packs is not None
    return duration.count * packs


def phase_at(config: Config, journal: Journal, step: int) -> int:
    """Index in blend.phases of the phase that a step belongs to; 0 without phases."""
    return sum(phase.until is not None and _reached(phase.until, journal, step) for phase in _phases(config))


def micro_batch_size(config: Config, journal: Journal, number: int, ranks: int) -> int:
    """Samples of a micro-batch on one rank in a segment: what its phase says, or the run, but at most a rank's share.

    Args:
        config: The run file.
        journal: Its plan.
        number: Of the segment.
        ranks: Data-parallel ranks.
    """
    segment = journal.segments[number]
    phase = _phases(config)[segment_phase(config, journal, number)]
    most = -(-segment.batch_size // ranks)
    return min(phase.micro_batch_size or config.train.micro_batch_size or most, most)


MUCH_PADDING = 0.1
"""Fraction of the windows of a step above which a preview warns of padding."""


def padding_warning(where: str, batch_size: int, micro_batch_size: int, ranks: int, padding: float) -> str:
    """Steps of which more than `MUCH_PADDING` is padding, in words.

    Args:
        where: the key or the phase.
        batch_size: windows of a step.
        micro_batch_size: windows of a micro-batch on a rank.
        ranks: data-parallel ranks.
        padding: fraction of the windows of a step.
    """
    remedy = "set a smaller micro_batch_size" if micro_batch_size > 1 else "use fewer ranks"
    return (
        f"{where}: {percent(padding, 1)} of the samples of a step are padding, which takes time and trains nothing: "
        f"make the batch size of {batch_size:,} a multiple of {ranks * micro_batch_size:,} (data-parallel ranks x "
        f"micro-batch size: {ranks:,} x {micro_batch_size:,}), or {remedy}"
    )


def label(config: Config, journal: Journal, number: int) -> str:
    """Label of a segment's phase in tables: its number from 1, and its name; `parent` before a fork."""
    if journal.segment_number(journal.fork_step) > number:
        return "parent"
    phase = segment_phase(config, journal, number)
    return f"{phase + 1} {_phases(config)[phase].name}".strip()


def _phases(config: Config) -> list[PhaseConfig]:
    return config.blend.phases or [PhaseConfig()]


def segment_phase(config: Config, journal: Journal, number: int) -> int:
    """Index in blend.phases of the phase of a segment; 0 without phases."""
    # The run file's phases plan nothing of the steps before a fork.
    return phase_at(config, journal, max(journal.segments[number].first_step, journal.fork_step))


def _reached(until: Duration, journal: Journal, step: int) -> bool:
    return until.count <= (step if until.unit == "steps" else journal.tokens(step))


def _skips(config: Config, datasets: Mapping[str, Sized]) -> tuple[Skip, ...]:
    result = []
    for number, entry in enumerate(config.blend.skip):
        documents = tuple(sorted((range_.first, range_.last + 1) for range_ in entry.documents))
        last = max((end - 1 for _, end in documents), default=-1)
        if entry.source is not None and last >= (count := _all_documents(datasets[entry.source])):
            raise UserError(
                f"blend.skip.{number}: source {entry.source!r} has {count:,} documents, "
                f"numbered from 0, so there is no document {last:,}"
            )
        result.append(
            Skip(
                # The run file counts steps from 1, the journal from 0.
                steps=(entry.steps.first - 1, entry.steps.last) if entry.steps else None,
                samples=(entry.samples.first, entry.samples.last + 1) if entry.samples else None,
                source=entry.source,
                documents=documents,
                first_step=(entry.from_step or 1) - 1,
                given=entry.from_step is not None,
            )
        )
    return tuple(result)


def _check_past(saved: Journal, step: int, datasets: Mapping[str, Sized]) -> None:
    """The sources of the steps before a fork must be there: a `UserError` names one that is not."""
    missing = sorted({name for segment, _ in saved.drawn(step) for name in segment.sources} - datasets.keys())
    if missing:
        raise UserError(
            f"source {missing[0]!r} was read in the {step:,} steps that this run has from its parent, but is not in "
            "data.sources; add it there, and exclude it from later steps with blend.phases: [{weights: ...}] or "
            "[{sources: ...}]"
        )


def _goes_on(one: Segment, two: Segment) -> bool:
    """True if a segment is only the rest of the one before it."""
    samples = two.first_sample - one.first_sample
    if (one.batch_size, one.sequence_length) != (two.batch_size, two.sequence_length):
        return False
    counts = dict(zip(one.sources, one.order().counts(samples), strict=True))
    return one.sources.keys() == two.sources.keys() and all(
        (old.cap if old.cap is None else old.cap - counts[name], *_kept(old)) == (new.cap, *_kept(new))
        for name, old in one.sources.items()
        for new in [two.sources[name]]
    )


def _kept(source: SourceState) -> tuple[object, ...]:
    return (
        source.text,
        source.weight,
        source.stops,
        source.loss_weight,
        source.document_weights,
        source.target_mask,
    )


@dataclass
class _Standing:
    """Position of a source between two segments."""

    offset: int | None = None
    """Carried over; None before its first sample, and when it is exhausted."""
    epoch: int = 0
    cursor: int = 0
    text: tuple[Interval | None, int, bool] | None = None
    """Slice, sequence length and whether samples are packs, of its epoch; None before its first one."""


class _Text(NamedTuple):
    """Documents of a source that a phase reads."""

    documents: Interval | None
    """The slice; None for all documents."""
    tokens: int
    packs: int | None
    """None for windows."""


class _Planner:
    """Goes through the run from segment to segment."""

    def __init__(self, config: Config, datasets: Mapping[str, Sized]) -> None:
        self._config = config
        self._datasets = datasets
        self._sources = {source.name: source for source in config.data.sources}
        self._standing = {name: _Standing() for name in self._sources}
        self._drawn: dict[tuple[str, Interval | None], Fraction] = {}  # epochs by source and slice
        self._step = self._sample = self._tokens = 0
        self.segments: list[Segment] = []

    def take_over(self, saved: Journal, step: int) -> None:
        """Begin with the first `step` steps of another run."""
        for segment, samples in saved.drawn(step):
            self.segments.append(segment)
            for name, state in segment.sources.items():
                standing = self._standing[name]
                standing.text = state.documents, segment.sequence_length, segment.packed
                standing.epoch, standing.cursor = state.lap, state.cursor
            closed = self._close(segment, samples // segment.batch_size)
            assert closed, f"the parent of this run ended before step {step}"

    def is_over(self, until: Duration) -> bool:
        """True if a phase that ends there ends here or has ended."""
        return self._steps_until(until, 1) <= 0

    def add(self, number: int, phase: PhaseConfig) -> bool:
        """Append the segments of a phase; whether anything can follow them."""
        where = f"blend.phases.{number}" + (f" ({phase.name})" if phase.name else "")
        if not self._config.blend.phases:
            where = "the run"
        length = phase.sequence_length or self._config.train.sequence_length
        if phase.until is not None and self._steps_until(phase.until, 1) <= 0:
            raise UserError(
                f"{where} ends at {phase.until.count:,} {phase.until.unit}, but the phase before it lasts to step "
                f"{self._step:,}, {self._tokens:,} tokens: raise its `until`, which counts from the start of the run, "
                "or leave the phase out"
            )
        texts = self._texts(phase, length, where)
        weights = self._weights(phase, {name: text.tokens for name, text in texts.items()}, where)
        while True:
            size, rise = self._batch_size(phase)
            ends = [self._steps_until(end, size * length) for end in (phase.until, rise) if end is not None]
            segment = self._open(texts, weights, phase.loss_weights, size, length)
            self.segments.append(segment)
            if not ends or not self._close(segment, min(ends)):
                return False
            if phase.until is not None and self._steps_until(phase.until, 1) <= 0:
                return True

    def _steps_until(self, until: Duration, tokens_per_step: int) -> int:
        """Steps from here to the first boundary at or after `until`."""
        if until.unit == "steps":
            return until.count - self._step
        return -((self._tokens - until.count) // tokens_per_step)

    def _batch_size(self, phase: PhaseConfig) -> tuple[int, Duration | None]:
        """The batch size from here on in a phase, and until when."""
        full = phase.batch_size or self._config.train.batch_size
        ramp = self._config.train.batch_ramp
        if ramp is None or self._tokens >= ramp.tokens:
            return full, None
        levels = (self._config.train.batch_size - ramp.start) // ramp.increment
        level = self._tokens * levels // ramp.tokens
        size = ramp.start + level * ramp.increment
        if size >= full:
            return full, None
        return size, Duration(count=-(-(level + 1) * ramp.tokens // levels), unit="tokens")

    def _texts(self, phase: PhaseConfig, length: int, where: str) -> dict[str, _Text]:
        """Documents that a phase reads, for each of its sources."""
        packed = (phase.packing or self._config.data.loader.packing) == "best_fit"
        names = phase.sources or (list(phase.weights) if isinstance(phase.weights, dict) else list(self._sources))
        if strange := sorted(phase.slices.keys() - set(names)):
            raise UserError(f"{where}: slices: source {strange[0]!r} is not in the phase ({', '.join(names)})")
        if strange := sorted(phase.loss_weights.keys() - set(names)):
            raise UserError(f"{where}: loss_weights: source {strange[0]!r} is not in the phase ({', '.join(names)})")
        result = {}
        for name in names:
            dataset = self._datasets[name]
            bounds, key = phase.slices.get(name), f"{where}: slices.{name}"
            if bounds is None:
                bounds, key = self._sources[name].slice, f"data.sources.{list(self._sources).index(name)}.slice"
            documents, tokens = None, dataset.tokens
            if bounds is not None:
                documents, tokens = _slice(name, bounds, dataset, key)
            if tokens < (1 if packed else length):
                text = f"its slice [{bounds[0]}, {bounds[1]}] ({key}) has" if bounds is not None else "it has"
                raise UserError(
                    f"source {name!r} is too short for one window of sequence_length {length:,} in {where}: {text} "
                    f"{tokens:,} tokens to train on. Lower the sequence_length, give the source more documents, or "
                    "leave it out"
                )
            result[name] = _Text(documents, tokens, _packs(dataset, length, documents) if packed else None)
        return result

    def _weights(self, phase: PhaseConfig, tokens: Mapping[str, int], where: str) -> dict[str, int]:
        given: dict[str, float] = {name: self._sources[name].weight or tokens[name] for name in tokens}
        if phase.weights == "tokens":
            given = dict(tokens)
        elif phase.weights is not None:
            given = phase.weights
        temperature = phase.temperature or self._config.blend.temperature
        try:
            return integer_weights(tempered(given, temperature))
        except UserError as error:
            cause = f"temperature {temperature:g} makes weights too different: " if temperature != 1 else ""
            raise UserError(f"{where}: {cause}{error}{', or set a higher temperature' if cause else ''}") from None

    def _open(
        self,
        texts: Mapping[str, _Text],
        weights: Mapping[str, int],
        loss_weights: Mapping[str, float],
        size: int,
        length: int,
    ) -> Segment:
        """The segment that begins here."""
        sources = {}
        for name, weight in weights.items():
            standing, (documents, tokens, packs) = self._standing[name], texts[name]
            text = documents, length, packs is not None
            if standing.text not in (None, text):
                # The epoch is closed; if anything of it was drawn, nothing else may be drawn under its number.
                standing.epoch, standing.cursor = standing.epoch + (standing.cursor > 0), 0
            standing.text = text
            source = self._sources[name]
            state = SourceState(
                tokens=tokens,
                documents=documents,
                packs=packs,
                weight=weight,
                offset=keyed_offset(self._config.run.seed, name) if standing.offset is None else standing.offset,
                lap=standing.epoch,
                cursor=standing.cursor,
                stops=source.on_exhausted == "stop",
                loss_weight=loss_weights.get(name, source.loss_weight),
                document_weights=source.weight_key is not None,
                target_mask=has_mask(self._datasets[name]),
            )
            sources[name] = state.model_copy(update={"cap": self._cap(source, state, length)})
        return Segment(
            first_step=self._step,
            first_sample=self._sample,
            batch_size=size,
            sequence_length=length,
            sources=sources,
        )

    def _cap(self, source: SourceConfig, state: SourceState, length: int) -> int | None:
        """Samples that are left to a source by max_epochs."""
        if source.max_epochs is None or source.on_exhausted == "repeat":
            return None
        left = exact_number(source.max_epochs) - self._drawn.get((source.name, state.documents), 0)
        return math.floor(left / _sample_epochs(state, length))

    def _close(self, segment: Segment, steps: int) -> bool:
        """Continue to the end of the segment after `steps` steps; False if the order ends before that."""
        order, samples = segment.order(), steps * segment.batch_size
        if order.capacity is not None and samples > order.capacity:
            return False
        rows = list(zip(segment.sources.items(), order.counts(samples), order.carry(samples), strict=True))
        if any(state.stops and state.cap is not None and count > state.cap for (_, state), count, _ in rows):
            return False
        for (name, state), count, offset in rows:
            standing = self._standing[name]
            epochs, standing.cursor = divmod(state.cursor + count, segment.epoch_samples[name])
            standing.epoch, standing.offset = state.lap + epochs, offset
            text = name, state.documents
            drawn = count * _sample_epochs(state, segment.sequence_length)
            self._drawn[text] = self._drawn.get(text, Fraction()) + drawn
        self._step += steps
        self._sample += samples
        self._tokens += samples * segment.sequence_length
        return True


def has_mask(dataset: Sized) -> bool:
    """True if a dataset says of each token whether it is trained on as a target; False for one that is assumed."""
    manifest = getattr(dataset, "manifest", None)
    return manifest is not None and bool(manifest.has_mask)


def _packs(dataset: Sized, length: int, documents: Interval | None) -> int:
    from pipeline.data.order.packs import count_packs  # datasets take long to import, and windows need none here

    return count_packs(dataset, length, documents)


def _sample_epochs(state: SourceState, length: int) -> Fraction:
    """Epochs that a sample is: its targets over the tokens for a window, of packs one over their number."""
    return Fraction(length, state.tokens) if state.packs is None else Fraction(1, state.packs)


def _all_documents(dataset: Sized) -> int:
    """Documents that a run can read, also of generations that were appended since it began."""
    # What is only assumed has no generations, and the class of datasets is not imported here: it needs the tokenizer.
    return int(getattr(dataset, "whole", dataset).documents)


def _slice(name: str, bounds: tuple[Bound, Bound], dataset: Sized, key: str) -> tuple[Interval | None, int]:
    """Documents [first, end), None for all, and the tokens of them."""
    # Percentages are of what the run began with; numbers may be of documents that were added since.
    first, end = bounds[0].of(dataset.documents), bounds[1].of(dataset.documents)
    documents = _all_documents(dataset)
    text = f"{key}: the slice [{bounds[0]}, {bounds[1]}] of source {name!r}"
    if max(first, end) > documents:
        raise UserError(f"{text} goes beyond its {documents:,} documents: lower its end")
    if first >= end:
        raise UserError(
            f"{text} is empty: of its {documents:,} documents it begins with {first:,} and ends before {end:,}"
        )
    if (first, end) == (0, dataset.documents):
        return None, dataset.tokens
    return (first, end), dataset.document_start(end) - dataset.document_start(first)
