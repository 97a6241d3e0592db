"""Shapes of the steps of a run, as far as the run file alone decides them: phases, batch ramp, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.common.format import counted, percent
from pipeline.config import Config
from pipeline.config.base import Duration
from pipeline.config.blend import PhaseConfig
from pipeline.data.loading.stream_shape import StreamShape, stream_shape


@dataclass(frozen=True)
class StepShape:
    """Shape of a step on each data-parallel rank."""

    batch_key: str
    """Key of the batch size in the run file."""
    micro_key: str
    """Key of the micro-batch in the run file, also where it is not there."""
    length_key: str
    """Key of the sequence length in the run file."""
    batch_size: int
    """Windows, over all ranks."""
    sequence_length: int
    """Tokens of a window."""
    micro_batch_size: int
    """Windows of a micro-batch, on one rank."""
    ranks: int
    """Data-parallel ranks."""
    stream: StreamShape
    """Positions that the objective makes of a window."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches on each rank; the batch is padded up to them."""
        return self.count(self.micro_batch_size)

    @property
    def windows_per_rank(self) -> int:
        """Windows of one rank, padding within them not counted."""
        return -(-self.batch_size // self.ranks)

    @property
    def padding(self) -> float:
        """Share of the windows of a step that are padding, from 0 to 1."""
        return 1 - self.batch_size / (self.micro_batches * self.micro_batch_size * self.ranks)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.batch_size * self.sequence_length

    def __str__(self) -> str:
        padding = f", {percent(self.padding, 1)} padding" if self.padding else ""
        return (
            f"{counted(self.batch_size, 'window')} of {self.sequence_length:,} tokens over "
            f"{counted(self.ranks, 'data-parallel rank')}: {counted(self.micro_batches, 'micro-batch')} of "
            f"{self.micro_batch_size:,} on each{padding}"
        )

    def count(self, micro_batch_size: int) -> int:
        """Micro-batches on each rank if they had `micro_batch_size` windows."""
        return -(-self.batch_size // (micro_batch_size * self.ranks))


def run_stream(config: Config) -> StreamShape:
    """Positions of the windows of `train`, for which stages are balanced whatever the phases have."""
    return stream_shape(config.train.objective, config.train.sequence_length)


def step_shapes(config: Config, ranks: int) -> list[StepShape]:
    """All different shapes of steps over `ranks` data-parallel ranks, in the order in which they come.

    Datasets play no part: how long phases and ramp last follows from batch sizes and sequence lengths.
    """
    return list(dict.fromkeys(shape for shape, _ in _course(config, ranks)))


def step_counts(config: Config, ranks: int) -> dict[StepShape, int]:
    """Number of steps of each shape in a run whose data last until `train.duration`.

    Raises:
        UserError: That is in epochs, whose steps follow from the data.
    """
    duration = config.train.duration
    if duration.unit == "epochs":
        raise UserError(
            f"train.duration: {duration.count:,} epochs: the number of steps follows from packs that are not there "
            "yet: make them with `pipeline preprocess`, or give train.duration in steps for this command"
        )
    counts: dict[StepShape, int] = {}
    steps = tokens = 0
    for shape, taken in _course(config, ranks):
        left = max(0, _steps_until(duration, steps, tokens, shape.tokens))
        made = left if taken is None else min(taken, left)
        if made:
            counts[shape] = counts.get(shape, 0) + made
        steps, tokens = steps + made, tokens + made * shape.tokens
    return counts


def _course(config: Config, ranks: int) -> Iterator[tuple[StepShape, int | None]]:
    """The shapes of steps, each with the number of steps that it holds for; None: from there on."""
    steps = tokens = 0
    for number, phase in enumerate(config.blend.phases or [PhaseConfig()]):
        length = phase.sequence_length or config.train.sequence_length
        while True:
            size, key, rise = _batch_size(config, number, phase, tokens)
            per_rank = -(-size // ranks)
            micro = phase.micro_batch_size or config.train.micro_batch_size or per_rank
            ends = [_steps_until(end, steps, tokens, size * length) for end in (phase.until, rise) if end is not None]
            # A phase that ends before it begins is refused where the run is planned.
            taken = max(0, min(ends)) if ends else None
            yield (
                StepShape(
                    key,
                    _key(number, phase, "micro_batch_size"),
                    _key(number, phase, "sequence_length"),
                    size,
                    length,
                    min(micro, per_rank),
                    ranks,
                    stream_shape(phase.objective or config.train.objective, length),
                ),
                taken,
            )
            if taken is None:
                break
            steps, tokens = steps + taken, tokens + taken * size * length
            if phase.until is not None and _steps_until(phase.until, steps, tokens, 1) <= 0:
                break


def _key(number: int, phase: PhaseConfig, name: str) -> str:
    return f"train.{name}" if getattr(phase, name) is None else f"blend.phases.{number}.{name}"


def _steps_until(until: Duration, steps: int, tokens: int, tokens_per_step: int) -> int:
    if until.unit == "steps":
        return until.count - steps
    return -((tokens - until.count) // tokens_per_step)


def _batch_size(config: Config, number: int, phase: PhaseConfig, tokens: int) -> tuple[int, str, Duration | None]:
    """The batch size after `tokens` tokens, its key, and the end of its validity."""
    full, key = phase.batch_size or config.train.batch_size, _key(number, phase, "batch_size")
    ramp = config.train.batch_ramp
    if ramp is None or tokens >= ramp.tokens:
        return full, key, None
    levels = (config.train.batch_size - ramp.start) // ramp.increment
    level = tokens * levels // ramp.tokens
    size = ramp.start + level * ramp.increment
    if size >= full:
        return full, key, None
    end = Duration(count=-(-(level + 1) * ramp.tokens // levels), unit="tokens")
    return size, "train.batch_ramp", end
