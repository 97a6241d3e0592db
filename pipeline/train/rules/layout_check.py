"""`pipeline train RUN.yaml --check`: the layout, what it costs and what is wrong with it. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline.common.console import Console, say, warn
from pipeline.common.errors import UserError
from pipeline.common.format import counted, first_and_last, gib, percent, spans
from pipeline.config import Config
from pipeline.data.preprocess.run_tokenizer import has_run_tokenizer, named_tokenizer, run_tokenizer
from pipeline.train.distributed.axes import AXES
from pipeline.train.distributed.layout import Layout, fixed_processes
from pipeline.train.fp8.matrices import fp8_lines
from pipeline.train.model.decoder_spec import DecoderSpec, decoder_spec
from pipeline.train.model.flops import active_parameters, num_parameters
from pipeline.train.monitor.phase_log import loss_weight_lines
from pipeline.train.optim.parameter_groups import group_lines
from pipeline.train.parallel.footprint import Footprint, end_parameters, layer_sizes, rank_footprints
from pipeline.train.parallel.pipeline_schedules import Play, play
from pipeline.train.parallel.pipeline_stages import Stage, compute_costs, split_stages
from pipeline.train.parallel.step_shapes import run_stream, step_shapes
from pipeline.train.parallel.tested import LayoutKind
from pipeline.train.rules.layout import check_layout, describe, layout_warnings


def check(config: Config, console: Console | None = None, environment: Mapping[str, str] = os.environ) -> Layout:
    """Print the layout of a run and what comes of it.

    Args:
        config: The run file.
        console: Where to.
        environment: Asked for `WORLD_SIZE` where `launch.processes` is not set.

    Raises:
        UserError: The layout violates rules; nothing was printed.
    """
    console = console or Console()
    layout = check_layout(config, world_size(config, environment))
    model = planned_model(config)
    spec = model.spec
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, run_stream(config))
    for line in (
        *layout_lines(config, layout),
        str(model),
        *_fp8_lines(config, layout, spec),
        *group_lines(config.train.optimizer, spec),
        *loss_weight_lines(config),
        *_step_lines(config, layout),
        *(_pipeline_lines(config, layout, spec, stages) if layout.pp > 1 else ()),
        *_memory_lines(config, layout, spec),
    ):
        say(console, line)
    for warning in layout_warnings(config, layout):
        warn(console, warning)
    return layout


def world_size(config: Config, environment: Mapping[str, str]) -> int:
    """Processes of the run: `launch.processes`, or those of the launcher, or as many as the layout names.

    Raises:
        UserError: `WORLD_SIZE` is not a number.
    """
    if config.launch.processes is not None:
        return config.launch.processes
    given = environment.get("WORLD_SIZE")
    if given is None:
        return fixed_processes(config.parallel)
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"WORLD_SIZE={given!r} in the environment is not a number of processes; unset it")
    return int(given)


class PlannedModel(NamedTuple):
    """The model of a run that may have no tokenizer yet; as text a line that says its size."""

    spec: DecoderSpec
    vocabulary: str
    """Source of the size of its vocabulary, in words."""

    @property
    def parameters(self) -> int:
        """Parameters without the padding of the vocabulary."""
        return num_parameters(self.spec) - self._padding

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of experts some."""
        return active_parameters(self.spec) - self._padding

    @property
    def _padding(self) -> int:
        spec = self.spec
        tables = 1 if spec.tie_embeddings else 2
        return tables * (spec.vocab_padded - spec.vocab_size) * spec.dim

    def __str__(self) -> str:
        parameters, padded, depth = self.parameters, num_parameters(self.spec), len(self.spec.mtp)
        more = f" ({padded:,} with the padded vocabulary)" if padded > parameters else ""
        active = f", {self.active_parameters:,} active" if self.spec.expert_layers else ""
        return (
            f"model: {parameters:,} parameters{more}{active}, {len(self.spec.layers)} layers, "
            f"{f'multi-token prediction of depth {depth}, ' if depth else ''}"
            f"vocabulary of {self.spec.vocab_size:,} ({self.vocabulary})"
        )


def planned_model(config: Config) -> PlannedModel:
    """The model of a run, for which its tokenizer is read.

    Raises:
        UserError: The size of its vocabulary is not known.
    """
    size, source = _vocabulary(config)
    return PlannedModel(decoder_spec(config.model, size, config.max_positions), source)


def planned_spec(config: Config) -> DecoderSpec:
    """The specification alone, see `planned_model`."""
    return planned_model(config).spec


def _vocabulary(config: Config) -> tuple[int, str]:
    """Tokens of the run's tokenizer, and where the number comes from; without one those of the model."""
    train, path = config.tokenizer.train, config.tokenizer.path
    try:
        if has_run_tokenizer(config):
            return run_tokenizer(config).vocab_size, "of the run's tokenizer"
        if train is not None:
            return train.vocab_size, "as tokenizer.train.vocab_size says; the tokenizer is not trained yet"
        assert path is not None, "one of the two is set"
        return named_tokenizer(config).vocab_size, f"of {path}"
    except UserError as error:
        if config.model.vocab_size is not None:
            return config.model.vocab_size, "as model.vocab_size says; there is no tokenizer"
        raise UserError(
            f"model.vocab_size: the vocabulary size of the model is unknown, since there is no tokenizer ({error}); "
            "set model.vocab_size, or tokenizer.train.vocab_size"
        ) from None


