"""Models with gated delta rules in Hugging Face's files: published configs, refusals, and other names of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.huggingface.convert import describe
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import num_parameters
from tests.train.huggingface import parity
from tests.train.huggingface.delta_rows import ROWS

_SHARED = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        **{**_SHARED, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936},
        **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2},
        **{"head_dim": 256, "intermediate_size": 5120, "full_attention_interval": 4, "attention_bias": False},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
        **{"shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001, "output_router_logits": False},
        **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 10000000, "rope_scaling": None},
        **{"partial_rotary_factor": 0.25, "tie_word_embeddings": False, "use_sliding_window": False},
    },
    "Olmo-Hybrid-7B": {
        **{**_SHARED, "model_type": "olmo_hybrid", "architectures": ["OlmoHybridForCausalLM"], "vocab_size": 100352},
        **{"hidden_size": 3840, "num_hidden_layers": 32, "num_attention_heads": 30, "num_key_value_heads": 30},
        **{"intermediate_size": 11008, "linear_num_key_heads": 30, "linear_num_value_heads": 30},
        **{"linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4},
        **{"linear_allow_neg_eigval": True, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6},
        **{"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": False},
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    },
    "Kimi-Linear-48B-A3B": {
        **{**_SHARED, "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840},
        "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
        **{"hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"head_dim": 72, "intermediate_size": 9216, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        "linear_attn_config": {
            **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        },
        **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "mla_use_nope": True, "model_max_length": 1048576, "rms_norm_eps": 1e-5},
        **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024},
        **{"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446},
        **{"num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "num_nextn_predict_layers": 0},
        **{"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False},
    },
}
BILLIONS = {"Qwen3-Next-80B-A3B": 79.67, "Olmo-Hybrid-7B": 7.43, "Kimi-Linear-48B-A3B": 49.12}
"""Parameters without layers for tokens further ahead."""


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs(name: str) -> None:
    """The section, and again from what is written of it."""
    values = CONFIGS[name]
    family, found = from_hf_config(values, "config.json")
    assert not family.misfits(found)
    spec = decoder_spec(found, values["vocab_size"], 4096)
    assert num_parameters(spec) / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)
    written_family, written = to_hf_config(found, values["vocab_size"], 65536)
    assert written_family is family
    assert decoder_spec(from_hf_config(written, "config.json")[1], values["vocab_size"], 4096) == spec


def config_of(name: str, **more: Any) -> dict[str, Any]:
    row = ROWS[name]
    return {**row.config(**{"vocab_size": parity.VOCAB, **row.values}).to_dict(), **more}


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3-next", {"attention_bias": True}, "attention_bias: True"),
        ("qwen3-next", {"attn_output_gate": False}, "attn_output_gate: False"),
        ("qwen3-next", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("qwen3-next", {"layer_types": ["full_attention"] * 4}, "layer_types: .*no layer is linear_attention"),
        ("qwen3-next", {"layer_types": ["mamba"] * 4}, "layer_types: 'mamba'"),
        ("qwen3-next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: 0"),
        ("qwen3-next", {"linear_num_value_heads": 3}, "value_heads 3 must be a multiple of key_heads 2"),
        ("qwen3-next", {"linear_key_head_dim": "x"}, "linear_key_head_dim: 'x' .*whole number"),
        ("qwen3-next", {"linear_value_head_dim": 2**40}, "linear_value_head_dim: 1099511627776 "),
        ("qwen3-next", {"linear_conv_kernel_dim": 2**20}, "conv_size"),
        ("qwen3-next", {"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ("qwen3-next", {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers: .*none of the 4 layers has experts"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "norm_topk_prob: False"),
        ("qwen3.5", {"model_type": "qwen3_5"}, "model_type: 'qwen3_5' .*qwen3_5_text"),
        ("olmo-hybrid", {"head_dim": 9}, "head_dim: 9"),
        ("olmo-hybrid", {"linear_use_gate": False}, "linear_use_gate: False"),
        ("olmo-hybrid", {"hidden_size": "x"}, "hidden_size"),
        ("olmo-hybrid", {"rope_parameters": [1]}, "rope_parameters"),
        (
            "olmo-hybrid",
            {"rope_parameters": {"rope_theta": None, "rope_type": "yarn", "factor": 2.0}},
            "without a rope_theta there is no rope",
        ),
        ("kimi-linear", {"num_key_value_heads": 2}, "num_key_value_heads: 2 .*as many"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope: False"),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func: 'softmax'"),
        ("kimi-linear", {"topk_group": 2}, "topk_group: 2 .*num_expert_group is 1"),
        ("kimi-linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: 1"),
        ("kimi-linear", {"mlp_layer_types": ["x"] * 5}, "mlp_layer_types"),
        ("kimi-linear", {"linear_attn_config": 3}, "linear_attn_config: 3"),
        ("kimi-linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
        (
            "kimi-linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [0, 1, 2], "full_attn_layers": [3, 4]}},
            "must have 1 to 5 once",
        ),
        (
            "kimi-linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": "x", "full_attn_layers": {}}},
            "must have 1 to 5 once",
        ),
        ("kimi-linear", {"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map: 'modeling_other.Model'"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hf_config(config_of(name, **keys), "config.json")


_DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **{"layers": 4, "dim": 32, "norm_offset": 1, "pattern": ["delta", "full"]},
        "kinds": {
            "delta": {"mixer": "gated_delta", "delta": _DELTA},
            "full": {"heads": 4, "qk_norm": True, "output_gate": True},
        },
    },
    "olmo_hybrid": {
        **{"layers": 4, "dim": 32, "norm_eps": 1e-5, "pattern": ["delta", "full"]},
        "kinds": {
            "delta": {"mixer": "gated_delta", "delta": {**_DELTA, "beta_max": 2}},
            "full": {"heads": 4, "qk_norm": "full", "norm_place": "output", "positions": "none"},
        },
    },
}


@pytest.mark.parametrize(
    ("family", "kind", "keys"),
    [
        ("qwen3_5_text", "delta", {"delta": {**_DELTA, "beta_max": 2}}),
        ("qwen3_5_text", "delta", {"delta": {**_DELTA, "norm_eps": 1e-3}}),
        ("qwen3_5_text", "full", {"output_gate": False}),
        ("qwen3_5_text", "full", {"qk_norm": False}),
        ("qwen3_5_text", "full", {"sinks": True}),
        ("olmo_hybrid", "delta", {"norm_place": "output"}),
        ("olmo_hybrid", "delta", {"delta": {**_DELTA, "norm_eps": 1e-6}}),
        ("olmo_hybrid", "full", {"norm_place": "pre"}),
        ("olmo_hybrid", "full", {"head_dim": 16}),
    ],
)
def test_what_no_family_has_is_refused(family: str, kind: str, keys: dict[str, Any]) -> None:
    model = MODELS[family]
    assert to_hf_config(ModelConfig.model_validate(model), 100, 64)[0].model_type == family
    kinds = {**model["kinds"], kind: {**model["kinds"][kind], **keys}}
    with pytest.raises(UserError, match="no supported family"):
        to_hf_config(ModelConfig.model_validate({**model, "kinds": kinds}), 100, 64)


@pytest.mark.parametrize(
    ("kind", "keys", "what", "has"),
    [
        (
            "delta",
            {"delta": {"key_heads": 2, "beta_max": 2}},
            "model.kinds.delta.delta is DeltaConfig(key_heads=2,",
            "beta_max 1 and no other norm_eps in a gated delta rule",
        ),
        ("full", {"qk_norm": False}, "model.kinds.full.qk_norm is False", "true"),
        (
            "more",
            {"mixer": "gated_delta", "delta": {"key_heads": 8}},
            "model.delta differs between layers",
            "the same delta in all layers of a type",
        ),
    ],
)
def test_refusals_name_the_layers_that_do_not_fit(kind: str, keys: dict[str, Any], what: str, has: str) -> None:
    model = MODELS["qwen3_5_text"]
    kinds = {**model["kinds"], kind: {**model["kinds"].get(kind, {}), **keys}}
    section = ModelConfig.model_validate({**model, "pattern": list(kinds), "kinds": kinds})
    with pytest.raises(UserError) as caught:
        to_hf_config(section, 100, 64)
    assert str(caught.value).startswith(f"model.kinds.delta.mixer is 'gated_delta' and {what}")
    assert str(caught.value).endswith(f"(Qwen3.5 has {has})")


def test_layers_for_tokens_further_ahead_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parity.save(ROWS["qwen3-next"].build(), tmp_path, tokenizer)
    whole = load_file(tmp_path / "model.safetensors")
    save_file({**whole, "mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert HuggingFaceFolder(tmp_path).left_out == ["mtp.fc.weight"]
    assert len(HuggingFaceFolder(tmp_path).tensors) and "mtp.fc.weight" in describe(tmp_path)
    save_file({**whole, "model.mtp": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.mtp"):
        HuggingFaceFolder(tmp_path).tensors  # noqa: B018


def test_names_of_the_published_files_of_olmo_hybrid(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """transformers renames the norms of layers with attention, too, when it saves a model."""
    parity.save(ROWS["olmo-hybrid"].build(), tmp_path, tokenizer)
    found = HuggingFaceFolder(tmp_path)
    read = found.read(found.tensors)
    before, after = "model.layers.3.feedforward_layer_norm.weight", "model.layers.3.post_attention_layernorm.weight"
    whole = load_file(tmp_path / "model.safetensors")
    save_file(
        {after if name == before else name: value for name, value in whole.items()}, tmp_path / "model.safetensors"
    )
    other = HuggingFaceFolder(tmp_path)
    assert all(torch.equal(value, read[name]) for name, value in other.read(other.tensors).items())
