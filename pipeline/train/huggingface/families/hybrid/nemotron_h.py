"""Nemotron-H: each layer is Mamba-2, attention without rope, or an mlp of relu squared."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.layers.mixers import MAX_LAYERS, Mamba2Config
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_hybrid import attention_of, hybrid, of_attention, some_recurrent
from pipeline.train.huggingface.config_kinds import by_layer
from pipeline.train.huggingface.config_mamba2 import (
    ATTENTION,
    HYBRID_NEEDS,
    MAMBA,
    TYPES,
    layer_with,
    needs_sizes,
    read_hybrid,
    read_sizes,
    sizes_of,
    write_sizes,
)
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.families.experts.deepseek import refuse_other_code
from pipeline.train.huggingface.families.hybrid.mamba2 import MAMBA2_NAMES
from pipeline.train.huggingface.family import Family, Need, anything, only
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.mamba2.spec import Mamba2Spec
from pipeline.train.model.mlps.dense.spec import MlpSpec, default_ffn_dim

_MLP = "mlp"
_TYPES = {**TYPES, _MLP: _MLP}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": _MLP, "E": "moe"}
"""Of `hybrid_override_pattern`."""
_KEYS = {
    **{"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state_dim": "ssm_state_size", "groups": "n_groups"},
    **{"conv_size": "conv_kernel", "conv_bias": "use_conv_bias"},
}
_LEAST_STEP = 0.001
"""What transformers takes for `time_step_min`, below which no step of time is in its layers."""
_OTHER_NAMES = {
    **{"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"},
    **{"ssm_state_size": "mamba_d_state", "time_step_min": "mamba_dt_min"},
    **{"head_dim": "attention_head_dim", "layer_norm_epsilon": "rms_norm_eps"},
}
"""Of keys in older files: transformers reads the first four as these keys, and not the others."""
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "n_group"),
    *("topk_group", "norm_topk_prob", "output_router_logits", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
_WITHOUT_EFFECT = (
    "max_position_embeddings",
    *("time_step_max", "time_step_floor", "time_step_rank", "mamba_dt_max", "mamba_dt_init_floor"),
    *("rescale_prenorm_residual", "residual_in_fp32", "hidden_dropout", "chunk_size", "mamba_chunk_size"),
    *("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    # The first are those of matrices, and the heads of these are said; attention has no rope.
    *("expand", "mamba_expand", "rope_theta", "partial_rotary_factor"),
    # Which transformers replaces by time_step_min and no upper bound.
    *("time_step_limit", "mamba_dt_limit"),
)
_OWN_CODE = ("configuration_nemotron_h", "modeling_nemotron_h")
"""Modules of the code that files speak of, which transformers does not need. It has no least step."""


def _read(source: ConfigSource) -> Json:
    names = _read_types(source)
    for key in ("use_bias", "mamba_proj_bias", "attention_bias", "tie_word_embeddings"):
        source.must_be(key, (False,), False)
    source.must_be("mlp_hidden_act", ("relu2",), "relu2")
    source.must_be("mamba_hidden_act", ("silu",), "silu")
    source.must_be("sliding_window", (None,), None)
    source.must_be("num_nextn_predict_layers", (0,), 0)
    for key in (*_OF_EXPERTS, *_WITHOUT_EFFECT):
        source.get(key)
    refuse_other_code(source, _OWN_CODE)
    found = {
        "layers": len(names),
        "dim": source.need_size("hidden_size"),
        "heads": source.size("num_attention_heads", 32),
        "kv_heads": source.size("num_key_value_heads", 8),
        "head_dim": source.size("head_dim", 128),
        "positions": "none",
        "norm": "rmsnorm",
        "norm_eps": source.number("layer_norm_epsilon", 1e-5),
        "mlp": "relu2",
        "ffn_dim": source.size("intermediate_size", 21504),
        "bias": "mlp" if source.flag("mlp_bias", False) else "none",
        "tie_embeddings": False,
        "vocab_size": source.need_size("vocab_size"),
    }
    sizes = {**read_sizes(source, _KEYS), "dt_min": source.number("time_step_min", _LEAST_STEP)}
    ours = {**sizes, "time_step_min": sizes["dt_min"], "layer_norm_epsilon": found["norm_eps"]}
    ours |= {theirs: sizes[key] for key, theirs in _KEYS.items()} | {"head_dim": found["head_dim"]}
    for key, other in _OTHER_NAMES.items():
        source.must_be(other, (ours[key],), ours[key])
    return read_hybrid(
        found, names, {MAMBA: {"mlp": "none"}, ATTENTION: {"mlp": "none"}, _MLP: {"mixer": "none"}}, sizes
    )


def _read_types(source: ConfigSource) -> list[str]:
    """The kind of each layer."""
    pattern = source.get("hybrid_override_pattern")
    if pattern is not None and (not isinstance(pattern, str) or set(pattern) - _LETTERS.keys()):
        source.refuse("hybrid_override_pattern", pattern, f"it must be a text of {' '.join(_LETTERS)}")
    listed = {key: source.get(key) for key in ("layers_block_type", "layer_types")}
    found = {key: types for key, types in listed.items() if types is not None}
    if pattern is not None:
        found["hybrid_override_pattern"] = [_LETTERS[letter] for letter in pattern]
    if not found:
        source.need("hybrid_override_pattern")
    first = next(iter(found))
    kinds = {}
    for key, types in found.items():
        if not isinstance(types, list) or not 1 <= len(types) <= MAX_LAYERS:
            source.refuse(key, types, f"it must have from 1 to {MAX_LAYERS} layers")
        if "moe" in types:
            source.refuse(key, "moe", "its experts have no gate, which experts here have")
        if unknown := [each for each in types if not isinstance(each, str) or each not in _TYPES]:
            source.refuse(key, unknown[0], f"only {' and '.join(_TYPES)} are supported")
        kinds[key] = [_TYPES[each] for each in types]
        if kinds[key] != kinds[first]:
            source.refuse(key, types, f"{first} differs from it; remove one of them")
    count = source.get("num_hidden_layers", len(kinds[first]))
    if count != len(kinds[first]):
        source.refuse("num_hidden_layers", count, f"{first} has {len(kinds[first])} layers")
    return kinds[first]


def _write(model: ModelConfig, positions: int) -> Json:
    attention, sizes = attention_of(model), sizes_of(model)
    letters = {"mamba2": "M", "attention": "*", "none": "-"}
    mlp = layer_with(model, "none")
    return {
        "hybrid_override_pattern": "".join(by_layer(model, lambda layer: letters[layer.mixer])),
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "head_dim": attention.head_size,
        "intermediate_size": mlp.ffn_dim or default_ffn_dim("relu2", model.dim),
        "max_position_embeddings": positions,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "layer_norm_epsilon": model.norm_eps,
        **write_sizes(sizes, _KEYS),
        "time_step_min": sizes.dt_min,
        "mlp_bias": model.bias == "mlp",
        **dict.fromkeys(("attention_bias", "use_bias", "mamba_proj_bias"), False),
    }


def _has_no_upper_bound(sizes: Mamba2Config, layer: ModelConfig) -> bool:
    return sizes.dt_max is None


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    title="Nemotron-H",
    what="layers of `mixer: mamba2` with any `dt_min`, of attention with `positions: none`, and of `mlp: relu2`, each "
    "alone; `bias: none` or `mlp`",
    read=_read,
    write=_write,
    needs={
        **HYBRID_NEEDS,
        "mixer": only("attention", "mamba2", "none"),
        "mamba2": needs_sizes(_has_no_upper_bound, "no dt_max"),
        "positions": of_attention(only("none")),
        "rope_theta": anything(),
        "mlp": Need(
            lambda mlp, layer: mlp in ("relu2", "none") and (mlp == "none") != (layer.mixer == "none"),
            "relu2 in layers without a mixer, and none in others",
        ),
        "bias": only("none", "mlp", has="no biases but of mlps"),
        "tie_embeddings": only(False),
    },
    special=some_recurrent,
    names=replace(
        MAMBA2_NAMES,
        tables={
            AttentionSpec: tuple((f"mixer.{name}_proj", (f"w{name}",)) for name in "qkvo"),
            MlpSpec: (("mixer.up_proj", ("w1",)), ("mixer.down_proj", ("w2",))),
        },
        layers=({"mixer": Mamba2Spec}, {"mixer": AttentionSpec}, {"mlp": MlpSpec}),
    ),
    prefix="backbone.",
    positions=("max_position_embeddings", 4096),
    pads=True,
    **hybrid("mamba2", "mlp", ffn_dim=lambda layer: layer.mlp),
)
