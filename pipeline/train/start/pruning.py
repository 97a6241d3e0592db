"""Pruning at the start of a run: which layers, channels, heads and experts of a source its model takes.

A choice is made once, on rank 0, from the source's specification and the importance of its parts. From it follows for
each tensor of the model a `Pick`: the tensor of the source, and which of its entries along each dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.config.weights import InitFromConfig
from pipeline.train.checkpoint.exported_loading import Shapes
from pipeline.train.checkpoint.state_shapes import state_shapes
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.parameter_spec import DIM, Axes, WidthAxis
from pipeline.train.model.part_spec import LayerPartSpec
from pipeline.train.start.importance_file import Importance

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_LAYERS, _DIMS = "train.init_from.layers", "train.init_from.dims"
_ROWS = {"embedding.weight", "position_embedding.weight", "type_embedding.weight", "head.weight"}
"""Tensors with rows of tokens or positions and columns of channels."""

Choice = dict[str, Any]
"""Parts of a source that a model takes, as JSON: `layers` has a source's layer for each of ours, `kept` the entries by
width of our layers."""


@dataclass(frozen=True)
class Pick:
    """Entries of a tensor of the source that are one of ours."""

    name: str
    """Name of the source's tensor."""
    entries: tuple[torch.Tensor | None, ...]
    """For each dimension the source's index of each of ours, ascending; None: the dimension is taken whole."""


def choose(
    wanted: InitFromConfig, ours: DecoderSpec, theirs: DecoderSpec, importance: Importance | None, where: str
) -> Choice:
    """The choice that a section makes for a model.

    Args:
        wanted: the section.
        ours: specification of the run's model.
        theirs: that of the source.
        importance: of the source's parts, if `dims` names it.
        where: place of the source, for messages.

    Raises:
        UserError: the model is not a part of the source.
    """
    if ours.sided or theirs.sided:
        key = _DIMS if wanted.layers is None else _LAYERS
        raise UserError(f"{key} does not work with model.encoder; leave it out, or take a decoder alone")
    layers = _chosen_layers(wanted, ours, theirs, where)
    widths = dict(_widths(ours, theirs, layers))
    smaller = [name for name, (our, their) in widths.items() if our.size != their.size]
    if smaller and importance is None:
        our, their = widths[smaller[0]]
        raise UserError(
            f"{_LAYERS}: model.{our.key} is {our.size:,}, and {their.size:,} in {where}; set it to that, or name the "
            f"importance of the source's widths as {_DIMS} (`pipeline eval --importance`)"
        )
    for name in smaller:
        _check_width(*widths[name], where)
    kept: dict[str, list[int]] = {}
    if importance is not None and DIM in smaller:
        kept[DIM] = importance.most(DIM, theirs.dim, ours.dim, _DIMS)
    for index, layer in enumerate(layers):
        for key, found in _kept_in_layer(ours, theirs, index, layer, importance).items():
            kept[f"{index}.{key}"] = found
    return {"layers": layers, "kept": kept}


def _chosen_layers(wanted: InitFromConfig, ours: DecoderSpec, theirs: DecoderSpec, where: str) -> list[int]:
    found, count = wanted.layers, len(theirs.layers)
    if found is None:
        if len(ours.layers) != count:
            raise UserError(
                f"{_DIMS}: {where} has {count} layers, and model.layers is {len(ours.layers)}; set it to {count}, or "
                f"choose layers with {_LAYERS}"
            )
        return list(range(count))
    if len(found) != len(ours.layers):
        raise UserError(f"{_LAYERS} has {len(found)} layers, and model.layers is {len(ours.layers)}; make them equal")
    if found[-1] >= count:
        raise UserError(f"{_LAYERS}: {where} has layers 0 to {count - 1}, and no layer {found[-1]}")
    return found


def _widths(
    ours: DecoderSpec, theirs: DecoderSpec, layers: Sequence[int]
) -> Iterator[tuple[str, tuple[WidthAxis, WidthAxis]]]:
    """Widths that both models have, ours and theirs, by a name that tells layers apart."""
    yield DIM, (WidthAxis(DIM, ours.dim), WidthAxis(DIM, theirs.dim))
    for index, layer in enumerate(layers):
        for place, part in ours.layers[index].parts.items():
            other = theirs.layers[layer].parts.get(place)
            mine, found = _axes_by_key(part), {} if other is None else _axes_by_key(other)
            for key in mine.keys() & found.keys() - {DIM}:
                yield f"{index}.{key}", (mine[key], found[key])


