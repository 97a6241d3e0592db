"""Parameters on one rank of a layout, and the bytes that come with them, counted from the model's specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.config.parallel import ParallelConfig
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.decoder import Part
from pipeline.train.model.flops import layer_parameters, norm_parameters
from pipeline.train.parallel.layout import Layout
from pipeline.train.parallel.tested import Kind

MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES, AVERAGE_BYTES = 4, 8, 4, 4
"""Of a parameter: the fp32 weight, two fp32 moments, the fp32 gradient, the fp32 moving average if there is one."""
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a parameter in the format of forward and backward."""


@dataclass(frozen=True)
class Footprint:
    """What the parameters of one rank take."""

    parameters: int
    """Parameters of its stages, after the cut by tp and before that by dp_shard."""
    states: int
    """Bytes of master weights, moments, sharded gradients and the moving average."""
    compute: int
    """Bytes of the copies for forward and backward."""
    accumulated: int
    """Bytes of whole gradients: with a pipeline they are added up over the micro-batches before they are sharded."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.states + self.compute + self.accumulated


def footprint(
    spec: DecoderSpec,
    parts: Sequence[Part],
    parallel: ParallelConfig,
    layout: Layout,
    compute: Literal["fp32", "bf16", "fp16"],
    *,
    averages: bool,
) -> Footprint:
    """What the parameters of one rank take: weights, gradients, optimizer states. Activations come on top.

    Whole weights in the compute format are all there until the step ends, or with `reshard_after_forward` those of two
    layers, the one at work and the next, and of embedding, norm and head. Shards are counted even, without padding.

    Args:
        spec: The model.
        parts: The stages of the rank.
        parallel: The `parallel:` section.
        layout: The degrees.
        compute: `train.precision.compute`.
        averages: Whether there is a `train.ema`.
    """
    layers = [layer_parameters(spec.layers[index], layout.tp) for part in parts for index in part.layers]
    ends = sum(end_parameters(spec, part, layout.tp) for part in parts)
    parameters = ends + sum(layers)
    state = MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES + (AVERAGE_BYTES if averages else 0)
    states = state * -(-parameters // layout.shards)
    whole = ends + sum(sorted(layers)[-2:]) if Kind.of(parallel, layout).reshard else parameters
    accumulates = layout.pp > 1 and layout.shards > 1
    return Footprint(
        parameters, states, COMPUTE_BYTES[compute] * whole, GRADIENT_BYTES * parameters if accumulates else 0
    )


def end_parameters(spec: DecoderSpec, part: Part, tp: int) -> int:
    """Parameters of a part besides its layers, on one rank of the tp axis: embeddings, the last norm, the head."""
    table = spec.dim * spec.vocab_padded // tp
    total = 0
    if part.first:
        total += table + spec.dim * (spec.learned_positions or 0)
    if part.last:
        total += norm_parameters(spec.norm, spec.dim)
        # A tied head is the embedding, of which the last of several stages has a copy.
        total += 0 if part.first and spec.tie_embeddings else table
    return total
