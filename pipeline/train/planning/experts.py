"""Figures of a plan that only models with experts have: what ep saves and sends, and rows that are not even."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.common.format import gib, size
from pipeline.config import Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.host.devices import Device
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.parallel.footprint import COMPUTE_BYTES
from pipeline.train.parallel.pipeline_stages import split_stages
from pipeline.train.parallel.step_shapes import StepShape, run_stream
from pipeline.train.planning.traffic import stage_traffic

OVER_MEAN = 2.0
"""Rows of a process's experts over the mean of all processes, for which memory is estimated besides even ones."""


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of a model in a layout. Of several kinds of layers, that with the most parameters."""

    layers: int
    """Layers with experts."""
    count: int
    """Experts of a layer."""
    top_k: int
    """Experts that a token goes to."""
    on_rank: int
    """Experts whose weights a process gathers: all, or with ep its own."""
    gathered_bytes: int
    """Bytes of these in the compute format, of a layer."""
    kept_bytes: float
    """Bytes that backward needs at least of a token in a layer, besides attention, norms and the shared mlp's input."""
    tokens: int
    """Tokens of a micro-batch that a process routes."""
    break_even: float | None
    """Tokens of a micro-batch on a process below which ep sends less than gathering all experts and adding up their
    gradients; None where all are on one process."""
    uneven_bytes: int | None = None
    """Bytes that the fullest process needs with `OVER_MEAN` times the mean of rows; None without ep."""


def expert_plan(config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape) -> ExpertPlan | None:
    """The experts of a model in steps of a shape; None for a model without any."""
    if not spec.expert_layers:
        return None
    element = COMPUTE_BYTES[config.train.precision.compute]
    part = max(spec.expert_layers.values(), key=lambda each: each.stack_parameters())
    return ExpertPlan(
        layers=len(spec.expert_layers),
        count=part.router.count,
        top_k=part.router.top_k,
        on_rank=part.router.count // layout.ep,
        gathered_bytes=element * part.stack_parameters(layout.ep),
        kept_bytes=element * part.kept_numbers(1),
        tokens=shape.micro_batch_size * shape.stream.length // (layout.cp * layout.tp),
        break_even=break_even(config, layout, spec, shape),
    )


def break_even(config: Config, layout: Layout, spec: DecoderSpec, shape: StepShape) -> float | None:
    """Tokens of a micro-batch on a process from which on an exchange of rows sends as much as the weights of all.

    A token has k rows of D numbers, which go there and back in either pass; weights and gradients go as often as the
    layout gathers and reduces them. In bf16, with weights that are given back and gradients that are reduced in each
    micro-batch, that is 3 * E * F / k.
    """
    element = COMPUTE_BYTES[config.train.precision.compute]
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, run_stream(config))
    without = [each for some in stage_traffic(config, replace(layout, ep=1), spec, shape, stages) for each in some]
    weights = sum(each.bytes for each in without if each.axis == "expert_shards")
    rows = sum(4 * part.router.top_k * part.dim * element for part in spec.expert_layers.values())
    return weights / (rows * shape.micro_batches) if weights else None


def expert_warnings(plan: ExpertPlan, layout: Layout, device: Device, limit: int) -> Iterator[str]:
    """Warnings about the experts of a plan on some devices."""
    if layout.ep > device.node_devices:
        yield (
            f"parallel.ep={layout.ep} is more than the {device.node_devices} devices of a node: in every layer tokens "
            "go through the network"
        )
    if plan.uneven_bytes is not None and plan.uneven_bytes > limit:
        yield (
            f"a process whose experts get {OVER_MEAN:g} times the mean of tokens needs {gib(plan.uneven_bytes)} GiB, "
            f"more than {gib(limit)}: watch experts.rows_max_over_mean in the metrics"
        )


def expert_lines(plan: ExpertPlan, layout: Layout, even_bytes: int) -> Iterator[str]:
    """The experts of a plan in words."""
    where = f"{plan.on_rank} on each of ep {layout.ep}" if layout.ep > 1 else "all on each process"
    yield (
        f"experts: {plan.count} in each of {plan.layers} layers, {plan.top_k} for a token; {where}, gathered "
        f"{size(plan.gathered_bytes)} per layer; {size(round(plan.kept_bytes))} kept per token and layer at least"
    )
    if plan.break_even is not None:
        yield (
            f"  ep sends less than weights and gradients of all experts below {plan.break_even:,.0f} tokens per rank "
            f"and micro-batch; here {plan.tokens:,}"
        )
    if plan.uneven_bytes is not None:
        yield (
            f"  memory with 1.0 and {OVER_MEAN:.1f} times the mean of tokens for a process's experts: "
            f"{gib(even_bytes)} and {gib(plan.uneven_bytes)} GiB"
        )


def expert_json(plan: ExpertPlan | None) -> dict[str, Any] | None:
    """Experts of a plan for programs."""
    return None if plan is None else asdict(plan)