def _axes_by_key(part: LayerPartSpec) -> dict[str, WidthAxis]:
    return {axis.key: axis for axes in part.axes.values() for axis in axes if axis is not None}


def _check_width(our: WidthAxis, their: WidthAxis, where: str) -> None:
    if our.size > their.size:
        raise UserError(
            f"{_DIMS}: model.{our.key} is {our.size:,}, and {where} has only {their.size:,}; pruning keeps some of "
            "them, so lower it"
        )


def _kept_in_layer(
    ours: DecoderSpec, theirs: DecoderSpec, index: int, layer: int, importance: Importance | None
) -> dict[str, list[int]]:
    """The source's entries of each width of one of our layers that is smaller than there."""
    found: dict[str, list[int]] = {}
    for place, part in ours.layers[index].parts.items():
        other = theirs.layers[layer].parts.get(place)
        if other is None or importance is None:
            continue
        mine, its = _axes_by_key(part), _axes_by_key(other)
        smaller = [key for key in mine if key != DIM and key in its and mine[key].size < its[key].size]
        for key in smaller:
            name = f"layers.{layer}.{key}"
            if key in ("heads", "kv_heads"):
                found |= _kept_heads(importance, layer, mine, its)
            elif key == "experts.count":
                assert isinstance(part, ExpertsSpec) and isinstance(other, ExpertsSpec)
                found[key] = _kept_experts(importance, name, part, other)
            else:
                found[key] = importance.most(name, its[key].size, mine[key].size, _DIMS)
    return found


