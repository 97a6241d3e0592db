"""Families with gated delta rules as transformers has them, for `test_parity.py`."""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from tests.train.huggingface.parity import POSITIONS, Row

_SIZES = {
    **{"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"intermediate_size": 40, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-4},
    **{"tie_word_embeddings": False},
}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 17, "linear_value_head_dim": 14},
    "linear_conv_kernel_dim": 3,
}
_EXPERTS = {
    **{"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 20,
}
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_TYPES = ["full_attention", "linear_attention", "linear_attention"]
_OF_TRAINING = {"router_aux_loss_coef"}
_RATE = 1e-4
"""Learning rate: with a higher one rounding grows, as it does where queries and keys are divided by their lengths."""
_GAIN = 1.0
"""Of random matrices where experts follow, for the same reason: with 1.5, gradients of both sides in fp32 were up to
1e-4 from those in fp64."""
_INITIAL = {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
_KIMI = {
    **{key: value for key, value in _SIZES.items() if key != "max_position_embeddings"},
    **{"num_hidden_layers": 5, "num_key_value_heads": 6, "model_max_length": POSITIONS},
    **{"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 5, "v_head_dim": 9},
    **{"linear_head_dim": 14, "linear_num_heads": 3, "linear_conv_kernel_dim": 3},
    **{"num_experts": 12, "num_experts_per_token": 3, "moe_intermediate_size": 16, "num_shared_experts": 2},
}
# Written as they are in the published files: linear_attn_config.
_OTHERWISE = {"linear_attn_config"}


def _next(unlike: set[str] | None = None, **values: Any) -> Row:
    shape = {**_SIZES, **_LINEAR, **_EXPERTS, "head_dim": 8}
    unlike = _OF_TRAINING | (unlike or set())
    return Row(Qwen3NextConfig, {**shape, **values}, unlike, norm_offset=1.0, rate=_RATE, gain=_GAIN)


def _dense(**values: Any) -> Row:
    shape = {**_SIZES, **_LINEAR, "head_dim": 8}
    return Row(Qwen3_5TextConfig, {**shape, **values}, norm_offset=1.0, rate=_RATE)


def _moe(**values: Any) -> Row:
    shape = {**_SIZES, **_LINEAR, **_EXPERTS, "head_dim": 8}
    del shape["intermediate_size"]
    return Row(
        Qwen3_5MoeTextConfig,
        {**shape, **values},
        _OF_TRAINING,
        exported_as="qwen3_next",
        norm_offset=1.0,
        rate=_RATE,
        gain=_GAIN,
    )


def _olmo(**values: Any) -> Row:
    return Row(OlmoHybridConfig, {**_SIZES, **_LINEAR, **values}, _INITIAL, rate=_RATE)


def _kimi(**values: Any) -> Row:
    return Row(KimiLinearConfig, {**_KIMI, **values}, _OTHERWISE, rate=_RATE, gain=_GAIN)


ROWS = {
    "qwen3-next": _next(),
    "qwen3-next-some-dense": _next(
        {"decoder_sparse_step", "mlp_only_layers"},
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        norm_topk_prob=False,
        rope_parameters={**_ROPE, "partial_rotary_factor": 0.5},
        num_hidden_layers=3,
        layer_types=_TYPES,
    ),
    "qwen3.5": _dense(rope_parameters={**_ROPE, "partial_rotary_factor": 0.75}),
    "qwen3.5-tied": _dense(tie_word_embeddings=True, linear_num_value_heads=2, num_hidden_layers=3, layer_types=_TYPES),
    "qwen3.5-moe": _moe(),
    "olmo-hybrid": _olmo(rope_parameters={"rope_type": "default", "rope_theta": None}),
    "olmo-hybrid-rope": _olmo(
        rope_parameters=_ROPE,
        attention_bias=True,
        linear_allow_neg_eigval=False,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        layer_types=_TYPES,
    ),
    "kimi-linear": _kimi(),
    "kimi-linear-groups": _kimi(
        num_hidden_layers=4,
        linear_attn_config={
            **{"num_heads": 4, "head_dim": 15, "short_conv_kernel_size": 4},
            **{"kda_layers": [1, 2, 4], "full_attn_layers": [3]},
        },
        first_k_dense_replace=2,
        num_expert_group=4,
        topk_group=2,
        moe_renormalize=False,
        q_lora_rank=14,
        rms_norm_eps=1e-6,
    ),
}
