"""The tensors of one model in the format of a family, and in ours: whole ones, and the pieces that a rank has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.train.checkpoint.state_shapes import state_shapes
from pipeline.train.huggingface.family import Family
from pipeline.train.huggingface.names import LAYER, TensorRule
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import EXPERT, ExpertFiles, RowNumbers

Shape = tuple[int, ...]
_T = TypeVar("_T")

_VOCABULARY = ("embedding.weight", "head.weight", "head.bias")
"""Tensors with a row a token; theirs have no rows of padding."""
_MOST_EXPERTS = 2**17
"""Of all layers. Each has tensors with names of their own, which are listed before any file is looked at; Kimi K2 has
23,040."""


@dataclass(frozen=True)
class TensorPiece:
    """A piece of one of their tensors, and how to make the piece of ours that it holds."""

    source: tuple[slice | int, ...]
    """What to read of theirs."""
    rows: RowNumbers | None
    """Rows of what was read that are ours, in our order; None: all, as they are."""
    transposed: bool
    unit_dims: tuple[int, ...]

    def of(self, read: Tensor) -> Tensor:
        """Ours, from what was read."""
        value = read.t() if self.transposed else read
        value = value.squeeze(self.unit_dims) if self.unit_dims else value
        return value if self.rows is None else value[torch.from_numpy(self.rows)]


class PlacedPiece(NamedTuple):
    """A piece of one of their tensors, and the place of what it holds in a piece of ours."""

    theirs: str
    piece: TensorPiece
    target: slice | int
    """Rows of the piece of ours, or the expert in it."""


@dataclass(frozen=True)
class TensorSlice:
    """The rows of one of their tensors that are one of ours; or, of experts, those of each."""

    theirs: str
    """Name of their tensor, with `EXPERT` in it where experts are numbered."""
    first: int
    """First row in their tensor, after transposing back and in our order."""
    rows: int
    """Rows in their tensor; the rest of ours is padding of the vocabulary."""
    transposed: bool
    back: Callable[[], RowNumbers] | None = None
    """Row in their tensor for each row in our order; None: the order is the same."""
    unit_dims: tuple[int, ...] = ()
    """See `TensorRule`."""
    experts: ExpertFiles | None = None
    """Ours has a dimension of experts before the rows."""
    column: int | None = None
    """First column in their tensor, where ours are beside each other."""

    def pieces(self, rows: slice, *others: slice) -> Iterator[PlacedPiece]:
        """Pieces of theirs that together are these rows and columns of ours; none where all are padding.

        Args:
            rows: of ours; of experts, which ones.
            others: the dimensions after it.
        """
        if self.experts is None:
            piece = self.cut(rows, *others)
            if piece is not None:
                yield PlacedPiece(self.theirs, piece, slice(0, min(rows.stop, self.rows) - rows.start))
            return
        piece = self.cut(*others)
        assert piece is not None
        for expert in range(rows.start, rows.stop):
            own = replace(piece, source=(expert, *piece.source)) if self.experts == "stacked" else piece
            yield PlacedPiece(self.name_of(expert), own, expert - rows.start)

    def name_of(self, expert: int) -> str:
        """The tensor that has an expert."""
        return self.theirs.replace(EXPERT, str(expert))

    def names(self, experts: int) -> list[str]:
        """All tensors of theirs that have something of ours, given its first dimension."""
        return [self.name_of(expert) for expert in range(experts)] if self.experts == "numbered" else [self.theirs]

    def cut(self, rows: slice, *others: slice) -> TensorPiece | None:
        """The piece of theirs that has these rows and columns of ours, or of an expert; None if all rows are padding.

        Rows in another order are read from the first to the last that is needed.
        """
        start, stop = min(rows.start, self.rows), min(rows.stop, self.rows)
        if stop <= start:
            return None
        source, wanted = slice(self.first + start, self.first + stop), None
        if self.back is not None:
            wanted = self.back()[source]
            source = slice(int(wanted.min()), int(wanted.max()) + 1)
            wanted = wanted - source.start
        if self.column is not None:
            (columns,) = others
            others = (slice(self.column + columns.start, self.column + columns.stop),)
        found = _with_units((source, *others), self.unit_dims, slice(0, 1))
        return TensorPiece(found[::-1] if self.transposed else found, wanted, self.transposed, self.unit_dims)


@dataclass(frozen=True)
class TensorMapping:
    """The tensors of one model, by their names and by ours."""

    theirs: dict[str, TensorRule]
    """Name -> which of ours it is made of, with the numbers of layers and experts in it."""
    their_shapes: dict[str, Shape]
    ours: dict[str, TensorSlice]
    """Name -> where it is."""
    our_shapes: dict[str, Shape]
    buffers: frozenset[str] = field(default_factory=frozenset)
    """Names of our buffers, which stay in fp32, whatever the weights are."""
    fp32: frozenset[str] = field(default_factory=frozenset)
    """Names of our parameters that are computed with in fp32, whatever the weights are."""

    @property
    def uncast(self) -> frozenset[str]:
        """Their names of both, which exports have in fp32."""
        return frozenset(self.ours[name].theirs for name in self.buffers | self.fp32)

    def to_theirs(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor of theirs from those of ours that it is made of."""
        rule = self.theirs[name]
        return self.joined(
            name, [tensors[ours] if rule.expert is None else tensors[ours][rule.expert] for ours in rule.ours]
        )

    def joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A tensor of theirs from its parts; of stacked experts, those of the experts that the parts have.

        Args:
            name: theirs.
            parts: those of ours that it is made of, of an expert that is numbered its matrices alone.
        """
        rule = self.theirs[name]
        dim = int(rule.experts == "stacked")
        pieces = [part.narrow(dim, 0, self.ours[ours].rows) for ours, part in zip(rule.ours, parts, strict=True)]
        value = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1 if rule.beside else dim)
        if rule.skipped:
            value = torch.cat([value.new_zeros(rule.skipped, *value.shape[1:]), value])
        if rule.order is not None:
            value = value.index_select(dim, torch.from_numpy(rule.order.of(rule.part)))
        for unit in rule.unit_dims:
            value = value.unsqueeze(dim + unit)
        return (value.transpose(-2, -1) if rule.transposed else value).contiguous()

    def to_ours(self, name: str, theirs: Mapping[str, Tensor]) -> Tensor:
        """A tensor of ours from those of theirs that have it; padding of the vocabulary is 0."""
        shape = self.our_shapes[name]
        found: Tensor | None = None
        for tensor, piece, here in self.ours[name].pieces(*(slice(0, size) for size in shape)):
            value = piece.of(theirs[tensor][piece.source])
            found = value.new_zeros(shape) if found is None else found
            found[here] = value
        assert found is not None
        return found


def map_tensors(family: Family, spec: DecoderSpec) -> TensorMapping:
    """The rules of a family with the names and shapes of one model.

    Raises:
        UserError: the model has more experts than are gone through one by one.
    """
    layers = (*spec.layers, *(each.layer for each in spec.mtp))
    counts = [part.router.count for layer in layers for part in layer.parts.values() if isinstance(part, ExpertsSpec)]
    if sum(counts) > _MOST_EXPERTS:
        raise UserError(
            f"layers {len(spec.layers)} and experts.count {max(counts)} are {sum(counts):,} experts in all; models "
            f"with at most {_MOST_EXPERTS:,} are converted"
        )
    shapes = state_shapes(spec)
    buffers = shapes.weight_buffers
    our_shapes = shapes.parameters | buffers
    head = "embedding.weight" if spec.tie_embeddings else "head.weight"
    ahead = [each.layer.parts for each in spec.mtp]
    rules = family.names.rules([layer.parts for layer in spec.layers], ahead, head, spec.encoder_layers)
    mapping = map_rules(rules, our_shapes, spec.vocab_size, frozenset(buffers))
    mapping = replace(mapping, fp32=shapes.fp32)
    missing = our_shapes.keys() - mapping.ours.keys()
    assert not missing, f"{family.model_type} has no place for {sorted(missing)}"
    return mapping


def map_rules(
    rules: Sequence[TensorRule],
    our_shapes: dict[str, Shape],
    vocab_size: int,
    buffers: frozenset[str] = frozenset(),
) -> TensorMapping:
    """Rules with the shapes of one model.

    Args:
        rules: of a family; those of biases and norms that the model does not have are left out.
        our_shapes: by our names.
        vocab_size: rows of theirs in tensors with a row a token.
        buffers: those of our names that are buffers.
    """
    theirs: dict[str, TensorRule] = {}
    their_shapes: dict[str, Shape] = {}
    ours: dict[str, TensorSlice] = {}
    for rule in rules:
        found = [name for name in rule.ours if name in our_shapes]
        if not found:
            continue
        assert len(found) == len(rule.ours), rule
        if rule.copy or rule.beside:
            height, width = our_shapes[rule.ours[0]]
            height = vocab_size if rule.ours[0] in _VOCABULARY else height
            theirs[rule.theirs], their_shapes[rule.theirs] = rule, (height, width * len(rule.ours))
            for index, name in enumerate(() if rule.copy else rule.ours):
                ours[name] = TensorSlice(rule.theirs, 0, height, transposed=False, column=width * index)
            continue
        back = None if rule.order is None else partial(rule.order.back, rule.part)
        skipped = int(rule.experts is not None)
        rows = [vocab_size if name in _VOCABULARY else our_shapes[name][skipped] for name in rule.ours]
        for name, (first, stop) in zip(rule.ours, pairwise(accumulate(rows, initial=rule.skipped)), strict=True):
            ours[name] = TensorSlice(
                rule.theirs, first, stop - first, rule.transposed, back, rule.unit_dims, rule.experts
            )
        leading, others = our_shapes[rule.ours[0]][:skipped], our_shapes[rule.ours[0]][skipped + 1 :]
        shape = _with_units((rule.skipped + sum(rows), *others), rule.unit_dims, 1)
        shape = shape[::-1] if rule.transposed else shape
        if rule.experts == "numbered":
            for expert in range(*leading):
                name = rule.theirs.replace(EXPERT, str(expert))
                theirs[name], their_shapes[name] = replace(rule, theirs=name, expert=expert), shape
        else:
            theirs[rule.theirs], their_shapes[rule.theirs] = rule, (*leading, *shape)
    return TensorMapping(theirs, their_shapes, ours, our_shapes, buffers)


def _with_units(dims: tuple[_T, ...], units: tuple[int, ...], one: _T) -> tuple[_T, ...]:
    """Something of each dimension of theirs, from that of each of ours."""
    found = list(dims)
    for unit in units:
        found.insert(unit, one)
    return tuple(found)


def names_in_files(
    family: Family, mapping: TensorMapping, found: Mapping[str, Sequence[int]], folder: str, settings: str
) -> dict[str, str]:
    """Names of `mapping.theirs` -> names that the files have for them.

    Args:
        family: of the model.
        mapping: of the model; of its copies some may be missing.
        found: shapes in the files by name.
        folder: of the files, for messages.
        settings: name of the file that describes the model, for messages.

    Raises:
        UserError: a tensor is missing, has another shape, or is none of this family's.
    """
    full = {name.removeprefix(family.prefix): name for name in found}
    names: dict[str, str] = {}
    for name, shape in mapping.their_shapes.items():
        actual = full.get(name.removeprefix(family.prefix))
        for part, other in family.renamed.items():
            actual = actual or full.get(name.replace(part, other).removeprefix(family.prefix))
        if actual is None and mapping.theirs[name].copy:
            continue
        if actual is None:
            raise UserError(f"{folder} has no tensor {name}, which its {settings} asks for; are the files complete?")
        if tuple(found[actual]) != shape:
            raise UserError(
                f"{folder}: {actual} is {shape_text(found[actual])}, but by {settings} it is {shape_text(shape)}; "
                "do the files belong together?"
            )
        names[name] = actual
    taken = set(names.values())
    rest = [name for name in found if name not in taken and not _is_ignored(family, name)]
    further = set(extra_layers(family, mapping, rest))
    rest = [name for name in rest if name not in further]
    if family.names.head not in mapping.theirs:
        rest = [name for name in rest if name != family.names.head]  # a copy of the embedding
    if rest:
        raise UserError(
            f"{folder} has {len(rest)} tensors that a {family.model_type} with this {settings} does not have, "
            f"such as {rest[0]}; it cannot be converted without loss"
        )
    return names


def extra_layers(family: Family, mapping: TensorMapping, found: Iterable[str]) -> list[str]:
    """Names of tensors in files that are for tokens further ahead, and are left out."""
    if family.extra is not None:
        return [name for name in found if name.startswith(family.extra)]
    if not family.extra_layers:
        return []
    before, _, after = family.names.layer.partition(LAYER)
    layers = {name.removeprefix(before).partition(after)[0] for name in mapping.their_shapes if name.startswith(before)}
    return [
        name
        for name in found
        if name.startswith(before)
        and (number := name.removeprefix(before).partition(after)[0]).isdigit()
        and number not in layers
    ]


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name.removeprefix(family.prefix)) for pattern in family.ignored)
