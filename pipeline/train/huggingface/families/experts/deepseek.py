"""DeepSeek-V2 and V3 (with Kimi K2): latent attention, first layers without experts, shared ones beside the others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.layers.mixers import MAX_LAYERS, MlaConfig
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_experts import (
    OF_SOME_LAYERS,
    SIZES,
    dense_layer,
    experts_of,
    has_experts,
    needs_experts,
    read_count,
    read_experts,
    restricted,
)
from pipeline.train.huggingface.config_rope import read_rope
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.families.experts.glm4_moe import (
    dense_ones_first,
    needs_biased_experts,
    read_biased_experts,
    read_expert_sizes,
    with_shared_experts,
    write_biased_experts,
)
from pipeline.train.huggingface.family import Family, Need, only, where
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like
from pipeline.train.model.mixers.mla.spec import MlaSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is: in transformers and in the code that DeepSeek published."""
_OWN_CODE = ("configuration_deepseek", "modeling_deepseek")
"""Modules of that code, of which files speak; it computes what is computed here."""
_V3_NEXT = "num_nextn_predict_layers"


def _read_v2(source: ConfigSource) -> Json:
    source.must_be("mlp_bias", (False,), False)
    source.must_be("scoring_func", ("softmax",), "softmax")
    source.must_be("norm_topk_prob", (False,), False)  # which transformers does not read here
    method = source.get("topk_method", "greedy")
    source.must_be("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups, top_groups = source.size("n_group"), source.size("topk_group")
    experts = {
        **read_expert_sizes(source, count=64, ffn_dim=1407, shared=2),
        "top_k": source.need_size("num_experts_per_tok"),
        "score": "softmax",
        "normalize": False,
        "scale": source.number("routed_scaling_factor", 1.0),
    }
    if method == "group_limited_greedy" and (groups, top_groups) != (1, 1):
        experts |= {"groups": groups, "top_groups": top_groups, "group_score": "max"}
    return _read(source, experts, dense=source.size("first_k_dense_replace", 0, least=0))


def _read_v3(source: ConfigSource) -> Json:
    source.must_be("rope_interleave", (True,), True)
    source.must_be("scoring_func", ("sigmoid",), "sigmoid")
    source.must_be("topk_method", ("noaux_tc",), "noaux_tc")
    sizes = read_expert_sizes(source, count=256, ffn_dim=2048, shared=1)
    experts = read_biased_experts(source, sizes, scale=2.5, groups=8, top_groups=4)
    found = _read(source, experts, dense=source.size("first_k_dense_replace", 3, least=0), kv_heads=128)
    depth = read_count(source, _V3_NEXT, "num_mtp_layers", default=1, least=0)
    return found | ({"mtp": {"depth": depth}} if depth else {})


def _read(source: ConfigSource, experts: Json, *, dense: int, kv_heads: int | None = None) -> Json:
    """Keys that both have.

    Args:
        source: the file.
        experts: `experts` of `model:`.
        dense: number of layers without.
        kv_heads: what transformers takes where the file has none.
    """
    found = read_llama_like(source, rope=read_rope(source, mscale=True), kv_heads=kv_heads)
    heads, of_keys = found["heads"], found.pop("kv_heads")
    if of_keys != heads:
        source.refuse("num_key_value_heads", of_keys, f"latent attention has as many as num_attention_heads ({heads})")
    source.must_be("attention_bias", (False,), False)
    source.must_be("moe_layer_freq", (1,), 1)
    source.number("aux_loss_alpha"), source.get("seq_aux"), source.get("ep_size")  # of training
    del found["head_dim"]  # transformers computes it, and qk_head_dim, from the sizes below
    source.get("qk_head_dim")
    refuse_other_code(source, _OWN_CODE)
    found |= {"mixer": "mla", "mla": read_latent(source, found["norm_eps"], q_rank=1536)}
    if not isinstance(dense, int) or not 0 <= dense <= MAX_LAYERS:
        source.refuse("first_k_dense_replace", dense, f"it must be a whole number from 0 to {MAX_LAYERS}")
    return read_experts(source, found, [index >= dense for index in range(found["layers"])], experts)


def refuse_other_code(source: ConfigSource, known: Collection[str]) -> None:
    """Refuse a model with code of its own in other modules than those known to compute the same."""
    modules = source.get("auto_map", {})
    for name in modules.values() if isinstance(modules, dict) else [modules]:
        if str(name).split(".")[0] not in known:
            source.refuse("auto_map", name, "the model needs its own code, and code that comes with weights is not run")


def read_latent(source: ConfigSource, norm_eps: float, *, q_rank: int | None) -> Json:
    """`mla` of `model:`.

    Args:
        source: the file.
        norm_eps: of the other norms.
        q_rank: what transformers takes where the key is not there.
    """
    return {
        "kv_rank": source.size("kv_lora_rank", 512),
        "q_rank": source.size_or_null("q_lora_rank", q_rank),  # null means one matrix
        "nope_dim": source.size("qk_nope_head_dim", 128),
        "rope_dim": source.size("qk_rope_head_dim", 64),
        "value_dim": source.size("v_head_dim", 128),
        **({} if norm_eps == LATENT_EPS else {"norm_eps": LATENT_EPS}),
    }


def write_latent(mla: MlaConfig) -> Json:
    """Write the keys that `read_latent` reads."""
    return {
        "head_dim": mla.rope_dim,
        "kv_lora_rank": mla.kv_rank,
        "q_lora_rank": mla.q_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "attention_bias": False,
    }


def _write_v2(model: ModelConfig, positions: int) -> Json:
    grouped = experts_of(model).groups is not None
    return _write(model, positions) | {
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "scoring_func": "softmax",
        "mlp_bias": False,
    }


def _write_v3(model: ModelConfig, positions: int) -> Json:
    return _write(model, positions) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        _V3_NEXT: 0 if model.mtp is None else model.mtp.depth,
    }


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(dense_layer(model), positions) | {
        **write_biased_experts(experts_of(model)),
        "first_k_dense_replace": has_experts(model).index(True),
        "moe_layer_freq": 1,
        **write_latent(_latent(model)),
    }


