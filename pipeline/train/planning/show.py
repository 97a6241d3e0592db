"""A plan as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.common.format import counted, duration, first_and_last, gib, percent, size, spans
from pipeline.train.host.devices import Device
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.optim.parameter_groups import group_lines
from pipeline.train.parallel.step_shapes import StepShape
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.planning.experts import expert_json, expert_lines
from pipeline.train.planning.memory import RankMemory
from pipeline.train.planning.plan import RESERVE, PhasePlan, ResourcePlan
from pipeline.train.planning.published import LEAST, MOST, PUBLISHED, TYPICAL
from pipeline.train.planning.suggest import as_arguments
from pipeline.train.planning.timing import basis
from pipeline.train.rules.layout_check import MOST_SHAPES, layout_lines

Suggestions = Sequence[tuple[Mapping[str, Any], ResourcePlan]]
"""Keys to change, and the plan of the run with them."""

_PARTS = ("parameters", "moments", "gradients", "unsharded", "activations", "working")
"""Fields of `RankMemory`."""
_HEADS = ("weights", *_PARTS[1:])


_ALIKE = 0.02
"""Share of what a rank of the pipeline needs: ranks that differ by less share a row."""
_TIGHT = 0.97
"""Share of the limit: what needs more is called tight, as an estimate may be off by some percent."""


def plan_lines(
    plan: ResourcePlan, nodes: bool = False, default_time: bool = False, verbose: bool = False
) -> Iterator[str]:
    """A plan in words.

    Args:
        plan: The plan.
        nodes: Whether the number of processes was asked for by `--nodes`.
        default_time: Whether nothing says how long a job is, so that it is as long as is usual without.
        verbose: Whether to list what is assumed.
    """
    yield from _verdict(plan, nodes)
    yield from (f"warning: {line}" for line in plan.warnings)
    device = plan.device
    yield (
        f"devices: {plan.layout.world_size:,} x {device.name}, {device.node_devices} per node: "
        f"{device.flops[plan.compute] / 1e12:,.0f} TFLOP/s {plan.compute}, {device.memory}, "
        f"{gib(device.memory_bytes)} GiB by its driver, at {device.memory_bandwidth / 1e12:.3g} TB/s, "
        f"{device.link_bandwidth / 1e9:,.0f} GB/s within a node, "
        f"{device.network_bandwidth / 1e9:,.0f} GB/s between nodes ({device.source})"
    )
    yield from layout_lines(plan.config, plan.layout)
    yield str(plan.model)
    yield from group_lines(plan.config.train.optimizer, plan.model.spec)
    if plan.experts is not None:
        yield from expert_lines(plan.experts, plan.layout, plan.peak_bytes)
    if plan.teacher is not None:
        own = flops_per_token(plan.model.spec, plan.memory_shape.stream, causal=False)
        yield from plan.teacher.lines(plan.layout, plan.memory_shape, own)
    if plan.config.train.preference is not None:
        yield "reference: one forward pass of each pair before the first step; it takes no memory during training"
    yield f"checkpoint: {size(plan.checkpoint_bytes)}"
    if plan.export_bytes:
        room = size(plan.exports * plan.export_bytes)
        yield f"exports: {size(plan.export_bytes)} each, up to {plan.exports:,} at a time = {room}"
    if plan.losses_bytes:
        yield f"losses of samples (train.metrics.windows): {size(plan.losses_bytes)} in all"
    yield from _memory_lines(plan)
    first, left_out, last = first_and_last(plan.phases, MOST_SHAPES)
    yield from (line for phase in first for line in _phase_lines(plan, phase))
    if left_out:
        yield f"  {left_out}"
    yield from (line for phase in last for line in _phase_lines(plan, phase))
    yield from _run_lines(plan, default_time)
    shares, *others = plan.assumptions
    yield f"assumes: {shares}" + ("" if verbose else f"; --verbose lists {counted(len(others), 'further assumption')}")
    if verbose:
        yield from (f"assumes: {line}" for line in others)


def suggestion_lines(suggestions: Suggestions) -> Iterator[str]:
    """Layouts in words, one per line, in the order given; there is at least one."""
    yield f"suggestions, fastest first ({basis(suggestions[0][1].device)}):"
    for overrides, other in suggestions:
        keys = " ".join(as_arguments(overrides)) or "as it is"
        fraction = other.peak_bytes / other.memory_limit
        tight = ", tight" if fraction >= _TIGHT else ""
        yield (
            f"  {duration(other.expected.seconds)}, mfu {percent(other.main.mfu, 1)}, {gib(other.peak_bytes)} GiB "
            f"per process ({percent(fraction, 0)} of the limit{tight}): {keys}"
        )


def to_json(plan: ResourcePlan) -> dict[str, Any]:
    """A plan for programs. Names are stable; bytes, seconds and FLOPs without prefixes."""
    return {
        "fits": plan.fits,
        "layout": plan.layout.to_json(),
        "device": device_json(plan.device, plan.compute),
        "parameters": plan.model.parameters,
        "parameters_padded": num_parameters(plan.model.spec),
        "active_parameters": plan.model.active_parameters,
        "experts": expert_json(plan.experts),
        **({} if plan.teacher is None else {"teacher_parameters": num_parameters(plan.teacher.spec)}),
        "checkpoint_bytes": plan.checkpoint_bytes,
        **({"export_bytes": plan.export_bytes, "exports": plan.exports} if plan.export_bytes else {}),
        **({"losses_bytes": plan.losses_bytes} if plan.losses_bytes else {}),
        "memory_limit_bytes": plan.memory_limit,
        "memory": [_memory_json(rank) for rank in plan.memory],
        "phases": [_phase_json(plan, phase) for phase in plan.phases],
        "steps": plan.steps,
        "tokens": plan.tokens,
        **_hours(plan),
        "device_hours": plan.expected.seconds / 3600 * plan.layout.world_size,
        "links": plan.jobs,
        "assumptions": plan.assumptions,
        "warnings": plan.warnings,
    }


def device_json(device: Device, compute: str) -> dict[str, Any]:
    """A device for programs: stated figures, shares, and where they were measured; None: they are assumed."""
    return {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "flops": device.flops[compute],
        "source": device.source,
        "shares": asdict(device.shares),
        "measured": None if device.measured is None else asdict(device.measured),
    }


def suggestions_json(suggestions: Suggestions) -> list[dict[str, Any]]:
    """Layouts for programs."""
    return [
        {
            "overrides": dict(overrides),
            **_hours(other),
            "mfu": other.main.mfu,
            "mfu_causal": other.main.mfu_causal,
            "step_seconds": other.main.seconds.total,
            "peak_bytes": other.peak_bytes,
        }
        for overrides, other in suggestions
    ]


def _hours(plan: ResourcePlan) -> dict[str, float]:
    time = plan.expected
    return {
        "hours": time.seconds / 3600,
        "hours_least": time.least / 3600,
        "hours_most": time.most / 3600,
        "hours_planned": plan.hours,
    }


def _memory_json(rank: RankMemory) -> dict[str, Any]:
    parts = {"weights": rank.parameters, **{name: getattr(rank, name) for name in _PARTS[1:]}}
    parts |= {"teacher": rank.teacher} if rank.teacher else {}
    return {"pp_rank": rank.pp_rank, "parameters": rank.count, **parts, "total": rank.total, "when": rank.when}


def _phase_json(plan: ResourcePlan, phase: PhasePlan) -> dict[str, Any]:
    shape, seconds = phase.shape, phase.seconds
    return {
        "steps": phase.steps,
        "batch_size": shape.batch_size,
        "sequence_length": shape.sequence_length,
        "micro_batch_size": shape.micro_batch_size,
        "micro_batches": shape.micro_batches,
        "tokens_per_step": shape.tokens,
        "flops_per_token": phase.flops_per_token,
        "flops_per_token_causal": phase.flops_per_token_causal,
        "recompute_flops_per_token": phase.recompute_flops_per_token,
        "bubble": phase.bubble,
        "traffic_bytes": dict(phase.traffic),
        "seconds": {**_seconds(phase), "total": seconds.total},
        "tokens_per_second_per_device": shape.tokens / seconds.total / plan.layout.world_size,
        "mfu": phase.mfu,
        "mfu_causal": phase.mfu_causal,
    }


def _seconds(phase: PhasePlan) -> dict[str, float]:
    seconds = phase.seconds
    return {
        "products": seconds.products,
        "attention": seconds.attention,
        "recompute": seconds.recompute,
        "elementwise": seconds.elementwise,
        **{f"communication_{axis}": value for axis, value in seconds.communication.items()},
        "bubble": seconds.bubble,
        "optimizer": seconds.optimizer,
        **({"teacher": seconds.teacher} if seconds.teacher else {}),
    }


def _verdict(plan: ResourcePlan, nodes: bool) -> Iterator[str]:
    rank = max(plan.memory, key=lambda each: each.total)
    process = f"a process of pp rank {rank.pp_rank}" if plan.layout.pp > 1 else "a process"
    limit = (
        f"{gib(plan.memory_limit)} GiB ({gib(plan.device.memory_bytes)} less {percent(RESERVE, 0)} for CUDA, NCCL and "
        "what the allocator cannot use)"
    )
    shape = plan.memory_shape
    steps = f", in steps of {shape.micro_batch_size:,} x {shape.sequence_length:,} tokens ({_section(shape)})"
    if plan.fits:
        steps = steps if len(plan.phases) > 1 else ""
        yield f"fits, as estimated: {process} needs {gib(rank.total)} of {limit}, at its peak in {rank.when}{steps}"
        return
    yield (
        f"does not fit, as estimated: {process} needs {gib(rank.total)} GiB, {gib(rank.total - plan.memory_limit)} GiB "
        f"more than {limit}, at its peak in {rank.when}{steps}"
    )
    yield f"change: {'; '.join(_ways_out(plan, rank, nodes))}; or let --suggest look for a layout"


def _section(shape: StepShape) -> str:
    """The section of the run file that decides a shape: a phase, or `train`."""
    return max((key.rpartition(".")[0] for key in (shape.length_key, shape.batch_key)), key=len)


def _ways_out(plan: ResourcePlan, rank: RankMemory, nodes: bool) -> Iterator[str]:
    """Changes that make the largest part smaller, and are not made already."""
    shape, layout, train = plan.memory_shape, plan.layout, plan.config.train
    more = f"{'parallel.tp or ' if layout.tp < plan.device.node_devices else ''}parallel."
    if rank.activations + rank.working > rank.total / 2:
        if shape.micro_batch_size > 1:
            yield f"a smaller {shape.micro_key}"
        if train.recompute.mode == "none":
            yield "train.recompute.mode=selective or full"
        elif train.recompute.mode != "full":
            yield "train.recompute.mode=full"
        elif train.recompute.every > 1:
            yield "train.recompute.every=1"
        if rank.working > rank.activations:
            yield "a smaller train.loss.chunk_tokens"
        yield f"{more}cp"
        return
    if (
        rank.unsharded > rank.total / 2
        and not LayoutKind.of(plan.config.parallel, layout).reshard
        and layout.shards > 1
    ):
        yield "parallel.reshard_after_forward=true"
    elif rank.unsharded <= rank.total / 2:
        yield "more nodes (--nodes) in parallel.dp_shard" if nodes else "more processes in parallel.dp_shard"
    yield f"{more}pp"


def _memory_lines(plan: ResourcePlan) -> Iterator[str]:
    yield "memory per process at the peak of a step, in GiB:"
    more = () if plan.teacher is None else ("teacher",)
    columns = {**dict(zip(_HEADS, _PARTS, strict=True)), **dict(zip(more, more, strict=True))}
    heads = "".join(f" {name:>{max(9, len(name))}}" for name in columns)
    yield f"  {'pp rank':>7} {'parameters':>15}{heads} {'total':>9} {'of limit':>8}  peak"
    for ranks in _alike(plan.memory):
        rank = max(ranks, key=lambda each: each.total)
        span = spans([each.pp_rank for each in ranks])
        parts = "".join(f" {gib(getattr(rank, part)):>{max(9, len(name))}}" for name, part in columns.items())
        fraction = rank.total / plan.memory_limit
        yield f"  {span:>7} {rank.count:>15,}{parts} {gib(rank.total):>9} {percent(fraction, 0):>8}  {rank.when}"


def _alike(ranks: Sequence[RankMemory]) -> list[list[RankMemory]]:
    """Ranks that follow one another and need nearly the same in each part."""
    groups: list[list[RankMemory]] = []
    for rank in ranks:
        first = groups[-1][0] if groups else None
        if first is not None and all(
            abs(getattr(rank, part) - getattr(first, part)) <= _ALIKE * first.total for part in ("total", *_PARTS)
        ):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return groups


def _phase_lines(plan: ResourcePlan, phase: PhasePlan) -> Iterator[str]:
    shape, total = phase.shape, phase.seconds.total
    yield f"step ({shape.batch_key}; {counted(phase.steps, 'step')} of {shape.tokens:,} tokens): {shape}"
    again = phase.recompute_flops_per_token
    recomputed = f", and {again / 1e9:,.4g} G of recomputation" if again else ""
    if not again and plan.config.train.recompute.mode != "none":
        recomputed = "; recomputation only reads and writes memory"
    yield (
        f"  FLOPs per token: {phase.flops_per_token / 1e9:,.4g} G (attention whole), "
        f"{phase.flops_per_token_causal / 1e9:,.4g} G (attention half){recomputed}"
    )
    if phase.traffic:
        sent = ", ".join(f"{axis} {size(count)}" for axis, count in phase.traffic.items())
        yield f"  each rank sends: {sent}"
    if plan.layout.pp > 1:
        yield f"  bubble: {percent(phase.bubble, 1)} of the pipeline's time"
    parts = sorted(_seconds(phase).items(), key=lambda part: -part[1])
    fractions = ", ".join(f"{name} {percent(value / total, 1)}" for name, value in parts if value / total >= 0.0005)
    yield f"  time: {duration(total)}: {fractions}"
    yield (
        f"  {shape.tokens / total / plan.layout.world_size:,.0f} tokens/s per device, mfu {percent(phase.mfu, 1)}, "
        f"mfu_causal {percent(phase.mfu_causal, 1)}"
    )


def _run_lines(plan: ResourcePlan, default_time: bool) -> Iterator[str]:
    time = plan.expected
    yield f"length: {counted(plan.steps, 'step')}, {plan.tokens:,} tokens"
    line = f"time: {time}, {time.seconds / 3600 * plan.layout.world_size:,.1f} device-hours"
    if plan.job_seconds is not None:
        if plan.jobs is None:
            line += "; the time limit of a job leaves no time for steps"
        else:
            line += f", about {counted(plan.jobs, 'job')} with {duration(plan.job_seconds)} of steps each"
        if default_time:
            line += " (this is the default; say how long yours are in slurm.train.time)"
    yield line
    if plan.device.measured is None:
        yield (
            f"  the steps above would take {duration(plan.hours * 3600)}; published runs took {LEAST:g} to {MOST:g} "
            f"times as long as their plans, {TYPICAL:g} in the median, and one with all of its work "
            f"{max(PUBLISHED.values()):g} times"
        )
