"""The resource plan of a run before it starts: memory, communication, time. Estimates: no step was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.provenance.loss_file import losses_bytes
from pipeline.train.checkpoint.policy import most_exports
from pipeline.train.distributed.layout import Layout
from pipeline.train.host.devices import Device
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import flops_per_token
from pipeline.train.parallel.footprint import checkpoint_bytes, export_bytes
from pipeline.train.parallel.step_shapes import StepShape, step_counts, step_shapes
from pipeline.train.planning.experts import OVER_MEAN, ExpertPlan, expert_plan, expert_warnings
from pipeline.train.planning.jobs import jobs_needed
from pipeline.train.planning.memory import RankMemory, memory
from pipeline.train.planning.published import TimeRange, expected
from pipeline.train.planning.stage_memory import DeviceType
from pipeline.train.planning.teacher import TeacherPlan
from pipeline.train.planning.timing import (
    StepSeconds,
    assumptions,
    rank_parameters,
    recompute_flops_per_token,
    step_time,
)
from pipeline.train.planning.traffic import Dimension, bytes_by_axis
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.rules.layout_check import PlannedModel, planned_model, planned_spec

RESERVE = 0.05
"""Share of a device's memory that is left to CUDA, NCCL, cuBLAS and what torch's allocator cannot use."""


@dataclass(frozen=True)
class PhasePlan:
    """The steps of a run that have one shape."""

    shape: StepShape
    steps: int
    flops_per_token: float
    """Model FLOPs of training on a token, attention counted whole; a teacher's forward pass among them."""
    flops_per_token_causal: float
    """The same with attention counted half."""
    recompute_flops_per_token: float
    """FLOPs that backward computes again, which no model FLOPs count; attention counted half."""
    bubble: float
    """Share of the pipeline's time in which ranks wait, 0 to 1; 0 without a pipeline."""
    traffic: Mapping[Dimension, int]
    """Bytes that a rank sends in a step, by axis; of the pp rank that sends the most."""
    seconds: StepSeconds
    """Time of a step, by part."""
    mfu: float
    """Model FLOPs of a step over what the devices could have done at their peak, attention counted whole."""
    mfu_causal: float
    """The same with attention counted half."""


@dataclass(frozen=True)
class ResourcePlan:
    """The resource plan of a run on a number of devices."""

    config: Config
    layout: Layout
    device: Device
    compute: str
    """Number format of matrix products."""
    model: PlannedModel
    memory: list[RankMemory]
    """Memory by pp rank, for the shape of step that needs the most."""
    memory_shape: StepShape
    """That one."""
    memory_limit: int
    """Bytes of a device that a process may use: its memory less a reserve."""
    experts: ExpertPlan | None
    """Its experts, in steps of `memory_shape`; None: it has none."""
    teacher: TeacherPlan | None
    """The teacher; None: there is none."""
    checkpoint_bytes: int
    phases: list[PhasePlan]
    """Phases in their order; one of each shape of step."""
    job_seconds: float | None
    """Time that a job on a cluster has for steps; None where that is not known."""
    assumptions: list[str]
    """Assumptions of the times, in words, and where they were measured."""
    warnings: list[str]
    """Warnings of `pipeline train --check`."""

    @property
    def fits(self) -> bool:
        """True if every process has the memory it needs."""
        return self.peak_bytes <= self.memory_limit

    @property
    def peak_bytes(self) -> int:
        """Bytes of the process that needs the most."""
        return max(rank.total for rank in self.memory)

    @property
    def export_bytes(self) -> int:
        """Bytes of an export while training; 0 if there are none."""
        return export_bytes(self.config, self.model.spec)

    @property
    def exports(self) -> int:
        """The most exports at a time."""
        return most_exports(self.config.train.checkpoint, self.steps)

    @property
    def losses_bytes(self) -> int:
        """Bytes of the losses of all samples of the run on disk; 0 if they are not recorded."""
        if not self.config.train.metrics.windows:
            return 0
        return losses_bytes(sum(phase.steps * phase.shape.batch_size for phase in self.phases))

    @property
    def main(self) -> PhasePlan:
        """The phase that takes the most time."""
        return max(self.phases, key=lambda phase: phase.steps * phase.seconds.total)

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return sum(phase.steps * phase.shape.tokens for phase in self.phases)

    @property
    def jobs(self) -> int | None:
        """Jobs that the run takes, one after the other; None where that is not known."""
        return None if self.job_seconds is None else jobs_needed(self.expected.seconds, self.job_seconds)

    @property
    def expected(self) -> TimeRange:
        """Time of all steps, by what runs took that were planned alike."""
        return expected(self.hours * 3600, self.device)

    @property
    def hours(self) -> float:
        """Hours of all steps as they are planned."""
        return sum(phase.steps * phase.seconds.total for phase in self.phases) / 3600


