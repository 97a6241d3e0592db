"""The matrix products of a model that are in fp8: one answer for rules, conversion, plans and the run's log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.common.format import percent, spans
from pipeline.config.train import Fp8Config
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import flops_per_token
from pipeline.train.model.part_spec import LayerSpec


@dataclass(frozen=True)
class RankMatrix:
    """A weight of a layer's matrix products as one process has it, after the cut by tp and before that by dp_shard."""

    name: str
    """Name of the module within the layer, like `mlp.w1`."""
    rows: int
    columns: int
    elements: int
    """Elements of the whole matrix."""
    eligible: bool
    """True if it may be in fp8. Weights of heads that ranks of tp share may not: a rank has all rows and uses some."""


def matrices_of(layer: LayerSpec, tp: int) -> list[RankMatrix]:
    """All matrices of a layer, in the order of the forward pass."""
    return [
        RankMatrix(name, *matrix.on_rank(tp), matrix.elements, matrix.takes_fp8 and not matrix.shared(tp))
        for name, matrix in layer.matrices.items()
    ]


def fp8_matrices(config: Fp8Config, spec: DecoderSpec, tp: int) -> dict[int, list[RankMatrix]]:
    """Matrices in fp8 by index of the layer; layers without any are missing."""
    found = {}
    for index, layer in enumerate(spec.layers):
        if config.first_layers <= index < len(spec.layers) - config.last_layers:
            chosen = [matrix for matrix in matrices_of(layer, tp) if _fits(config, matrix)]
            if chosen:
                found[index] = chosen
    return found


def _fits(config: Fp8Config, matrix: RankMatrix) -> bool:
    sides = matrix.rows, matrix.columns
    return matrix.eligible and min(sides) >= config.min_size and not any(side % config.multiple for side in sides)


def gathers_fp8(config: Fp8Config, spec: DecoderSpec, layout: Layout) -> bool:
    """True if weights are sent in fp8 by those who have a shard of them.

    By default where weights are sharded, in equal pieces: torchao sends what a process has as it is.
    """
    if config.all_gather is not None:
        return config.all_gather
    if config.scaling != "tensorwise" or layout.shards == 1:
        return False
    return not uneven_shards(config, spec, layout)


def gathered_in_fp8(config: Fp8Config | None, spec: DecoderSpec, layout: Layout) -> dict[int, int]:
    """Numbers that a process collects in fp8, by index of the layer; empty without fp8, or if all are sent in bf16."""
    if config is None or not gathers_fp8(config, spec, layout):
        return {}
    chosen = fp8_matrices(config, spec, layout.tp)
    return {index: sum(each.rows * each.columns for each in matrices) for index, matrices in chosen.items()}


def uneven_shards(config: Fp8Config, spec: DecoderSpec, layout: Layout) -> list[RankMatrix]:
    """Matrices in fp8 whose rows cannot be dealt evenly to the processes that share them, each once."""
    chosen = fp8_matrices(config, spec, layout.tp).values()
    return list(dict.fromkeys(matrix for layer in chosen for matrix in layer if matrix.rows % layout.shards))


def fp8_fraction(config: Fp8Config, spec: DecoderSpec, tp: int, sequence_length: int) -> float:
    """Share of a token's FLOPs in training that are in fp8, causal attention counted half."""
    elements = sum(matrix.elements for layer in fp8_matrices(config, spec, tp).values() for matrix in layer)
    return 6.0 * elements / flops_per_token(spec, sequence_length, causal=True)


def fp8_lines(config: Fp8Config, spec: DecoderSpec, layout: Layout, sequence_length: int) -> Iterator[str]:
    """Lines on the matrices of a model that are in fp8 and those that are not.

    Args:
        config: The `train.precision.fp8:` section.
        spec: The model.
        layout: The degrees.
        sequence_length: Of the FLOPs.
    """
    chosen = fp8_matrices(config, spec, layout.tp)
    every = {index: matrices_of(layer, layout.tp) for index, layer in enumerate(spec.layers)}
    count, total = (sum(map(len, matrices.values())) for matrices in (chosen, every))
    fraction = fp8_fraction(config, spec, layout.tp, sequence_length)
    sent = ", weights sent in fp8" if gathers_fp8(config, spec, layout) else ""
    emulated = ", emulated" if config.emulate else ""
    yield (
        f"fp8 ({config.backend}, {config.scaling}{sent}{emulated}): {count:,} of {total:,} matrices of layers, "
        f"{percent(fraction, 0)} of the FLOPs per token"
    )
    left: dict[str, list[int]] = defaultdict(list)
    for index, matrices in every.items():
        for matrix in matrices:
            if matrix not in chosen.get(index, ()):
                left[matrix.name].append(index)
    whole = [index for index in every if index not in chosen]
    names = [name for name, layers in left.items() if set(layers) - set(whole)]
    parts = [f"{', '.join(names)} of layers"] if names else []
    parts += [f"all of layers {spans(whole)}"] if whole else []
    experts = ["experts (they stay in bf16)"] if spec.expert_layers else []
    ends = ["embedding", "norms", "attention", "head", *["multi-token prediction"] * bool(spec.mtp)]
    yield f"not in fp8: {', '.join([*parts, *experts, *ends])}"
