"""Stages of a pipeline: their layers and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from pipeline.config.parallel import V_SHAPED, PipelineConfig
from pipeline.train.model.decoder import ModelPart
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.flops import Length, head_flops, layer_flops, mtp_flops, shape_of
from pipeline.train.model.part_spec import RELATIVE

EMBEDDING_WEIGHT = 0.1
"""Weight of the embedding relative to the head. A look-up is not a matrix product, but its gradient and its update
touch as many numbers as the head's. A choice, not a measurement."""


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline, or the whole model without one."""

    index: int
    """Place in the pipeline, from the embedding (0) to the head."""
    rank: int
    """Coordinate on the pp axis of the processes that have it."""
    part: ModelPart
    """Part of the model that it has."""


def split_stages(spec: DecoderSpec, pp: int, pipeline: PipelineConfig, length: Length) -> list[Stage]:
    """All stages, first to last.

    The numbers of layers are those of the config, or balanced by `balance` over the costs of `layer_costs`. Stage i is
    on rank i % pp; with a V-shaped schedule the ranks run to the last one and back. What a user can do wrong is told
    by the rules before.

    Args:
        spec: The model.
        pp: Degree of the pipeline axis.
        pipeline: The `parallel.pipeline:` section.
        length: Of the windows that the stages are balanced for.
    """
    if pp == 1:
        return [Stage(0, 0, ModelPart.whole(spec))]
    count = pp * pipeline.stages_per_rank
    given = pipeline.layers_per_stage
    sizes = balance(tuple(layer_costs(spec, length)), count) if given is None else tuple(given)
    assert len(sizes) == count and sum(sizes) == len(spec.layers)
    ends = list(accumulate(sizes))
    return [
        Stage(index, rank_of(index, pp, pipeline), ModelPart(range(end - size, end), index == 0, index == count - 1))
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def tied_tables(spec: DecoderSpec, stages: Sequence[Stage]) -> dict[str, list[Stage]]:
    """Stages that have a parameter, first to last, by its name; of parameters that more than one stage has."""
    found = {"embedding.weight": [stages[0], stages[-1]] if spec.last_embeds else []}
    for side in spec.relatives:
        own = [stage for stage in stages if any(spec.layers[index].side == side for index in stage.part.layers)]
        found[f"{RELATIVE}{side}"] = own
    return {name: holders for name, holders in found.items() if len({stage.index for stage in holders}) > 1}


def rank_of(stage: int, pp: int, pipeline: PipelineConfig) -> int:
    """The pp coordinate that has a stage."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if pipeline.schedule in V_SHAPED and turn % 2 else place


def layer_costs(spec: DecoderSpec, length: Length) -> list[int]:
    """Forward FLOPs of one token, by layer.

    The first has the embedding's weight on top, the last the head's and all of multi-token prediction. Attention is
    counted half (`causal=True`), as kernels compute it.
    """
    head = head_flops(spec)
    costs = [layer_flops(layer, length, causal=True) for layer in spec.layers]
    costs[0] += EMBEDDING_WEIGHT * head
    costs[-1] += shape_of(length).predicted_share * head + mtp_flops(spec, length, causal=True)
    # Whole numbers are compared without rounding errors, so that every machine makes the same split.
    return [round(cost) for cost in costs]


def compute_costs(spec: DecoderSpec, stages: Sequence[Stage], length: Length) -> list[float]:
    """Forward FLOPs of one token, by stage, without any weight of the embedding."""
    layers = [layer_flops(layer, length, causal=True) for layer in spec.layers]
    end = shape_of(length).predicted_share * head_flops(spec) + mtp_flops(spec, length, causal=True)
    return [sum(layers[index] for index in stage.part.layers) + (end if stage.part.last else 0.0) for stage in stages]


@lru_cache(maxsize=64)
def balance(costs: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Cut a row of layers into contiguous stages, each with a layer at least.

    The most expensive stage is as cheap as possible. Of the cuts for which it is, the sum of squares of the stages'
    costs is the smallest; of those, the first stages have the fewest layers, as they keep the most activations.

    Returns:
        The number of layers of each stage.
    """
    layers = len(costs)
    assert 1 <= stages <= layers
    sums = [0, *accumulate(costs)]
    limit = _smallest_limit(sums, stages)
    # best[i]: (sum of squares, sizes) of layers i to the end in the stages that are left.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for left in range(1, stages + 1):
        following, best = best, {}
        for first in range(layers - left, -1, -1):
            for end in range(first + 1, layers + 1):
                cost = sums[end] - sums[first]
                if cost > limit:
                    break
                if end in following:
                    squares, sizes = following[end]
                    option = squares + cost * cost, (end - first, *sizes)
                    if first not in best or option < best[first]:
                        best[first] = option
    return best[0][1]


def _smallest_limit(sums: list[int], stages: int) -> int:
    """The least cost within which every stage can stay."""
    low, high = 0, sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sums, stages, middle) else (middle + 1, high)
    return low


def _fits(sums: list[int], stages: int, limit: int) -> bool:
    # Filling each stage as far as it goes needs the fewest; any of them can be cut further.
    used, start = 1, 0
    for previous, end in pairwise(sums):
        if end - previous > limit:
            return False
        if end - start > limit:
            used, start = used + 1, previous
    return used <= stages
