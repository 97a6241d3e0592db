"""Families with gated delta rules as transformers has them, for `test_parity`."""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3NextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from tests.train.huggingface import parity
from tests.train.huggingface.parity import Row

_LINEAR, _FULL = "linear_attention", "full_attention"
_SHAPE: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"intermediate_size": 44, "max_position_embeddings": parity.POSITIONS, "tie_word_embeddings": False},
}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 7, "linear_value_head_dim": 5},
    "linear_conv_kernel_dim": 3,
}
_QWEN = {**_SHAPE, **_DELTA, "head_dim": 16}
_EXPERTS = {
    **{"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
}
_KIMI = {
    **{key: value for key, value in _SHAPE.items() if key != "max_position_embeddings"},
    **{"num_hidden_layers": 5, "num_key_value_heads": 6, "model_max_length": parity.POSITIONS},
    **{"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9},
    **{"linear_head_dim": 8, "linear_num_heads": 3, "linear_conv_kernel_dim": 3},
    **{"num_local_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2},
}
# What only training reads, and the same in other words.
_OF_TRAINING = {"router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"}
_TOLERANCE = 5e-4
_RATE = 5e-5
# Of decays, which rounding of all that is behind them goes into.
_DELTAS: dict[str, Any] = {"norm_offset": 1.0, "tolerance": _TOLERANCE, "rate": 2e-4}
ROWS = {
    "qwen3.5": Row(
        Qwen3_5TextConfig,
        {**_QWEN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        **_DELTAS,
    ),
    "qwen3.5-tied": Row(
        Qwen3_5TextConfig,
        {**_QWEN, "num_hidden_layers": 3, "layer_types": [_FULL, _LINEAR, _LINEAR], "tie_word_embeddings": True},
        **_DELTAS,
    ),
    "qwen3-next": Row(
        Qwen3NextConfig, {**_QWEN, **_EXPERTS, "norm_topk_prob": False}, _OF_TRAINING, **(_DELTAS | {"rate": _RATE})
    ),
    "qwen3-next-some-dense": Row(
        Qwen3NextConfig,
        {**_QWEN, **_EXPERTS, "mlp_only_layers": [1, 3], "linear_num_key_heads": 3, "tie_word_embeddings": True},
        _OF_TRAINING,
        **(_DELTAS | {"rate": _RATE}),
    ),
    "qwen3.5-moe": Row(
        Qwen3_5MoeTextConfig,
        {key: value for key, value in {**_QWEN, **_EXPERTS}.items() if key != "intermediate_size"},
        _OF_TRAINING,
        exported_as="qwen3_next",
        **(_DELTAS | {"rate": _RATE}),
    ),
    # Equal sizes of queries, keys and values: transformers cuts the taps into thirds when it writes them.
    "olmo-hybrid": Row(
        OlmoHybridConfig,
        {**_SHAPE, **_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 7}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        rate=1e-4,
        falls=0.0,
    ),
    "olmo-hybrid-rope": Row(
        OlmoHybridConfig,
        {**_SHAPE, **_DELTA, "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_value_head_dim": 7}
        | {"linear_allow_neg_eigval": False, "attention_bias": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"num_hidden_layers": 3, "layer_types": [_LINEAR, _FULL, _FULL]},
    ),
    "kimi-linear": Row(KimiLinearConfig, _KIMI, _OF_TRAINING, tolerance=_TOLERANCE, rate=_RATE),
    "kimi-linear-groups": Row(
        KimiLinearConfig,
        {**_KIMI, "q_lora_rank": 14, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "num_hidden_layers": 3}
        | {"layer_types": [_LINEAR, _FULL, _LINEAR], "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"rms_norm_eps": 1e-6},
        _OF_TRAINING,
        tolerance=_TOLERANCE,
        rate=2e-5,
    ),
}
