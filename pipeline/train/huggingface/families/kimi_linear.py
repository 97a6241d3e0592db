"""Kimi Linear: Kimi delta attention in three layers of four, latent attention without positions in the others."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.mixers import MAX_LAYERS
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_delta import (
    LINEAR,
    OF_HYBRID,
    attention_layer,
    delta_of,
    is_hybrid,
    kinds_of,
    of_attention,
    of_recurrence,
    types_of,
)
from pipeline.train.huggingface.config_experts import (
    dense_layer,
    experts_of,
    has_experts,
    read_count,
    read_experts,
    some_have_experts,
)
from pipeline.train.huggingface.config_kinds import layer_types, read_kinds
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL
from pipeline.train.huggingface.families.glm4_moe import needs_biased_experts, write_biased_experts
from pipeline.train.huggingface.family import Family, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like
from pipeline.train.model.mixers.delta.spec import KdaSpec
from pipeline.train.model.mixers.mla.spec import MlaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import TensorNames

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is."""
_OWN_CODE = ("configuration_kimi", "modeling_kimi")
"""Modules of the code that was published with the weights, of which files speak; it computes what is computed here."""
_SUBSECTION = "linear_attn_config"


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=32, eps=1e-5, rope={"positions": "none"})
    source.get("model_max_length")
    for unused in ("rope_theta", "rope_scaling", "rope_parameters"):  # no layer is turned
        source.get(unused)
    heads, of_keys = found["heads"], found.pop("kv_heads")
    if of_keys != heads:
        source.refuse("num_key_value_heads", of_keys, f"latent attention has as many as num_attention_heads ({heads})")
    del found["head_dim"]  # transformers computes it, and qk_head_dim, from the sizes below
    source.get("qk_head_dim")
    source.must_be("tie_word_embeddings", (False,), False)  # the head is one of its own whatever the file says
    source.must_be("attention_bias", (False,), False)
    source.must_be("mla_use_nope", (True,), True)
    source.must_be("moe_layer_freq", (1,), 1)
    source.must_be("moe_router_activation_func", ("sigmoid",), "sigmoid")
    source.must_be("topk_method", ("noaux_tc",), "noaux_tc")
    source.get("use_grouped_topk")  # of one group it is no choice; the number of groups says the rest
    for name in dict(source.get("auto_map") or {}).values():
        if str(name).split(".")[0] not in _OWN_CODE:
            source.refuse("auto_map", name, "the model needs its own code, and code that comes with weights is not run")
    types, sizes = _read_linear(source, found["layers"])
    rank = source.get("q_lora_rank")
    found |= {
        "mla": {
            "kv_rank": source.get("kv_lora_rank", 512),
            "q_rank": rank,
            "nope_dim": source.get("qk_nope_head_dim", 128),
            "rope_dim": source.get("qk_rope_head_dim", 64),
            "value_dim": source.get("v_head_dim", 128),
            **({} if found["norm_eps"] == _LATENT_EPS else {"norm_eps": _LATENT_EPS}),
        },
        "delta": sizes,
    }
    has = _read_sparse(source, found["layers"])
    names, kinds = kinds_of(types, has, {LINEAR: {"mixer": "kda"}, FULL: {"mixer": "mla"}})
    return {**read_experts(source, found, has, _read_mixture(source)), **read_kinds(names, kinds)}