def _kept_heads(
    importance: Importance, layer: int, ours: Mapping[str, WidthAxis], theirs: Mapping[str, WidthAxis]
) -> dict[str, list[int]]:
    """Key heads, and in each of their groups query heads: groups stay together, and all have the same size."""
    heads, groups = theirs["heads"].size, theirs["kv_heads"].size
    in_group, kept_groups = ours["heads"].size // ours["kv_heads"].size, ours["kv_heads"].size
    if in_group > heads // groups:
        raise UserError(
            f"{_DIMS}: {in_group} query heads share a key head of this model (model.heads / model.kv_heads), and only "
            f"{heads // groups} do in the source; set model.heads to at most {heads // groups} times model.kv_heads"
        )
    values_GR = importance.of(f"layers.{layer}.heads", heads, _DIMS).view(groups, -1)
    best = values_GR.sort(dim=1, descending=True, stable=True)
    sums_G = best.values[:, :in_group].sum(1)
    keys = sorted(sums_G.argsort(descending=True, stable=True)[:kept_groups].tolist())
    queries = [
        group * (heads // groups) + head for group in keys for head in sorted(best.indices[group, :in_group].tolist())
    ]
    return {"heads": queries, "kv_heads": keys}


def _kept_experts(importance: Importance, name: str, ours: ExpertsSpec, theirs: ExpertsSpec) -> list[int]:
    """Experts; as many of each group as of the others, where routers choose groups first."""
    groups = theirs.router.groups or 1
    if (ours.router.groups or 1) != groups:
        raise UserError(
            f"{_DIMS}: model.experts.groups is {ours.router.groups}, and {theirs.router.groups} in the source; groups "
            "stay as they are, so set it to that"
        )
    size, kept = theirs.router.count // groups, ours.router.count // groups
    values_GN = importance.of(name, theirs.router.count, _DIMS).view(groups, size)
    best_GN = values_GN.argsort(dim=1, descending=True, stable=True)[:, :kept]
    return sorted(group * size + expert for group, some in enumerate(best_GN.tolist()) for expert in some)


def picks(choice: Choice, ours: DecoderSpec, theirs: DecoderSpec, shapes: Shapes, where: str) -> dict[str, Pick]:
    """The pick of each tensor of the model, by name.

    Args:
        choice: from `choose`.
        ours: specification of the run's model.
        theirs: that of the source.
        shapes: of the source's tensors.
        where: place of the source, for messages.

    Raises:
        UserError: the source does not have a tensor, or has it in a size that pruning does not change.
    """
    layers, found = choice["layers"], dict[str, Pick]()
    wanted = state_shapes(ours)
    for name, shape in (wanted.parameters | wanted.weight_buffers).items():
        source, label = _source_name(name, layers), _layer_label(name, layers)
        if source not in shapes:
            raise UserError(f"train.init_from: {label}{where} has no {source}, which this model has as {name}")
        entries = None
        if len(shape) == len(shapes[source]):
            axes = _axes(name, ours, len(shape)), _axes(source, theirs, len(shape))
            kept = {axis.key: choice["kept"].get(_kept_name(name, axis)) for axis in axes[0] if axis is not None}
            entries = _entries((shape, shapes[source]), axes, kept)
        if entries is None:
            raise UserError(
                f"train.init_from: {label}{source} is {shape_text(shapes[source])} in {where}, and {name} "
                f"{shape_text(shape)} in this model; pruning changes no width of latent attention, recurrent layers, "
                "plug-ins and model.mtp, and elsewhere neither head_dim, experts.ffn_dim, vocab_multiple nor "
                "max_positions: set these to the source's"
            )
        found[name] = Pick(source, entries)
    _refuse_others(found, choice, shapes, where)
    return found


def _entries(
    shapes: tuple[Sequence[int], Sequence[int]], axes: tuple[Axes, Axes], kept: Mapping[str, list[int] | None]
) -> tuple[torch.Tensor | None, ...] | None:
    """The source's index of each of our entries, by dimension; None if a size differs that pruning does not change.

    Args:
        shapes: ours and the source's.
        axes: ours and the source's.
        kept: entries of the source, by key of the axis.
    """
    found: list[torch.Tensor | None] = []
    for size, its_size, mine, other in zip(*shapes, *axes, strict=True):
        some = None if mine is None else kept[mine.key]
        # Of another number of heads of another size, rows may be as many.
        same_entries = mine is None or other is None or mine == other
        if size == its_size and same_entries:
            found.append(None)
        elif mine is None or other is None or some is None or mine.block != other.block:
            return None
        else:
            found.append((torch.tensor(some)[:, None] * mine.block + torch.arange(mine.block)).flatten())
    return tuple(found)


def _refuse_others(found: Mapping[str, Pick], choice: Choice, shapes: Shapes, where: str) -> None:
    """Refuse tensors of the source that the model has no place for, besides those of other layers and of mtp."""
    taken, layers = {pick.name for pick in found.values()}, set(choice["layers"])
    for name in shapes:
        match = _LAYER.fullmatch(name)
        elsewhere = name.startswith("mtp.") if match is None else int(match[1]) not in layers
        if name not in taken and not elsewhere and not name.endswith(".router.loads"):
            raise UserError(
                f"train.init_from: {where} has {name}, which this model has no place for; set `model` to that of the "
                "source besides its sizes"
            )


def _source_name(name: str, layers: Sequence[int]) -> str:
    match = _LAYER.fullmatch(name)
    return name if match is None else f"layers.{layers[int(match[1])]}.{match[2]}"


def _layer_label(name: str, layers: Sequence[int]) -> str:
    match = _LAYER.fullmatch(name)
    index = None if match is None else int(match[1])
    return "" if index is None or layers[index] == index else f"layer {index} of this model is {layers[index]} there: "


def _kept_name(name: str, axis: WidthAxis) -> str:
    match = _LAYER.fullmatch(name)
    return axis.key if axis.key == DIM or match is None else f"{match[1]}.{axis.key}"


def _axes(name: str, spec: DecoderSpec, dims: int) -> Axes:
    """Entries of the dimensions of a tensor of a model, given their number."""
    stream = WidthAxis(DIM, spec.dim)
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, (place, _, own) = spec.layers[int(match[1])], match[2].partition(".")
        part = layer.parts.get(place)
        return (stream,) if part is None else part.axes.get(own, (None,) * dims)
    if name in _ROWS:
        return None, stream
    of_stream = name.startswith(("norm.", "embedding_norm.", "head.norm.", "head.dense."))
    return (stream if of_stream else None,) * dims
