"""Mixtures of experts in a `config.json` of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_kinds import by_layer, read_kinds
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, Need, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NEEDS
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.part_spec import LayerPartSpec

DENSE, EXPERTS = "dense", "experts"
"""Our names of these kinds of layers."""
WITH_EXPERTS: tuple[Mapping[str, type[LayerPartSpec]], ...] = ({"mixer": AttentionSpec, "mlp": ExpertsSpec},)
"""See `Names.layers`."""
WITH_SOME_EXPERTS: tuple[Mapping[str, type[LayerPartSpec]], ...] = (
    *WITH_EXPERTS,
    {"mixer": AttentionSpec, "mlp": MlpSpec},
)


_DECIDE = ("mlp_layer_types", "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace")
"""Keys that decide which layers have experts, by family."""


def read_count(source: ConfigSource, *keys: str, default: int, least: int = 1) -> int:
    """Number of experts, or of something else, whose key has several names.

    Args:
        source: the file.
        keys: the names.
        default: what transformers takes where the file has none.
        least: that may be.
    """
    found = {key: value for key in keys if (value := source.get(key)) is not None}
    first = next(iter(found), None)
    for key, value in found.items():
        if first is not None and value != found[first]:
            source.refuse(key, value, f"{first} is {found[first]}; remove one of them")
    return default if first is None else source.count(first, default, least)


def read_experts(
    source: ConfigSource,
    found: Json,
    has: Sequence[bool],
    experts: Json,
    types: Sequence[str] | None = None,
    kinds: Mapping[str, Json] | None = None,
) -> Json:
    """Keys of `model:` of a model some of whose layers have experts.

    Args:
        source: the file.
        found: the keys that it would have without.
        has: for each layer whether it has experts.
        experts: `experts` of `model:`.
        types: of the layers, where they differ in other ways, too.
        kinds: by type the keys of its layers.
    """
    # A loss of training alone, and whether the forward pass computes it.
    source.number("router_aux_loss_coef"), source.get("output_router_logits")
    if not any(has):
        key = next((each for each in _DECIDE if source.get(each)), "num_hidden_layers")
        source.refuse(key, source.get(key), f"with it none of the {len(has)} layers has experts")
    names = [EXPERTS if each else DENSE for each in has]
    own: dict[str, Json] = {EXPERTS: {}, DENSE: {"mlp": "swiglu"}}
    if types is None or kinds is None:
        kinds = own
    elif all(has):
        names = list(types)
    else:
        kinds = {f"{kind}_{name}": {**kinds[kind], **own[name]} for kind, name in zip(types, names, strict=True)}
        names = [f"{kind}_{name}" for kind, name in zip(types, names, strict=True)]
    return {**found, "mlp": "experts", "experts": experts, **read_kinds(names, kinds)}


def read_sparse_layers(source: ConfigSource, layers: int) -> list[bool]:
    """Flags of the layers that have experts (Qwen)."""
    step, dense = source.count("decoder_sparse_step", 1, least=1), source.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        source.refuse("mlp_only_layers", dense, "it must be a list of numbers of layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(layers)]


def write_sparse_layers(model: ModelConfig) -> Json:
    """Write the keys that `read_sparse_layers` reads."""
    dense = [index for index, has in enumerate(has_experts(model)) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def has_experts(model: ModelConfig) -> list[bool]:
    """Flags of the layers that have experts."""
    return by_layer(model, _with_experts)


def experts_of(model: ModelConfig) -> ExpertsConfig:
    """Experts of the layers that have some."""
    found = next(layer.experts for layer in map(model.layer, model.layer_kinds) if _with_experts(layer))
    assert found is not None, "the section sees to it"
    return found


def dense_layer(model: ModelConfig) -> ModelConfig:
    """The section with the keys of the layers without experts; that of all where there is none."""
    return next((layer for layer in map(model.layer, model.layer_kinds) if not _with_experts(layer)), model)


def dense_ffn_dim(model: ModelConfig) -> int:
    """Hidden size of the mlps without experts."""
    layer = dense_layer(model)
    return layer.ffn_dim or default_ffn_dim(layer.mlp, layer.dim)


def needs_experts(free: Collection[str], **values: Any) -> dict[str, Need]:
    """Needs of a family with experts, see `Family.needs`.

    Args:
        free: keys of `experts` that may have any value.
        values: what other keys must have, in place of their defaults.
    """

    def fits(experts: ExpertsConfig | None, layer: ModelConfig) -> bool:
        if experts is None or not _with_experts(layer):
            return True
        wanted = {key: values.get(key, field.default) for key, field in ExpertsConfig.model_fields.items()}
        return all(key in free or getattr(experts, key) == value for key, value in wanted.items())

    others = ", ".join(f"{key} {value}" for key, value in values.items())
    has = f"experts with any {', '.join(sorted(free))}{', with ' + others if others else ''}, and defaults otherwise"
    return {**LLAMA_NEEDS, "mlp": only("swiglu", "experts"), "ffn_dim": anything(), "experts": Need(fits, has)}


def restricted(experts: Need, fits: Callable[[ExpertsConfig], bool], has: str) -> Need:
    """A need of `experts` with one more condition on layers that have some.

    Args:
        experts: the need without it.
        fits: the condition.
        has: words for it.
    """

    def fits_both(value: ExpertsConfig | None, layer: ModelConfig) -> bool:
        if value is None or not _with_experts(layer):
            return True
        return fits(value) and experts.fits(value, layer)

    return Need(fits_both, f"{experts.has}; {has}")


SIZES = ("count", "top_k", "ffn_dim")
"""Keys of `experts` that all families have."""
OF_SOME_LAYERS: Json = {
    "varies": frozenset({"mlp", "experts", "ffn_dim"}),
    "alike": {key: lambda layer: layer.mlp for key in ("experts", "ffn_dim")},
}
"""Fields of `Family` for one in which some layers may have no experts."""


def some_have_experts(layers: Sequence[ModelConfig]) -> bool:
    """True of the kinds of layers of a model with experts, see `Family.special`."""
    return any(map(_with_experts, layers))


def loss_hint(family: Family, values: Json, model: ModelConfig) -> str | None:
    """The balance loss that config.json has, as `train.balance.loss`; None where it has none."""
    has = has_experts(model)
    if not any(has):
        return None
    alpha = values.get("aux_loss_alpha")
    if isinstance(alpha, (int, float)) and alpha and values.get("seq_aux") and experts_of(model).score == "softmax":
        return f"aux_loss_alpha {alpha:g} of {family.title} is train.balance.loss: {alpha:g}"
    coefficient = values.get("router_aux_loss_coef")
    if not isinstance(coefficient, (int, float)) or not coefficient:
        return None
    # Theirs is a mean over layers and as large as top_k where experts are balanced; ours is a sum, of 1 in each.
    loss = coefficient * experts_of(model).top_k / sum(has)
    return f"router_aux_loss_coef {coefficient:g} of {family.title} is about train.balance.loss: {loss:.2g}"


def _with_experts(layer: LayerConfig) -> bool:
    return layer.mlp == "experts"
