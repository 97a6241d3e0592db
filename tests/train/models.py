"""Small models of each family: a `model:` section and transformers' model of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.config.model import ModelConfig

VOCAB = 97  # padded to 100 by the configs below
DIM, LAYERS, HEADS, FFN = 32, 3, 4, 48


@dataclass(frozen=True)
class Family:
    config: ModelConfig
    theirs: Callable[[], PreTrainedModel]


def _config(**keys: Any) -> ModelConfig:
    shape = {"layers": LAYERS, "dim": DIM, "heads": HEADS, "ffn_dim": FFN, "vocab_multiple": 20}
    return ModelConfig.model_validate({**shape, **keys})


def _llama_like(kind: type[PreTrainedModel], config: type, **keys: Any) -> Callable[[], PreTrainedModel]:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": FFN,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,  # a padding token would get no gradient
        "num_key_value_heads": HEADS,
    }
    return lambda: kind(config(**{**shape, **keys}))


def _llama(**keys: Any) -> Callable[[], PreTrainedModel]:
    return _llama_like(LlamaForCausalLM, LlamaConfig, **keys)


def _scaled(ours: dict[str, Any], **theirs: Any) -> Family:
    parameters = {"rope_theta": 10000.0, "rope_type": ours["type"], "factor": ours["factor"], **theirs}
    return Family(_config(rope_scaling=ours), _llama(rope_parameters=parameters))


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _config(norm="layernorm", mlp="gelu", bias="all", positions="learned", tie_embeddings=True, ffn_dim=4 * DIM),
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=DIM,
                n_layer=LAYERS,
                n_head=HEADS,
                n_positions=64,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                attn_implementation="eager",
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
    ),
    "llama": Family(_config(kv_heads=2), _llama(num_key_value_heads=2)),
    "llama-tied-full-heads": Family(_config(tie_embeddings=True), _llama(tie_word_embeddings=True)),
    "llama-linear": _scaled({"type": "linear", "factor": 4.0}),
    # Contexts short enough that every branch of the scaling is taken by some of the four frequencies.
    "llama3-scaling": _scaled(
        {
            "type": "llama3",
            "factor": 8.0,
            "original_max_positions": 32,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "llama-yarn": _scaled(
        {"type": "yarn", "factor": 4.0, "original_max_positions": 512}, original_max_position_embeddings=512
    ),
    "llama-yarn-fractions": _scaled(
        {"type": "yarn", "factor": 4.0, "original_max_positions": 512, "truncate": False},
        original_max_position_embeddings=512,
        truncate=False,
    ),
    "qwen2": Family(
        _config(kv_heads=2, bias="qkv", tie_embeddings=True),
        _llama_like(Qwen2ForCausalLM, Qwen2Config, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen3": Family(
        _config(kv_heads=1, head_dim=16, qk_norm=True, tie_embeddings=True),
        _llama_like(Qwen3ForCausalLM, Qwen3Config, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
    ),
    "mistral": Family(
        _config(kv_heads=2, sliding_window=7, rope_theta=1e6),
        _llama_like(
            MistralForCausalLM,
            MistralConfig,
            num_key_value_heads=2,
            sliding_window=7,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    ),
}
