"""Tensors of Hugging Face's model families and of ours: one table per family, read in both directions.

Every rule has the same form. A tensor of theirs is one of ours, or several of ours below each other, and GPT-2 has its
matrices the other way round ([in, out], as `Conv1D` multiplies). Nothing is permuted: the order of the rotary pairs is
the same (see `pipeline.train.model.rope`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.common.format import shape_text
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.meta import on_meta
from pipeline.train.model.part_spec import LayerPartSpec

Shape = tuple[int, ...]

LAYER = "{i}"
"""Stands for the number of a layer in names."""
HEAD = "lm_head.weight"
_VOCABULARY = ("embedding.weight", "head.weight")
"""Tensors with a row a token; theirs have no rows of padding."""


@dataclass(frozen=True)
class TensorRule:
    """`theirs` is `ours`, one below the other, and transposed then if `transposed`."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """Names of tensors that several families share."""

    style: str
    """By which kinds of mixers and mlps say their own names within a layer, see `LayerPartSpec.huggingface`."""
    layer: str
    """Before all names of a layer."""
    before: tuple[TensorRule, ...]
    """Tensors ahead of the layers."""
    norms: Mapping[str, str]
    """Norms of a layer: their names, and the part that ours is before."""
    behind: tuple[TensorRule, ...]
    """Tensors of norm and head."""
    norm_bias: bool = False
    transposed: bool = False
    """Matrices of layers."""

    def rules(self, layers: Sequence[Mapping[str, LayerPartSpec]]) -> list[TensorRule]:
        """Rules of a model in its order, given the parts of its layers.

        Raises:
            UserError: A kind of mixer or mlp has no names of this style.
        """
        of_layers = [rule for index, parts in enumerate(layers) for rule in self.of_layer(str(index), parts)]
        return [*self.before, *of_layers, *self.behind]

    def of_layer(self, index: str, parts: Mapping[str, LayerPartSpec | type[LayerPartSpec]]) -> list[TensorRule]:
        """Rules of a layer with this number, in the order of the model."""
        theirs, found = self.layer.replace(LAYER, index), list[TensorRule]()
        for norm, place in self.norms.items():
            found += _parameters(theirs + norm, (f"layers.{index}.{place}_norm",), False, self.norm_bias)
            part = parts[place]
            if self.style not in part.huggingface:
                raise UserError(f"layer {index} has {part.label}: no family of Hugging Face models with it is known")
            for their, ours in part.huggingface[self.style]:
                names = tuple(f"layers.{index}.{place}.{name}" for name in ours)
                if "." in ours[0]:
                    found.append(TensorRule(theirs + their, names))
                else:
                    found += _parameters(theirs + their, names, self.transposed)
        return found


def _parameters(theirs: str, ours: tuple[str, ...], transposed: bool, bias: bool = True) -> list[TensorRule]:
    """Rules of the weights of modules, and of their biases."""
    weight = TensorRule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)
    return [weight, *[TensorRule(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))] * bias]


_HEAD = TensorRule(HEAD, ("head.weight",))
_LLAMA_LIKE = Names(
    "llama",
    "model.layers.{i}.",
    (TensorRule("model.embed_tokens.weight", ("embedding.weight",)),),
    {"input_layernorm": "mixer", "post_attention_layernorm": "mlp"},
    (TensorRule("model.norm.weight", ("norm.weight",)), _HEAD),
)
_GPT2 = Names(
    "gpt2",
    "transformer.h.{i}.",
    (
        TensorRule("transformer.wte.weight", ("embedding.weight",)),
        TensorRule("transformer.wpe.weight", ("position_embedding.weight",)),
    ),
    {"ln_1": "mixer", "ln_2": "mlp"},
    (*_parameters("transformer.ln_f", ("norm",), False), _HEAD),
    norm_bias=True,
    transposed=True,
)


@dataclass(frozen=True)
class Family:
    """A family of models in transformers."""

    model_type: str
    """As `config.json` has it."""
    architecture: str
    """Name of its class with a language-model head."""
    names: Names
    ignored: tuple[str, ...] = ()
    """Patterns of names of buffers that files of old versions have, and that are computed today."""
    prefix: str = ""
    """Files of the model without its head lack it in their names."""
    what: str = ""
    """Description of it by the keys of `model:`."""


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            *("gpt2", "GPT2LMHeadModel", _GPT2, (r"h\.\d+\.attn\.(masked_)?bias",), "transformer."),
            "`positions: learned`, `norm: layernorm`, `mlp: gelu`, `bias: all`",
        ),
        Family(
            *("llama", "LlamaForCausalLM", _LLAMA_LIKE, (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",), "model."),
            "`bias: none` or `all`",
        ),
        Family("mistral", "MistralForCausalLM", _LLAMA_LIKE, (), "model.", "`sliding_window`"),
        Family("qwen2", "Qwen2ForCausalLM", _LLAMA_LIKE, (), "model.", "`bias: qkv`, `sliding_window` or none"),
        Family("qwen3", "Qwen3ForCausalLM", _LLAMA_LIKE, (), "model.", "`qk_norm`, `sliding_window` or none"),
    )
}


@dataclass(frozen=True)
class TensorSlice:
    """The rows of one of their tensors that are one of ours."""

    theirs: str
    first: int
    """Its first row there, after transposing back."""
    rows: int
    """Its rows there; the rest of ours is padding of the vocabulary."""
    transposed: bool

    def cut(self, rows: slice, *others: slice) -> tuple[slice, ...] | None:
        """The piece of theirs that has these rows and columns of ours; None if all of its rows are padding."""
        start, stop = min(rows.start, self.rows), min(rows.stop, self.rows)
        if stop <= start:
            return None
        found = (slice(self.first + start, self.first + stop), *others)
        return found[::-1] if self.transposed else found


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
        return (value.t() if rule.transposed else value).contiguous()

    def to_ours(self, name: str, theirs: Tensor) -> Tensor:
        """A tensor of ours from the one of theirs that has it; padding of the vocabulary is 0."""
        part, shape = self.ours[name], self.our_shapes[name]
        value = (theirs.t() if part.transposed else theirs)[part.first : part.first + part.rows]
        if part.rows == shape[0]:
            return value.contiguous()
        padded = value.new_zeros(shape)
        padded[: part.rows] = value
        return padded


def map_tensors(family: Family, spec: DecoderSpec) -> TensorMapping:
    """The rules of a family with the names and shapes of one model."""
    with on_meta():
        our_shapes = {name: tuple(value.shape) for name, value in Decoder(spec).named_parameters()}
    theirs: dict[str, TensorRule] = {}
    their_shapes: dict[str, Shape] = {}
    ours: dict[str, TensorSlice] = {}
    for rule in family.names.rules([layer.parts for layer in spec.layers]):
        found = [name for name in rule.ours if name in our_shapes]
        if not found:
            continue  # a bias or norm that this model does not have
        assert len(found) == len(rule.ours), rule
        rows = [spec.vocab_size if name in _VOCABULARY else our_shapes[name][0] for name in rule.ours]
        for name, (first, stop) in zip(rule.ours, pairwise(accumulate(rows, initial=0)), strict=True):
            ours[name] = TensorSlice(rule.theirs, first, stop - first, rule.transposed)
        shape = (sum(rows), *our_shapes[rule.ours[0]][1:])
        theirs[rule.theirs] = rule
        their_shapes[rule.theirs] = shape[::-1] if rule.transposed else shape
    missing = our_shapes.keys() - ours.keys()
    assert not missing, f"{family.model_type} has no place for {sorted(missing)}"
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
    if HEAD not in mapping.theirs:
        rest = [name for name in rest if name != HEAD]  # a copy of the embedding
    if rest:
        raise UserError(
            f"{folder} has {len(rest)} tensors that a {family.model_type} with this config.json does not have, "
            f"such as {rest[0]}; it cannot be converted without loss"
        )
    return names


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name.removeprefix(family.prefix)) for pattern in family.ignored)
