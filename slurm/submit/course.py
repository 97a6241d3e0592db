"""Forecast of a training: tokens, seconds, jobs, device hours, disk. Nothing is built, and nothing written."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.common.capacity import free_space
from pipeline.common.errors import UserError
from pipeline.common.format import percent
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.base import Duration
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.slurm import SiteConfig
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, is_finished, open_datasets
from pipeline.data.loading.objectives.choice import uses
from pipeline.data.loading.stream_shape import StreamShape, stream_shape
from pipeline.data.order.journal import Journal
from pipeline.data.order.phases import segment_phase
from pipeline.data.order.run_length import run_length
from pipeline.data.order.sampler import Sampler
from pipeline.data.plan.build import Assumed, planned_journal
from pipeline.data.provenance.loss_file import losses_bytes
from pipeline.train.checkpoint.committed import UNREADABLE
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.policy import cadences, most_exports
from pipeline.train.export.folders import ExportFolders
from pipeline.train.host.devices import calibrated, device_of_gres
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import flops_per_token
from pipeline.train.parallel.footprint import checkpoint_bytes, export_bytes
from pipeline.train.planning.published import TYPICAL, expected
from pipeline.train.rules.layout_check import planned_spec
from pipeline.train.run.attempts import attempts
from slurm.record.planned_job import PlannedJob
from slurm.submit.stop_lead_time import signal_seconds

START_S = 180.0
"""Taken for the start of a job: processes, packages, data, checkpoint."""
_ROWS = 1000
"""Last rows of metrics.jsonl that are read."""
_PLENTY = 10**15
"""Tokens of a source that is not there yet: more than any run reads, so that none ends early for want of them."""


@dataclass(frozen=True)
class Course:
    """Length and progress of a run."""

    steps: int
    tokens: int
    reason: str
    """Reason for its end."""
    done_steps: int
    """Steps of the newest checkpoint."""
    done_tokens: int
    assumed: bool
    """There are no datasets yet; they are taken to be large enough."""
    flops: float | None
    """FLOPs of the steps that remain; None where the size of the vocabulary is not known."""
    losses_bytes: int = 0
    """Bytes of the losses of all samples on disk; 0 if they are not recorded."""

    @property
    def steps_left(self) -> int:
        """Steps that remain."""
        return max(0, self.steps - self.done_steps)

    @property
    def tokens_left(self) -> int:
        """Tokens of them."""
        return max(0, self.tokens - self.done_tokens)


@dataclass(frozen=True)
class Disk:
    """Disk usage of the checkpoints of a run."""

    each: int
    """Bytes of one."""
    there: int
    """Checkpoints that are there."""
    most: int
    """Checkpoints at a time until the end, the one that is being written among them."""
    free: int
    """Bytes that this user may still write there."""
    files_free: int | None
    """Inodes; None where the file system has no number of them."""
    exports: int = 0
    """Bytes of the exports that are still to be written (`train.checkpoint.export`)."""

    @property
    def needed(self) -> int:
        """Bytes that are still to be written, less what is removed meanwhile."""
        return max(0, self.most - self.there) * self.each + self.exports


@dataclass(frozen=True)
class Forecast:
    """Forecast of a training."""

    course: Course | None
    """None where it cannot be planned before the data are there."""
    seconds: float | None
    """Time of the steps that remain; None where nothing is known of their speed."""
    how: str
    """Source of `seconds`, in words."""
    bounds: tuple[float, float] | None
    """Least and most seconds, where they are planned."""
    disk: Disk | None
    """None where the size of the vocabulary is not known."""

    @property
    def step_seconds(self) -> float | None:
        """Mean of the steps that remain."""
        if self.course is None or self.seconds is None or not self.course.steps_left:
            return None
        return self.seconds / self.course.steps_left


def forecast(config: Config, site: SiteConfig, job: PlannedJob) -> Forecast:
    """Forecast of the training of a run."""
    spec: DecoderSpec | None = None
    with suppress(UserError):  # it has no tokenizer yet, and training it will say so
        spec = planned_spec(config)
    course: Course | None = None
    with suppress(UserError, OSError):  # what is wrong with the data is not told here
        course = read_course(config, spec)
    seconds, how, bounds = _duration(config, site, job, course)
    return Forecast(course, seconds, how, bounds, None if spec is None else checkpoints_disk(config, spec, course))


def read_course(config: Config, spec: DecoderSpec | None) -> Course:
    """Length of a run from its datasets, or before there are any from the run file alone.

    Args:
        config: the run.
        spec: its model, for the FLOPs.

    Raises:
        UserError: it cannot be had from the data.
    """
    places = [dataset_place(config, source, TRAIN) for source in config.data.sources]
    assumed = not all(is_finished(config, place) for place in places)
    if assumed and config.train.duration.unit == "epochs":
        raise UserError("the steps of an epoch are not known before there are packs")
    if assumed:
        journal, done = planned_journal(config, {source.name: Assumed(_PLENTY) for source in config.data.sources})
    else:
        journal, done = planned_journal(config, open_datasets(config, TRAIN))
    length, done = run_length(config, Sampler(journal)), done or 0
    flops = None
    if spec is not None:
        flops = max(0.0, flops_of(config, journal, spec, length.steps) - flops_of(config, journal, spec, done))
    tokens, done_tokens = journal.tokens(length.steps), journal.tokens(done)
    recorded = losses_bytes(journal.samples(length.steps).start) if config.train.metrics.windows else 0
    return Course(length.steps, tokens, length.reason, done, done_tokens, assumed, flops, recorded)


def in_steps(config: Config) -> Config:
    """The run with its duration in steps, if it is in epochs whose packs are there; else as it is.

    Raises:
        UserError: it cannot be had from the data.
    """
    if config.train.duration.unit != "epochs":
        return config
    if not all(is_finished(config, dataset_place(config, source, TRAIN)) for source in config.data.sources):
        return config
    return _with_steps(config, read_course(config, None).steps)


def _with_steps(config: Config, steps: int) -> Config:
    train = config.train.model_copy(update={"duration": Duration(count=steps, unit="steps")})
    return config.model_copy(update={"train": train})


def flops_of(config: Config, journal: Journal, spec: DecoderSpec, steps: int) -> float:
    """Model FLOPs of the first `steps` steps, attention counted whole."""
    tokens: Counter[StreamShape] = Counter()
    for number, (segment, samples) in enumerate(journal.drawn(steps)):
        objective = uses(config, segment_phase(config, journal, number))[0].objective
        tokens[stream_shape(objective, segment.sequence_length)] += samples * segment.sequence_length
    return sum(count * flops_per_token(spec, stream, causal=False) for stream, count in tokens.items())


def measured_rate(rows: Iterable[dict[str, Any]]) -> float | None:
    """Tokens a second from rows of metrics, saves and validations included; None without a step.

    The median of the steps, since the first one of an attempt takes much longer.
    """
    rates, stepping, else_ = [], 0.0, 0.0
    for row in rows:
        if "step_seconds" in row and "tokens_per_second" in row:
            rates.append(row["tokens_per_second"])
            stepping += row["step_seconds"]
        else_ += row.get("save_blocked", 0.0) + row.get("validation_seconds", 0.0)
    return statistics.median(rates) / (1 + else_ / stepping) if stepping else None


def job_seconds(config: Config, minutes: int) -> float:
    """Seconds of a job for steps: its time limit less the start and the stop before its end."""
    return 60.0 * minutes - START_S - signal_seconds(config, minutes)


def most_checkpoints(rules: CheckpointConfig, steps: int) -> int:
    """Checkpoints that are there at a time at most, in a run of `steps` steps without saves by the clock.

    Those that are kept for ever, and of the others `keep`, the one that is being written, and the one that is being
    uploaded to the mirror, if there is one.
    """
    newest = {steps}
    for every in cadences(rules):
        last = steps // every
        newest |= {number * every for number in range(max(1, last - rules.keep), last + 1)}
    for_ever = 0 if rules.keep_every is None else steps // rules.keep_every
    others = sorted(newest)[-rules.keep - 1 :]
    uploaded = 0 if rules.mirror is None or len(newest) <= len(others) else 1
    return uploaded + for_ever + sum(1 for step in others if rules.keep_every is None or step % rules.keep_every)


def _duration(
    config: Config, site: SiteConfig, job: PlannedJob, course: Course | None
) -> tuple[float | None, str, tuple[float, float] | None]:
    """Seconds of the steps that remain, where the number comes from, and bounds."""
    if course is None:
        return None, "unknown", None
    if measured := _measured(config.run.dir, job.processes):
        rate, how = measured
        return course.tokens_left / rate, how, None
    known = device_of_gres(site.gpu_type) if job.gpus_per_node else None
    if known is None or course.flops is None:
        return None, "unknown until the run has made some steps", None
    from pipeline.train.planning.plan import mean_mfu  # which imports what trains

    device = replace(calibrated(known), node_devices=job.gpus_per_node)
    try:
        mfu = mean_mfu(_with_steps(config, course.steps), device, job.processes)
    except UserError:
        return None, "unknown: the layout is refused", None
    peak = device.flops[config.train.precision.compute]
    time = expected(course.flops / (peak * mfu * job.processes), device)
    how = f"planned for {job.processes:,} x {site.gpu_type} at {percent(mfu, 0)} of {peak / 1e12:,.0f} TFLOP/s, "
    how += f"times {TYPICAL:g} as in published runs" if device.measured is None else f"{device.measured}"
    return time.seconds, how, (time.least, time.most)


def _measured(run: Path, processes: int) -> tuple[float, str] | None:
    """Tokens a second in the last attempt that made steps; taken as proportional to the number of processes."""
    rows = list(islice(RunFiles(run).newest_rows(), _ROWS))
    newest = next((row.get("attempt") for row in rows if "step_seconds" in row), None)
    rate = measured_rate(row for row in rows if row.get("attempt") == newest)
    if rate is None:
        return None
    tried = [attempt for attempt in attempts(run) if attempt.number == newest]
    had = tried[0].layout.get("world_size", processes) if tried else processes
    on = (
        ""
        if had == processes
        else f" on {had:,} process{'es' if had > 1 else ''}, taken as proportional to their number"
    )
    return rate * processes / had, f"measured in the last steps of this run{on}"


def checkpoints_disk(config: Config, spec: DecoderSpec, course: Course | None) -> Disk:
    """Disk usage of the checkpoints of a run, and the space on their disk: their folder may be a symlink.

    Args:
        config: the run.
        spec: its model.
        course: how long it is; None where that is not known.
    """
    checkpoints = Checkpoints.of_run(config.run.dir)
    there, rules = checkpoints.all(), config.train.checkpoint
    each = checkpoint_bytes(config, spec)
    if there:
        each = _size(there[-1]) or each
    most = rules.keep + 1 if course is None else most_checkpoints(rules, course.steps)
    if course is not None and not course.steps_left:
        most = len(there)
    free, files_free = free_space(checkpoints.folder)
    return Disk(each, len(there), most, free, files_free, _exports_left(config, spec, course))


def _exports_left(config: Config, spec: DecoderSpec, course: Course | None) -> int:
    """Bytes of the exports that are still to be written; 0 where it is not known how many."""
    if course is None:
        return 0
    left = most_exports(config.train.checkpoint, course.steps) - len(ExportFolders.of_run(config.run.dir).steps())
    return max(0, left) * export_bytes(config, spec)


def _size(checkpoint: Checkpoint) -> int | None:
    """Bytes of a checkpoint; None if it is damaged."""
    with suppress(*UNREADABLE):
        return checkpoint.size
    return None