def _read_linear(source: ConfigSource, layers: int) -> tuple[list[str], Json]:
    """The type of each layer, and `delta` of `model:`."""
    section = source.get(_SUBSECTION, {})
    known = {"head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}
    if not isinstance(section, dict) or not section.keys() <= known:
        source.refuse(_SUBSECTION, section, f"it must have {', '.join(sorted(known))} alone")
    sizes = {
        ours: section.get(inner, source.count(outer, default, least=1))
        for ours, inner, outer, default in (
            ("key_heads", "num_heads", "linear_num_heads", 32),
            ("key_dim", "head_dim", "linear_head_dim", 128),
            ("conv_size", "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    }
    full, linear = section.get("full_attn_layers"), section.get("kda_layers")
    if full is None or linear is None:
        types = layer_types(source, layers, (LINEAR, FULL), lambda index: FULL if index and index % 4 == 0 else LINEAR)
    else:
        if not isinstance(full, list) or not isinstance(linear, list):
            source.refuse(_SUBSECTION, section, "full_attn_layers and kda_layers must be lists of numbers of layers")
        numbers = list(range(1, layers + 1))
        if sorted([*full, *linear]) != numbers:
            source.refuse(_SUBSECTION, section, f"its lists must have each number from 1 to {layers} once")
        types = [FULL if number in full else LINEAR for number in numbers]
        if source.get("layer_types") not in (None, types):
            source.refuse("layer_types", source.get("layer_types"), f"{_SUBSECTION} says otherwise; remove one of them")
    if len(set(types)) == 1:
        source.refuse("layer_types", types[0], f"models with both {LINEAR} and {FULL} are supported")
    return types, {**sizes, "value_dim": sizes["key_dim"]}


def _read_sparse(source: ConfigSource, layers: int) -> list[bool]:
    """For each layer whether it has experts."""
    types, first = source.get("mlp_layer_types"), source.count("first_k_dense_replace", 1)
    if types is None:
        return [index >= min(first, MAX_LAYERS) for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {"dense", "sparse"}:
        source.refuse("mlp_layer_types", types, f"it must be a list of {layers} times dense or sparse")
    return [kind == "sparse" for kind in types]


def _read_mixture(source: ConfigSource) -> Json:
    """Keys of `experts`."""
    size = source.count("moe_intermediate_size", 1024, least=1)
    groups = read_count(source, "num_expert_group", "n_group", default=1)
    top_groups = source.count("topk_group", 1, least=1)
    if groups == 1 and top_groups != 1:
        source.refuse("topk_group", top_groups, "there is one group")
    return {
        "count": read_count(source, "num_experts", "num_local_experts", default=256),
        "ffn_dim": size,
        "shared_ffn_dim": size * read_count(source, "num_shared_experts", "n_shared_experts", default=1),
        "top_k": read_count(source, "num_experts_per_token", "num_experts_per_tok", default=8),
        "score": "sigmoid",
        "score_bias": True,
        "normalize": source.get("moe_renormalize", source.get("norm_topk_prob", True)),
        "scale": source.get("routed_scaling_factor", 2.446),
        **({} if groups == 1 else {"groups": groups, "top_groups": top_groups}),
    }


def _write(model: ModelConfig, positions: int) -> Json:
    mla, delta = attention_layer(model).mla, delta_of(model)
    assert mla is not None
    found = write_llama_like(dense_layer(model), positions)
    for key in ("rope_theta", "rope_scaling", "max_position_embeddings"):
        del found[key]
    written = {
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
    }
    return found | {
        **{written.get(key, key): value for key, value in write_biased_experts(experts_of(model)).items()},
        "model_max_length": positions,
        "num_key_value_heads": attention_layer(model).heads,
        "num_attention_heads": attention_layer(model).heads,
        "head_dim": mla.rope_dim,
        "kv_lora_rank": mla.kv_rank,
        "q_lora_rank": mla.q_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "attention_bias": False,
        "linear_num_heads": delta.key_heads,
        "linear_head_dim": delta.key_dim,
        "linear_conv_kernel_dim": delta.conv_size,
        "layer_types": types_of(model),
        "mlp_layer_types": ["sparse" if each else "dense" for each in has_experts(model)],
    }


def _fits_latent(layer: ModelConfig) -> bool:
    return layer.mla is None or (layer.mla.norm_eps or layer.norm_eps) == _LATENT_EPS


def _fits_delta(layer: ModelConfig) -> bool:
    delta = layer.delta
    if delta is None:
        return True
    square = delta.key_dim == delta.value_dim == (delta.rank or delta.value_dim)
    return square and delta.beta_max == 1 and (delta.norm_eps or layer.norm_eps) == layer.norm_eps


def _names(mlp: str) -> tuple[TensorNames, ...]:
    return (
        TensorNames(f"{mlp}.gate.weight", ("router.weight",)),
        TensorNames(f"{mlp}.gate.e_score_correction_bias", ("router.score_bias",)),
        *(
            TensorNames(f"{mlp}.experts.{{e}}.{name}.weight", (f"experts.{name}",), experts="numbered")
            for name in ("w1", "w3", "w2")
        ),
        *(
            TensorNames(f"{mlp}.shared_experts.{theirs}.weight", (f"shared.{ours}.weight",))
            for theirs, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        ),
    )


_NEEDS = needs_biased_experts()
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    title="Kimi Linear",
    what="`mixer: kda` in some layers and `mixer: mla` in the others, `positions: none`; `mlp: experts` in all layers "
    "or some, with `score: sigmoid`, `score_bias`, `shared_ffn_dim`, any `groups`, `scale` and `normalize`",
    read=_read,
    write=_write,
    mark="mixer",
    needs={
        **_NEEDS,
        "mixer": only("mla", "kda"),
        "positions": only("none"),
        "tie_embeddings": only(False),
        "mla": of_attention(where(_fits_latent, "1e-6 in the norms of latents (norm_eps, or mla.norm_eps)")),
        "delta": of_recurrence(
            where(_fits_delta, "delta with key_dim, value_dim and rank equal, beta_max 1, the norm_eps of the model")
        ),
    },
    special=lambda layers: is_hybrid(layers) and some_have_experts(layers),
    names=replace(
        LLAMA_NAMES,
        tables={
            KdaSpec: (
                *((f"self_attn.{name}_proj", (f"w{name}",)) for name in "qkvb"),
                *(
                    TensorNames(f"self_attn.{name}_conv1d.weight", (f"conv_{name}.weight",), unit_dim=True)
                    for name in "qkv"
                ),
                ("self_attn.f_a_proj", ("waa",)),
                ("self_attn.f_b_proj", ("wab",)),
                ("self_attn.g_a_proj", ("wza",)),
                ("self_attn.g_b_proj", ("wzb",)),
                TensorNames("self_attn.A_log", ("decay.a_log",), unit_dim=True, leading=2),
                ("self_attn.dt_bias", ("decay.dt_bias",)),
                ("self_attn.o_norm.weight", ("norm.weight",)),
                ("self_attn.o_proj", ("wo",)),
            ),
            ExpertsSpec: _names("block_sparse_moe"),
        },
        layers=tuple({"mixer": mixer, "mlp": mlp} for mixer in (KdaSpec, MlaSpec) for mlp in (ExpertsSpec, MlpSpec)),
    ),
    # transformers writes all mlps under one name.
    also=((r"(layers\.\d+)\.block_sparse_moe\.", r"\1.mlp."),),
    positions=("model_max_length", 1048576),
    pads=True,
    **OF_HYBRID,
)
