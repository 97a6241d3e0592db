"""Families with Mamba-2 as transformers has them, for `test_parity.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import BambaConfig, GraniteMoeHybridConfig, Mamba2Config, NemotronHConfig, PretrainedConfig

from tests.train.huggingface.parity import POSITIONS, Row

_SIZES = {"hidden_size": 24, "tie_word_embeddings": False}
_ALONE = {
    **_SIZES,
    **{"num_hidden_layers": 3, "num_heads": 6, "head_dim": 8, "state_size": 10, "n_groups": 2, "conv_kernel": 4},
    **{"layer_norm_epsilon": 1e-4, "chunk_size": 16},
}
_ATTENTION = {
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS},
    **{"intermediate_size": 40},
}
_HYBRID = {
    **_SIZES,
    **_ATTENTION,
    **{"num_hidden_layers": 4, "rms_norm_eps": 1e-4, "mamba_n_heads": 6, "mamba_d_state": 10, "mamba_chunk_size": 16},
}
_NEMOTRON = {
    **_SIZES,
    **_ATTENTION,
    **{"head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 10, "n_groups": 2},
    **{"layer_norm_epsilon": 1e-4, "chunk_size": 16},
}
_IN_PORTIONS = {"chunk_size", "mamba_chunk_size"}
_OF_TRAINING = {"router_aux_loss_coef", "z_loss_coefficient"}
_SHARED = {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.15}
_FACTORS = {**_SHARED, "logits_scaling": 0.7}


def _row(config: type[PretrainedConfig], values: dict[str, Any], unlike: set[str]) -> Row:
    """Weights are smaller than elsewhere: a state is a product of three of them, and rounding grows with each layer."""
    least = values.get("time_step_min", 0) > 0.001
    return Row(config, values, _IN_PORTIONS | unlike, gain=0.7, limited=least or "time_step_limit" in values)


def _alone(**values: Any) -> Row:
    return _row(Mamba2Config, {**_ALONE, **values}, set())


def _bamba(**values: Any) -> Row:
    return _row(BambaConfig, {**_HYBRID, "attn_layer_indices": [1], **values}, _OF_TRAINING)


def _granite(**values: Any) -> Row:
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
    values = {**_HYBRID, **_FACTORS, **kinds, "shared_intermediate_size": 36, **values}
    unlike = _OF_TRAINING if values["num_local_experts"] else _OF_TRAINING | {"intermediate_size"}  # which is not used
    return _row(GraniteMoeHybridConfig, values, unlike)


def _nemotron(types: str, **values: Any) -> Row:
    row = _row(NemotronHConfig, {**_NEMOTRON, "hybrid_override_pattern": types, **values}, set())
    # With a higher rate rounding grows: a bound cuts the slope of many steps of time.
    return replace(row, rate=5e-4) if row.limited else row


ROWS = {
    "mamba2": _alone(),
    "mamba2-tied-limits": _alone(
        tie_word_embeddings=True, use_conv_bias=False, conv_kernel=3, time_step_limit=[0.5, 0.9], n_groups=3
    ),
    "mamba2-one-limit": _alone(time_step_limit=[0.6, float("inf")], n_groups=1),
    "bamba": _bamba(),
    "bamba-biases-groups": _bamba(
        mamba_n_groups=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, mamba_conv_bias=False
    ),
    "bamba-share-limits": _bamba(
        attn_layer_indices=[0, 3],
        head_dim=8,
        time_step_limit=[0.4, 1.0],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    "granite-hybrid": _granite(num_local_experts=0, position_embedding_type="nope", num_experts_per_tok=0),
    "granite-hybrid-rope-biases": _granite(
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        attention_bias=True,
        mamba_n_groups=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "granite-hybrid-experts": _granite(num_local_experts=12, num_experts_per_tok=3, position_embedding_type="nope"),
    "nemotron-h": _nemotron("M-M*-M-"),
    "nemotron-h-limit-biases": _nemotron("*-MM-", time_step_min=0.6, mlp_bias=True, n_groups=3, use_conv_bias=False),
}
