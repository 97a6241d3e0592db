"""Parameters on one rank of a layout, and the bytes that come with them, counted from the model's specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.config.train import OptimizerConfig
from pipeline.train.distributed.layout import Layout
from pipeline.train.fp8.matrices import gathered_in_fp8
from pipeline.train.model.decoder import ModelPart
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import (
    expert_parameters,
    layer_parameters,
    mtp_parameters,
    muon_parameters,
    num_parameters,
)
from pipeline.train.parallel.overlap import layers_ahead, reduction
from pipeline.train.parallel.pipeline_stages import split_stages
from pipeline.train.parallel.step_shapes import run_stream
from pipeline.train.parallel.tested import LayoutKind

MASTER_BYTES, GRADIENT_BYTES, AVERAGE_BYTES = 4, 4, 4
"""Bytes of a parameter: the fp32 weight, the fp32 gradient, the fp32 moving average if there is one."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a moment of a parameter, by `train.optimizer.states`."""
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a parameter in the format of forward and backward."""


@dataclass(frozen=True)
class Footprint:
    """Memory of the parameters of one rank."""

    parameters: int
    """Parameters of its stages, after the cut by tp and before that by dp_shard."""
    states: int
    """Bytes of master weights, moments, sharded gradients and the moving average."""
    compute: int
    """Bytes of the copies for forward and backward."""
    accumulated: int
    """Bytes of whole gradients, where those of several micro-batches are added up before they are sharded."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.states + self.compute + self.accumulated


def footprint(config: Config, layout: Layout, spec: DecoderSpec, parts: Sequence[ModelPart]) -> Footprint:
    """Memory of the parameters of one rank: weights, gradients, optimizer states. Activations come on top.

    Whole weights in the compute format are all there until the step ends, or with `reshard_after_forward` those of the
    layer at work and the next ones, and of embedding, norm and head. Shards are counted even, without padding.

    Args:
        config: The run file.
        layout: The degrees.
        spec: The model.
        parts: The stages of the rank.
    """
    train, optimizer, width = config.train, config.train.optimizer, COMPUTE_BYTES[config.train.precision.compute]
    layers = {index: size for part in parts for index, size in layer_sizes(spec, part, layout.tp).items()}
    ends = sum(end_parameters(spec, part, layout.tp) for part in parts)
    parameters = ends + sum(layers.values())
    matrices = sum(part_matrices(spec, part, layout.tp) for part in parts)
    state = MASTER_BYTES + GRADIENT_BYTES + (AVERAGE_BYTES if train.ema is not None else 0)
    states = state * -(-parameters // layout.shards)
    states += MOMENT_BYTES[optimizer.states] * -(-moments(optimizer, parameters, matrices) // layout.shards)
    rounded = gathered_in_fp8(train.precision.fp8, spec, layout)
    gathered = gathered_sizes(spec, parts, layout)
    copies = sorted(width * size - rounded.get(index, 0) for index, size in gathered.items())
    reshards = LayoutKind.of(config.parallel, layout).reshard
    together = 1 + layers_ahead(config.parallel.overlap) if reshards else len(copies)
    whole = width * ends + sum(copies[::-1][:together])
    accumulated = 0
    if reduction(config.parallel, layout) != "each":
        experts = sum(expert_parameters(layer, layout.ep) for part in parts for _, layer in part.blocks(spec))
        accumulated += ends + sum(gathered.values()) - experts if layout.shards > 1 else 0
        accumulated += experts if layout.expert_shards > 1 else 0
    return Footprint(parameters, states, whole, GRADIENT_BYTES * accumulated)


def rank_footprints(config: Config, layout: Layout, spec: DecoderSpec) -> list[Footprint]:
    """Memory of the parameters of a rank in a run, by pp rank."""
    stages = split_stages(spec, layout.pp, config.parallel.pipeline, run_stream(config))
    return [
        footprint(config, layout, spec, [stage.part for stage in stages if stage.rank == rank])
        for rank in range(layout.pp)
    ]


def gathered_sizes(spec: DecoderSpec, parts: Sequence[ModelPart], layout: Layout) -> dict[int, int]:
    """Parameters by layer of some parts, see `layer_sizes`, as a rank has them while they are not sharded.

    Shards of experts are those of `layer_sizes`, over dp_shard x cp x tp whatever ep is; gathered, a rank has all
    experts, or with ep its own.
    """
    found = {index: size for part in parts for index, size in layer_sizes(spec, part, layout.tp).items()}
    for part in parts:
        for index, layer in part.blocks(spec):
            found[index] += expert_parameters(layer, layout.ep) - expert_parameters(layer, layout.tp)
    return found


def moments(optimizer: OptimizerConfig, parameters: int, matrices: int) -> int:
    """Numbers that an optimizer keeps for some parameters: AdamW two of each, Muon one of each that it has.

    Args:
        optimizer: The `train.optimizer:` section.
        parameters: All of them.
        matrices: Those that Muon may have.
    """
    return 2 * parameters - (matrices if optimizer.type == "muon" else 0)


def checkpoint_bytes(config: Config, spec: DecoderSpec) -> int:
    """Bytes of the tensors in a checkpoint: fp32 weights, the moments, the moving average if there is one."""
    optimizer, parameters = config.train.optimizer, num_parameters(spec)
    kept = moments(optimizer, parameters, part_matrices(spec, ModelPart.whole(spec), 1))
    weights = MASTER_BYTES + (AVERAGE_BYTES if config.train.ema else 0)
    return weights * parameters + MOMENT_BYTES[optimizer.states] * kept


def export_bytes(config: Config, spec: DecoderSpec) -> int:
    """Bytes of the tensors in an export while training; 0 without. Its vocabulary has no padding."""
    export, tables = config.train.checkpoint.export, 1 if spec.tie_embeddings else 2
    padding = tables * (spec.vocab_padded - spec.vocab_size) * spec.dim
    return 0 if export is None else COMPUTE_BYTES[export.dtype or "fp32"] * (num_parameters(spec) - padding)


def layer_sizes(spec: DecoderSpec, part: ModelPart, tp: int) -> dict[int, int]:
    """Parameters on one rank of the tp axis of each layer of a part and depth of multi-token prediction.

    Their weights are gathered together. Depths are numbered on after the layers of the model.
    """
    found = {index: layer_parameters(spec.layers[index], tp) for index in part.layers}
    if part.last:
        found |= {index: mtp_parameters(each, tp) for index, each in enumerate(spec.mtp, len(spec.layers))}
    return found


def part_matrices(spec: DecoderSpec, part: ModelPart, tp: int) -> int:
    """Parameters, of those in `layer_sizes`, that Muon may have."""
    before = [matrix.elements for each in spec.mtp for matrix in each.inputs] if part.last else []
    return sum(before) + sum(muon_parameters(layer, tp) for _, layer in part.blocks(spec))


def end_parameters(spec: DecoderSpec, part: ModelPart, tp: int) -> int:
    """Parameters of a part besides `layer_sizes`, on one rank of the tp axis: embeddings, the last norm, the head."""
    table = spec.dim * spec.vocab_padded // tp
    total = 0
    if part.first:
        total += table + sum(spec.first_sizes)
    total += sum(each.buckets * each.heads // tp for each in part.relatives(spec).values())
    if part.last:
        total += sum(spec.last_norm_sizes) + sum(spec.transform_sizes) + spec.head_bias * spec.vocab_padded // tp
        # The last of several stages has a copy of the embedding where it uses it, as a tied head does.
        total += table * ((not spec.tie_embeddings) + (spec.last_embeds and not part.first))
    return total
