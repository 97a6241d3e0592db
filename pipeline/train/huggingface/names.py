"""Names of tensors in Hugging Face's model families and of ours: one table per family, read in both directions.

Every rule has the same form. A tensor of theirs is one of ours, or several of ours below each other. Some families have
their rows in another order, or matrices the other way round ([in, out], as GPT-2's `Conv1D` multiplies). The order of
rotary pairs is mostly the same (see `pipeline.train.model.positions.rope`). Of experts the rule is one for the matrix
of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.common.errors import UserError
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.part_spec import LayerPartSpec, Side
from pipeline.train.model.tensor_names import ExpertFiles, PartTable, RowOrder, TensorNames, named

LAYER = "{i}"
"""Placeholder for the number of a layer in names."""
HEAD = "lm_head.weight"

Part = LayerPartSpec | type[LayerPartSpec]


@dataclass(frozen=True)
class TensorRule:
    """`theirs` is `ours`, one below the other, their rows in `order`, and transposed then if `transposed`."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    order: RowOrder | None = None
    part: Part | None = None
    """Spec that the order is computed from."""
    unit_dims: tuple[int, ...] = ()
    """Dimensions of theirs that have size 1 and that ours lacks, in ascending order."""
    experts: ExpertFiles | None = None
    """Ours have a dimension of experts before all others, and this is the rule of each expert."""
    expert: int | None = None
    """The one that `theirs` is of, in the rules of one model for experts that are numbered in names."""
    beside: bool = False
    """Ours are beside each other and not one below the other."""
    skipped: int = 0
    """Rows of theirs ahead of ours that no token reads; they are written as 0."""
    copy: bool = False
    """Files have ours a second time under this name. It may be missing, and must be the same where it is there."""


HEAD_RULE = TensorRule(HEAD, ("head.weight",))


