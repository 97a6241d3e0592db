"""The tensors of one model in the format of a family, and in ours: whole ones, and the pieces that a rank has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.train.huggingface.family import Family
from pipeline.train.huggingface.names import TensorRule
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.meta import on_meta
from pipeline.train.model.tensor_names import RowNumbers

Shape = tuple[int, ...]

_VOCABULARY = ("embedding.weight", "head.weight")
"""Tensors with a row a token; theirs have no rows of padding."""


@dataclass(frozen=True)
class TensorPiece:
    """A piece of one of their tensors, and how to make the piece of ours that it holds."""

    there: tuple[slice, ...]
    """What to read of theirs."""
    rows: RowNumbers | None
    """Rows of what was read that are ours, in our order; None: all, as they are."""
    transposed: bool
    unit_dim: bool

    def of(self, read: Tensor) -> Tensor:
        """Ours, from what was read."""
        value = read.t() if self.transposed else read
        value = value.squeeze(1) if self.unit_dim else value
        return value if self.rows is None else value[torch.from_numpy(self.rows)]


@dataclass(frozen=True)
class TensorSlice:
    """The rows of one of their tensors that are one of ours."""

    theirs: str
    first: int
    """Its first row there, after transposing back and in our order."""
    rows: int
    """Its rows there; the rest of ours is padding of the vocabulary."""
    transposed: bool
    back: Callable[[], RowNumbers] | None = None
    """For each of the rows in our order the row there; None: they are in our order."""
    unit_dim: bool = False
    """Theirs has a dimension of 1 behind the rows."""

    def cut(self, rows: slice, *others: slice) -> TensorPiece | None:
        """The piece of theirs that has these rows and columns of ours; None if all of its rows are padding.

        Rows in another order are read from the first to the last that is needed.
        """
        start, stop = min(rows.start, self.rows), min(rows.stop, self.rows)
        if stop <= start:
            return None
        there, wanted = slice(self.first + start, self.first + stop), None
        if self.back is not None:
            wanted = self.back()[there]
            there = slice(int(wanted.min()), int(wanted.max()) + 1)
            wanted = wanted - there.start
        found = (there, slice(0, 1), *others) if self.unit_dim else (there, *others)
        return TensorPiece(found[::-1] if self.transposed else found, wanted, self.transposed, self.unit_dim)


@dataclass(frozen=True)
class TensorMapping:
    """The tensors of one model, by their names and by ours."""

    theirs: dict[str, TensorRule]
    """Name -> which of ours it is made of, with the numbers of layers in it."""
    their_shapes: dict[str, Shape]
    ours: dict[str, TensorSlice]
    """Name -> where it is."""
    our_shapes: dict[str, Shape]

    def to_theirs(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor of theirs from those of ours that it is made of."""
        rule = self.theirs[name]
        pieces = [tensors[ours][: self.ours[ours].rows] for ours in rule.ours]
        value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if rule.order is not None:
            value = value[torch.from_numpy(rule.order.of(rule.part))]
        value = value.unsqueeze(1) if rule.unit_dim else value
        return (value.t() if rule.transposed else value).contiguous()

    def to_ours(self, name: str, theirs: Tensor) -> Tensor:
        """A tensor of ours from the one of theirs that has it; padding of the vocabulary is 0."""
        part, shape = self.ours[name], self.our_shapes[name]
        piece = part.cut(slice(0, part.rows), *(slice(0, size) for size in shape[1:]))
        assert piece is not None
        value = piece.of(theirs[piece.there])
        if part.rows == shape[0]:
            return value.contiguous()
        padded = value.new_zeros(shape)
        padded[: part.rows] = value
        return padded


def map_tensors(family: Family, spec: DecoderSpec) -> TensorMapping:
    """The rules of a family with the names and shapes of one model."""
    with on_meta():
        our_shapes = {name: tuple(value.shape) for name, value in Decoder(spec).named_parameters()}
    rules = family.names.rules([layer.parts for layer in spec.layers])
    mapping = map_rules(rules, our_shapes, spec.vocab_size)
    missing = our_shapes.keys() - mapping.ours.keys()
    assert not missing, f"{family.model_type} has no place for {sorted(missing)}"
    return mapping


def map_rules(rules: Sequence[TensorRule], our_shapes: dict[str, Shape], vocab_size: int) -> TensorMapping:
    """Rules with the shapes of one model.

    Args:
        rules: of a family; those of biases and norms that the model does not have are left out.
        our_shapes: by our names.
        vocab_size: rows of theirs in tensors with a row a token.
    """
    theirs: dict[str, TensorRule] = {}
    their_shapes: dict[str, Shape] = {}
    ours: dict[str, TensorSlice] = {}
    for rule in rules:
        found = [name for name in rule.ours if name in our_shapes]
        if not found:
            continue
        assert len(found) == len(rule.ours), rule
        back = None if rule.order is None else partial(rule.order.back, rule.part)
        rows = [vocab_size if name in _VOCABULARY else our_shapes[name][0] for name in rule.ours]
        for name, (first, stop) in zip(rule.ours, pairwise(accumulate(rows, initial=0)), strict=True):
            ours[name] = TensorSlice(rule.theirs, first, stop - first, rule.transposed, back, rule.unit_dim)
        shape = (sum(rows), *([1] * rule.unit_dim), *our_shapes[rule.ours[0]][1:])
        theirs[rule.theirs] = rule
        their_shapes[rule.theirs] = shape[::-1] if rule.transposed else shape
    return TensorMapping(theirs, their_shapes, ours, our_shapes)


def names_in_files(
    family: Family, mapping: TensorMapping, found: Mapping[str, Sequence[int]], folder: str
) -> dict[str, str]:
    """Names of `mapping.theirs` -> names that the files have for them.

    Args:
        family: of the model.
        mapping: of the model.
        found: shapes in the files by name.
        folder: of the files, for messages.

    Raises:
        UserError: a tensor is missing, has another shape, or is none of this family's.
    """
    full = {name.removeprefix(family.prefix): name for name in found}
    names: dict[str, str] = {}
    for name, shape in mapping.their_shapes.items():
        actual = full.get(name.removeprefix(family.prefix))
        if actual is None:
            raise UserError(f"{folder} has no tensor {name}, which its config.json asks for; is the download complete?")
        if tuple(found[actual]) != shape:
            raise UserError(
                f"{folder}: {actual} is {shape_text(found[actual])}, but by config.json it is {shape_text(shape)}; "
                "do the files belong together?"
            )
        names[name] = actual
    rest = [name for name in found if name not in names.values() and not _is_ignored(family, name)]
    if family.names.head not in mapping.theirs:
        rest = [name for name in rest if name != family.names.head]  # a copy of the embedding
    if rest:
        raise UserError(
            f"{folder} has {len(rest)} tensors that a {family.model_type} with this config.json does not have, "
            f"such as {rest[0]}; it cannot be converted without loss"
        )
    return names


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name.removeprefix(family.prefix)) for pattern in family.ignored)