MOST_SHAPES = 8
"""Shapes of steps that are all shown; a batch ramp has many."""


def layout_lines(config: Config, layout: Layout) -> Iterable[str]:
    """A layout in words: its degrees, and a line for each axis."""
    kind = describe(LayoutKind.of(config.parallel, layout))
    yield (
        f"layout: {layout} = {layout.world_size:,} processes ({kind})" if layout.world_size > 1 else f"layout: {layout}"
    )
    for axis in AXES:
        if (degree := layout.settings[axis.name]) > 1:
            ranks = _ranks(degree, layout.stride(axis.name), layout.world_size)
            yield f"  {axis.name:<12} {degree:>5}  {axis.effect} ranks {ranks}"


def _ranks(degree: int, stride: int, world_size: int) -> str:
    """The first group of an axis, `0-7` or `0, 8, 16, ..., 120`, and whether there are others."""
    more = ", and so on" if degree < world_size else ""
    if stride == 1:
        return f"0-{degree - 1}{more}"
    ranks = [rank * stride for rank in range(degree)]
    few = ranks if degree <= 4 else [*ranks[:3], "...", ranks[-1]]
    return ", ".join(map(str, few)) + more


def _fp8_lines(config: Config, layout: Layout, spec: DecoderSpec) -> Iterable[str]:
    fp8 = config.train.precision.fp8
    return () if fp8 is None else fp8_lines(fp8, spec, layout, config.train.sequence_length)


def _step_lines(config: Config, layout: Layout) -> Iterable[str]:
    first, left_out, last = first_and_last(step_shapes(config, layout.dp), MOST_SHAPES)
    yield from (f"step ({shape.batch_key}): {shape}" for shape in first)
    if left_out:
        yield f"  {left_out}"
    yield from (f"step ({shape.batch_key}): {shape}" for shape in last)


def _pipeline_lines(config: Config, layout: Layout, spec: DecoderSpec, stages: Sequence[Stage]) -> Iterable[str]:
    pipeline = config.parallel.pipeline
    costs = compute_costs(spec, stages, run_stream(config))
    given = "as given" if pipeline.layers_per_stage is not None else "balanced"
    yield f"pipeline: {pipeline.schedule}, {len(stages)} stages, {pipeline.stages_per_rank} on each pp rank, {given}"
    yield f"  {'stage':>5} {'pp rank':>7}  {'layers':<9} {'has':<15} {'parameters':>15} {'compute':>8}"
    for stage, cost in zip(stages, costs, strict=True):
        part = stage.part
        parameters = end_parameters(spec, part, 1) + sum(layer_sizes(spec, part, 1).values())
        ends = (("embedding", part.first), ("head", part.last), ("mtp", part.last and bool(spec.mtp)))
        has = " ".join(name for name, there in ends if there)
        layers = spans(part.layers) or "none"
        yield (
            f"  {stage.index:>5} {stage.rank:>7}  {layers:<9} {has:<15} {parameters:>15,} "
            f"{percent(cost / sum(costs), 1):>8}"
        )
    counts = sorted({shape.micro_batches for shape in step_shapes(config, layout.dp)})
    # A ramp has many; they lie between the fewest and the most.
    for micro_batches in counts if len(counts) <= 3 else (counts[0], counts[-1]):
        yield from _play_lines(micro_batches, played(config, layout, stages, costs, micro_batches))


def played(config: Config, layout: Layout, stages: Sequence[Stage], costs: Sequence[float], micro_batches: int) -> Play:
    """The run's schedule with the costs of its stages; activations weigh the number of layers."""
    pipeline = config.parallel.pipeline
    layers = [len(stage.part.layers) for stage in stages]
    return play(pipeline.schedule, layout.pp, pipeline.stages_per_rank, micro_batches, costs, layers)


def _play_lines(micro_batches: int, result: Play) -> Iterable[str]:
    yield (
        f"  {counted(micro_batches, 'micro-batch')}: {percent(result.bubble, 1)} of the time is waiting (bubble), "
        "communication not counted"
    )
    kept = ", ".join(f"{layers:.0f}" for layers in result.activations)
    yield f"  activations kept at most, in layers x micro-batches, by pp rank: {kept}"


def _memory_lines(config: Config, layout: Layout, spec: DecoderSpec) -> Iterable[str]:
    rows: dict[Footprint, list[int]] = {}
    for rank, row in enumerate(rank_footprints(config, layout, spec)):
        rows.setdefault(row, []).append(rank)
    yield (
        "memory per process, in GiB, without activations:"
        if layout.world_size > 1
        else "memory, in GiB, without activations:"
    )
    average = ", moving average" if config.train.ema is not None else ""
    for row, ranks in rows.items():
        where = f"pp rank {spans(ranks)}: " if layout.pp > 1 else ""
        gradients = f" + {gib(row.accumulated)} unsharded gradients" if row.accumulated else ""
        yield (
            f"  {where}{row.parameters:,} parameters: {gib(row.states)} weights, moments, gradients{average} + "
            f"{gib(row.compute)} unsharded in {config.train.precision.compute}{gradients} = {gib(row.total)}"
        )