@dataclass(frozen=True)
class Names:
    """Names of the tensors of a family. Rules whose tensors a model does not have are left out for it."""

    style: str
    """By which kinds of mixers and mlps say their own names within a layer, see `LayerPartSpec.huggingface`."""
    layer: str
    """Prefix of all names of a layer."""
    before: tuple[TensorRule, ...]
    """Tensors ahead of the layers."""
    norms: Mapping[str, str | tuple[str, ...]]
    """Norms of a layer: their names -> our modules within the layer, `mixer_norm` and `mlp_norm` for those before a
    part, `..._out_norm` for those on its output and `..._sum_norm` for those on the sum. Several where a layer has one
    of them."""
    after: tuple[TensorRule, ...]
    """Tensors of norm and head."""
    mtp: bool = False
    """Layers of multi-token prediction are after those of the model, with its embedding and head again, see
    `of_depth`."""
    norm_bias: bool = False
    transposed: bool = False
    """Matrices of layers."""
    tables: Mapping[type[LayerPartSpec], PartTable] = field(default_factory=dict)
    """Names within kinds of parts that differ from those of the style."""
    layers: tuple[Mapping[str, type[LayerPartSpec]], ...] = ({"mixer": AttentionSpec, "mlp": MlpSpec},)
    """Kinds of layers that the family has, for the docs."""

    sides: Mapping[Side, Names] = field(default_factory=dict)
    """For encoder-decoders: their names of the layers of each side, numbered from 0 on both sides."""
    encoder_norm: str | None = None
    """The norm after the encoder's last layer."""

    @property
    def head(self) -> str:
        """Their name of the head's weight."""
        return next(rule.theirs for rule in self.after if rule.ours == HEAD_RULE.ours)

    def rules(
        self,
        layers: Sequence[Mapping[str, LayerPartSpec]],
        mtp: Sequence[Mapping[str, LayerPartSpec]] = (),
        head: str = HEAD_RULE.ours[0],
        encoder: int = 0,
    ) -> list[TensorRule]:
        """Rules of a model in its order.

        Args:
            layers: the parts of each.
            encoder: number of those that are an encoder's.
            mtp: of layers of multi-token prediction, those of each depth.
            head: our parameter with the weight of the head.

        Raises:
            UserError: A kind of mixer or mlp has no names of this style.
        """
        if encoder:
            return [*self.before, *self._of_sides(layers, encoder), *self.after]
        found = [rule for index, parts in enumerate(layers) for rule in self.of_layer(str(index), parts)]
        for depth, parts in enumerate(mtp):
            found += self.of_depth(str(len(layers) + depth), str(depth), parts, head)
        return [*self.before, *found, *self.after]

    def _of_sides(self, layers: Sequence[Mapping[str, LayerPartSpec]], encoder: int) -> list[TensorRule]:
        """Rules of the layers of an encoder-decoder."""
        found = list[TensorRule]()
        for index, parts in enumerate(layers):
            names, first = (self.sides["encoder"], 0) if index < encoder else (self.sides["decoder"], encoder)
            found += names.of_layer(str(index - first), parts, f"layers.{index}.")
            if index == encoder - 1 and self.encoder_norm is not None:
                found.append(TensorRule(self.encoder_norm, (f"layers.{index}.encoder_norm.weight",)))
        return found

    def of_layer(self, index: str, parts: Mapping[str, Part], ours: str | None = None) -> list[TensorRule]:
        """Rules of a layer in the order of the model.

        Args:
            index: its number.
            parts: of the layer.
            ours: begins our names; by default those of this layer of the model.
        """
        before = f"layers.{index}." if ours is None else ours
        found = list[TensorRule]()
        for place, part in parts.items():
            found += self._norms(index, before, f"{place}_norm")
            for names in self._table(index, part):
                found += self._of_part(index, f"{before}{place}.", part, names)
            for kind in ("out_norm", "sum_norm"):
                found += self._norms(index, before, f"{place}_{kind}")
        return found

    def of_depth(
        self, index: str, depth: str, parts: Mapping[str, Part], head: str = HEAD_RULE.ours[0]
    ) -> list[TensorRule]:
        """Rules of a layer of multi-token prediction, see `rules`.

        Args:
            index: its number there, after the layers of the model.
            depth: its number here.
            parts: of its layer.
            head: our parameter with the weight of the head.
        """
        theirs, ours = self.layer.replace(LAYER, index), f"mtp.{depth}."
        (embedding,) = self.before[0].ours
        return [
            TensorRule(f"{theirs}embed_tokens.weight", (embedding,), copy=True),
            TensorRule(f"{theirs}enorm.weight", (f"{ours}embedding_norm.weight",)),
            TensorRule(f"{theirs}hnorm.weight", (f"{ours}stream_norm.weight",)),
            TensorRule(
                f"{theirs}eh_proj.weight", (f"{ours}of_embedding.weight", f"{ours}of_stream.weight"), beside=True
            ),
            *self.of_layer(index, parts, f"{ours}layer."),
            TensorRule(f"{theirs}shared_head.norm.weight", (f"{ours}norm.weight",)),
            TensorRule(f"{theirs}shared_head.head.weight", (head,), copy=True),
        ]

    def _table(self, index: str, part: Part) -> list[TensorNames]:
        own = self.tables.get(part if isinstance(part, type) else type(part))
        if own is not None:
            return self._of(part, own)
        if self.style not in part.huggingface:
            raise UserError(f"layer {index} has {part.label}: no family of Hugging Face models with it is known")
        return self._of(part, part.huggingface[self.style])

    @staticmethod
    def _of(part: Part, table: PartTable) -> list[TensorNames]:
        """Entries of a table that a part has; all for the docs."""
        every = named(table)
        return every if isinstance(part, type) else [each for each in every if each.where is None or each.where(part)]

    def _norms(self, index: str, before: str, module: str) -> list[TensorRule]:
        found = list[TensorRule]()
        for norm, ours in self.norms.items():
            if module in ((ours,) if isinstance(ours, str) else ours):
                theirs, name = self.layer.replace(LAYER, index) + norm, before + module
                found.append(TensorRule(f"{theirs}.weight", (f"{name}.weight",)))
                found += [TensorRule(f"{theirs}.bias", (f"{name}.bias",))] * self.norm_bias
        return found

    def _of_part(self, index: str, before: str, part: Part, names: TensorNames) -> list[TensorRule]:
        theirs = self.layer.replace(LAYER, index) + names.theirs
        ours = tuple(before + name for name in names.ours)

        def rule(kind: str, transposed: bool) -> TensorRule:
            named_so = tuple(name + kind for name in ours)
            unit_dims = () if kind == ".bias" else names.unit_dims
            return TensorRule(theirs + kind, named_so, transposed, names.order, part, unit_dims, names.experts)

        if names.of_parameters:
            return [rule("", names.transposed)]
        return [rule(".weight", self.transposed), rule(".bias", transposed=False)]