def _latent(model: ModelConfig) -> MlaConfig:
    mla = model.layer(model.layer_kinds[0]).mla
    assert mla is not None, "the family needs it"
    return mla


def fits_latent(layer: ModelConfig) -> bool:
    """True if the norms of latents have the epsilon of files."""
    return layer.mla is None or (layer.mla.norm_eps or layer.norm_eps) == LATENT_EPS


def _heads_divide(layer: ModelConfig) -> bool:
    return layer.dim % layer.query_heads == 0


def _fits_scaling(layer: ModelConfig) -> bool:
    scaling = layer.rope_scaling
    if scaling is None or (scaling.mscale, scaling.mscale_all_dim) == (1.0, 0.0):
        return True
    return scaling.mscale > 0 and scaling.mscale_all_dim > 0


def _v2_experts() -> Need:
    free = {*SIZES, "scale", "groups", "top_groups", "group_score", "shared_ffn_dim"}
    others = with_shared_experts(needs_experts(free, normalize=False)["experts"])
    return restricted(others, _has_max_score, "group_score is max")


def _has_max_score(experts: ExpertsConfig) -> bool:
    return experts.groups is None or experts.group_score == "max"


def _needs(experts: Need) -> dict[str, Need]:
    return {
        **needs_experts(()),
        "experts": experts,
        "mixer": only("mla"),
        "mla": where(fits_latent, "1e-6 in the norms of latents (norm_eps, or mla.norm_eps beside another)"),
        "rope_scaling": where(_fits_scaling, "mscale and mscale_all_dim together, or neither"),
    }


_LAYERS: tuple[dict[str, type], ...] = (
    {"mixer": MlaSpec, "mlp": ExpertsSpec},
    {"mixer": MlaSpec, "mlp": MlpSpec},
)
_WHAT = "`mixer: mla`, perhaps YaRN with `mscale` and `mscale_all_dim`; `mlp: experts` in all layers but the first ones"

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    title="DeepSeek-V2",
    what=f"{_WHAT}, with `shared_ffn_dim`, `normalize: false`, any `scale`, and `groups` with `group_score: max` or "
    "none",
    read=_read_v2,
    write=_write_v2,
    mark="mixer",
    needs={**_needs(_v2_experts()), "heads": where(_heads_divide, "heads that divide dim")},
    order=dense_ones_first,
    names=replace(LLAMA_NAMES, layers=_LAYERS),
    positions=("max_position_embeddings", 2048),
    **OF_SOME_LAYERS,
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek-V3",
    what=f"{_WHAT}, with `score: sigmoid`, `score_bias`, `shared_ffn_dim`, any `groups`, `scale` and `normalize`; "
    "`mtp`. Kimi K2 (`kimi_k2`) is read as one",
    read=_read_v3,
    write=_write_v3,
    mark="mixer",
    needs=_needs(needs_biased_experts()["experts"]),
    order=dense_ones_first,
    names=replace(LLAMA_NAMES, layers=_LAYERS, mtp=True),
    extra_layers=True,
    positions=("max_position_embeddings", 4096),
    **OF_SOME_LAYERS,
)
