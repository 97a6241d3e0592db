"""`pipeline train RUN.yaml --check`: the layout, what it costs and what is wrong with it. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from pipeline.common.console import Console, say
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.config import Config
from pipeline.data.preprocess.run_tokenizer import ORIGIN_FILE, run_tokenizer, tokenizer_folder
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.fp8.matrices import fp8_lines
from pipeline.train.model.config import DecoderSpec, decoder_spec
from pipeline.train.model.flops import layer_parameters, num_parameters
from pipeline.train.parallel.footprint import Footprint, end_parameters, footprint
from pipeline.train.parallel.layout import Layout, fixed_processes
from pipeline.train.parallel.pipeline_schedules import Play, play
from pipeline.train.parallel.pipeline_stages import Stage, compute_costs, split_stages
from pipeline.train.parallel.rules.layout import check_layout, describe, layout_warnings
from pipeline.train.parallel.step_shapes import StepShape, step_shapes
from pipeline.train.parallel.tested import LayoutKind


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
    size, source = vocabulary(config)
    spec = decoder_spec(config.model, size, config.max_positions)
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, config.train.sequence_length)
    for line in (
        *_layout_lines(config, layout),
        *_model_lines(config, spec, source),
        *_fp8_lines(config, layout, spec),
        *_step_lines(config, layout),
        *(_pipeline_lines(config, layout, spec, stages) if layout.pp > 1 else ()),
        *_memory_lines(config, layout, spec, stages),
        *(f"warning: {line}" for line in layout_warnings(config, layout)),
    ):
        say(console, line)
    return layout


def world_size(config: Config, environment: Mapping[str, str]) -> int:
    """Processes of the run: `launch.processes`, or those of the launcher, or as many as the layout names.

    Raises:
        UserError: `WORLD_SIZE` is no number.
    """
    if config.launch.processes is not None:
        return config.launch.processes
    given = environment.get("WORLD_SIZE")
    if given is None:
        return fixed_processes(config.parallel)
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"WORLD_SIZE={given!r} in the environment is no number of processes; unset it")
    return int(given)


def vocabulary(config: Config) -> tuple[int, str]:
    """Tokens of the run's tokenizer, and where the number comes from.

    Raises:
        UserError: There is no tokenizer yet and the run file does not say how large it will be.
    """
    if (tokenizer_folder(config) / ORIGIN_FILE).is_file():
        return run_tokenizer(config).vocab_size, "of the run's tokenizer"
    train, path = config.tokenizer.train, config.tokenizer.path
    if train is not None:
        return train.vocab_size, "as tokenizer.train.vocab_size says; the tokenizer is not trained yet"
    assert path is not None, "one of the two is set"
    return Tokenizer.load(path, config.tokenizer).vocab_size, f"of {path}"


_PLACES = {
    "pp": "layers are cut into stages",
    "dp_replicate": "weights are copied",
    "dp_shard": "weights, gradients and optimizer states are sharded",
    "cp": "sequences are cut",
    "tp": "matrices are cut",
}


def _layout_lines(config: Config, layout: Layout) -> Iterable[str]:
    kind = describe(LayoutKind.of(config.parallel, layout))
    yield (
        f"layout: {layout} = {layout.world_size:,} processes ({kind})" if layout.world_size > 1 else f"layout: {layout}"
    )
    stride = layout.world_size
    for axis, degree in layout.degrees.items():
        stride //= degree
        if degree > 1:
            yield f"  {axis:<12} {degree:>5}  {_PLACES[axis]} over ranks {_ranks(degree, stride, layout.world_size)}"


def _ranks(degree: int, stride: int, world_size: int) -> str:
    """The first group of an axis, `0-7` or `0, 8, 16, ..., 120`, and whether there are others."""
    more = ", and so on" if degree < world_size else ""
    if stride == 1:
        return f"0-{degree - 1}{more}"
    ranks = [rank * stride for rank in range(degree)]
    few = ranks if degree <= 4 else [*ranks[:3], "...", ranks[-1]]
    return ", ".join(map(str, few)) + more


def _model_lines(config: Config, spec: DecoderSpec, source: str) -> Iterable[str]:
    yield (
        f"model: {num_parameters(spec):,} parameters, {len(spec.layers)} layers, {spec.vocab_size:,} tokens ({source})"
    )


def _fp8_lines(config: Config, layout: Layout, spec: DecoderSpec) -> Iterable[str]:
    fp8 = config.train.precision.fp8
    return () if fp8 is None else fp8_lines(fp8, spec, layout, config.train.sequence_length)


def _step_lines(config: Config, layout: Layout) -> Iterable[str]:
    shapes = step_shapes(config, layout.dp)
    for shape in shapes if len(shapes) <= 8 else [*shapes[:4], None, *shapes[-3:]]:
        yield "  ..." if shape is None else _step_line(shape)


def _step_line(shape: StepShape) -> str:
    padding = f", {100 * shape.padding:.1f} % padding" if shape.padding else ""
    return (
        f"step ({shape.batch_key}): {counted(shape.batch_size, 'window')} of {shape.sequence_length:,} tokens over "
        f"{counted(shape.ranks, 'data-parallel rank')}: {counted(shape.micro_batches, 'micro-batch')} of "
        f"{shape.micro_batch_size:,} on each{padding}"
    )


def _pipeline_lines(config: Config, layout: Layout, spec: DecoderSpec, stages: Sequence[Stage]) -> Iterable[str]:
    pipeline = config.parallel.pipeline
    costs = compute_costs(spec, stages, config.train.sequence_length)
    given = "as given" if pipeline.layers_per_stage is not None else "balanced"
    yield f"pipeline: {pipeline.schedule}, {len(stages)} stages, {pipeline.stages_per_rank} on each pp rank, {given}"
    yield f"  {'stage':>5} {'pp rank':>7}  {'layers':<9} {'has':<15} {'parameters':>15} {'compute':>8}"
    for stage, cost in zip(stages, costs, strict=True):
        part = stage.part
        parameters = end_parameters(spec, part, 1) + sum(layer_parameters(spec.layers[i], 1) for i in part.layers)
        has = " ".join(name for name, there in (("embedding", part.first), ("head", part.last)) if there)
        layers = _spans(part.layers) or "none"
        yield (
            f"  {stage.index:>5} {stage.rank:>7}  {layers:<9} {has:<15} {parameters:>15,} "
            f"{100 * cost / sum(costs):>6.1f} %"
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
        f"  {counted(micro_batches, 'micro-batch')}: {100 * result.bubble:.1f} % of the time is waiting (bubble), "
        "communication not counted"
    )
    kept = ", ".join(f"{layers:.0f}" for layers in result.activations)
    yield f"  activations kept at most, in layers x micro-batches, by pp rank: {kept}"


def _memory_lines(config: Config, layout: Layout, spec: DecoderSpec, stages: Sequence[Stage]) -> Iterable[str]:
    parallel, compute, averages = config.parallel, config.train.precision.compute, config.train.ema is not None
    rows: dict[Footprint, list[int]] = {}
    for rank in range(layout.pp):
        parts = [stage.part for stage in stages if stage.rank == rank]
        row = footprint(
            spec,
            parts,
            parallel,
            layout,
            compute,
            averages=averages,
            optimizer=config.train.optimizer,
            fp8=config.train.precision.fp8,
        )
        rows.setdefault(row, []).append(rank)
    yield (
        "memory of a process, in GiB, without activations:"
        if layout.world_size > 1
        else "memory, in GiB, without activations:"
    )
    average = ", moving average" if averages else ""
    for row, ranks in rows.items():
        where = f"pp rank {_spans(ranks)}: " if layout.pp > 1 else ""
        gradients = f" + {_gib(row.accumulated)} gradients before they are sharded" if row.accumulated else ""
        yield (
            f"  {where}{row.parameters:,} parameters: {_gib(row.states)} weights, moments, gradients{average} + "
            f"{_gib(row.compute)} copies in {compute}{gradients} = {_gib(row.total)}"
        )


def _spans(ranks: Sequence[int]) -> str:
    """`0, 2-5`, of ascending numbers."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