def plan(
    config: Config,
    device: Device,
    world_size: int,
    job_seconds: float | None = None,
    model: PlannedModel | None = None,
    *,
    uneven: bool = True,
) -> ResourcePlan:
    """Price a run.

    Args:
        config: The run file. Neither data nor a tokenizer has to be there.
        device: What each process runs on.
        world_size: Processes.
        job_seconds: What a job on a cluster has for steps.
        model: That of the run, where it is known: its tokenizer is not read again.
        uneven: With ep, estimate memory also for processes whose experts get more tokens than others.

    Raises:
        UserError: The layout is refused, the size of the vocabulary is not known, or the device has no fp8.
    """
    layout = _checked(config, device, world_size)
    model = model or planned_model(config)
    spec = model.spec
    counts = step_counts(config, layout.dp) or {step_shapes(config, layout.dp)[0]: 0}
    largest, needed = most_memory(config, layout, spec, counts)
    parameters = [rank.count for rank in needed]
    limit = int(device.memory_bytes * (1 - RESERVE))
    warnings = list(layout_warnings(config, layout))
    experts = expert_plan(config, layout, spec, largest)
    if experts is not None:
        if uneven and layout.ep > 1:
            ranks = memory(config, layout, spec, largest, over_mean=OVER_MEAN)
            experts = replace(experts, uneven_bytes=max(rank.total for rank in ranks))
        warnings += expert_warnings(experts, layout, device, limit)
    return ResourcePlan(
        config=config,
        layout=layout,
        device=device,
        compute=config.train.precision.compute,
        model=model,
        memory=needed,
        memory_shape=largest,
        memory_limit=limit,
        experts=experts,
        teacher=TeacherPlan.of(config, spec),
        checkpoint_bytes=checkpoint_bytes(config, spec),
        phases=[_phase(config, layout, spec, shape, steps, device, parameters) for shape, steps in counts.items()],
        job_seconds=job_seconds,
        assumptions=assumptions(device, config.train.precision.fp8, experts=bool(spec.expert_layers)),
        warnings=warnings,
    )


def mean_mfu(config: Config, device: Device, world_size: int) -> float:
    """Model FLOPs utilization as the mean of all steps, without an estimate of memory, which takes seconds.

    Raises:
        UserError: See `plan`.
    """
    layout, spec = _checked(config, device, world_size), planned_spec(config)
    parameters = rank_parameters(config, layout, spec)
    counts = step_counts(config, layout.dp) or {step_shapes(config, layout.dp)[0]: 1}
    phases = [_phase(config, layout, spec, shape, steps, device, parameters) for shape, steps in counts.items()]
    seconds = [phase.steps * phase.seconds.total for phase in phases]
    return sum(phase.mfu * each for phase, each in zip(phases, seconds, strict=True)) / sum(seconds)


def _checked(config: Config, device: Device, world_size: int) -> Layout:
    layout = check_layout(config, world_size)
    if config.train.precision.fp8 is not None and "fp8" not in device.flops:
        raise UserError(
            f"train.precision.fp8: {device.name} does not multiply in fp8; leave it out, or take another device"
        )
    return layout


def most_memory(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shapes: Iterable[StepShape],
    device_type: DeviceType = "cuda",
) -> tuple[StepShape, list[RankMemory]]:
    """The shape of step that needs the most, and what it needs by pp rank; see `memory`."""

    def sizes(shape: StepShape) -> tuple[int, int, int]:
        # More windows, longer ones and more micro-batches never need less.
        return shape.micro_batch_size, shape.sequence_length, shape.micro_batches

    largest: list[StepShape] = []
    for shape in sorted(shapes, key=sizes, reverse=True):
        if not any(all(a >= b for a, b in zip(sizes(other), sizes(shape), strict=True)) for other in largest):
            largest.append(shape)
    teacher = TeacherPlan.of(config, spec)
    needed = [
        (
            shape,
            [
                replace(rank, teacher=0 if teacher is None else teacher.bytes(layout, shape))
                for rank in memory(config, layout, spec, shape, device_type)
            ],
        )
        for shape in largest
    ]
    return max(needed, key=lambda each: max(rank.total for rank in each[1]))


def _phase(
    config: Config,
    layout: Layout,
    spec: DecoderSpec,
    shape: StepShape,
    steps: int,
    device: Device,
    parameters: Sequence[int],
) -> PhasePlan:
    time = step_time(config, layout, spec, shape, device, parameters)
    teacher, seconds = TeacherPlan.of(config, spec), time.seconds
    sent = [bytes_by_axis(transfers) for transfers in time.traffic]
    whole, half = (flops_per_token(spec, shape.stream, causal=causal) for causal in (False, True))
    if teacher is not None:
        whole, half = (flops + teacher.flops(shape, causal=causal) for flops, causal in ((whole, False), (half, True)))
        seconds = replace(seconds, teacher=teacher.seconds(layout, shape, device))
    peak = device.flops[config.train.precision.compute] * layout.world_size * seconds.total
    return PhasePlan(
        shape=shape,
        steps=steps,
        flops_per_token=whole,
        flops_per_token_causal=half,
        recompute_flops_per_token=recompute_flops_per_token(config.train.recompute, spec, shape.stream),
        bubble=time.bubble,
        traffic=max(sent, key=lambda axes: sum(axes.values())),
        seconds=seconds,
        mfu=shape.tokens * whole / peak,
        mfu_causal=shape.tokens * half / peak,
    )
