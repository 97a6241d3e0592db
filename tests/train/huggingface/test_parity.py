"""Every family against transformers: files, logits, gradients, generation, training. A new family is a row."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface.registry import FAMILIES
from tests import tiers, tiny
from tests.train.huggingface import delta_rows, encoder_rows, mamba2_rows, parity, test_t5
from tests.train.huggingface.parity import Pair, Row

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": parity.POSITIONS,
}
SHAPE = {**SIZES, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


def llama(**values: Any) -> Row:
    return Row(LlamaConfig, {**SHAPE, **values})


def scaled(kind: str, factor: float, **more: Any) -> Row:
    return llama(rope_parameters={"rope_theta": 10000.0, "rope_type": kind, "factor": factor, **more})


def gemma2(unlike: Collection[str] = (), **values: Any) -> Row:
    """Caps that the products and logits reach, and a window shorter than the texts."""
    shape = SHAPE | {"num_hidden_layers": 5, "head_dim": 10, "query_pre_attn_scalar": 7, "tie_word_embeddings": True}
    shape |= {"sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
    return Row(Gemma2Config, {**shape, **values}, set(unlike), norm_offset=1.0)


def gemma3(unlike: Collection[str] = (), **values: Any) -> Row:
    """Norms around both parts, a window shorter than the texts, two thetas, and a scale that is not the heads'."""
    shape = SHAPE | {"num_hidden_layers": 5, "head_dim": 10, "query_pre_attn_scalar": 7, "tie_word_embeddings": True}
    shape |= {"sliding_window": 6, "layer_types": alternating(5, period=3)}
    return Row(Gemma3TextConfig, {**shape, **values}, set(unlike), norm_offset=1.0)


def gpt_oss(unlike: Collection[str] = (), **values: Any) -> Row:
    """More experts than have one digit, a limit that many numbers reach, and a window shorter than the texts."""
    shape = SHAPE | {"num_hidden_layers": 5, "head_dim": 10, "sliding_window": 6, "swiglu_limit": 0.8}
    shape |= {"num_local_experts": 12, "num_experts_per_tok": 3, "intermediate_size": 40}
    # With a higher rate rounding grows: the limit cuts the slope of many numbers.
    return Row(GptOssConfig, {**shape, **values}, {"router_aux_loss_coef", *unlike}, rate=2e-4)


def alternating(layers: int, period: int) -> list[str]:
    return ["sliding_attention" if index % period < period - 1 else "full_attention" for index in range(layers)]


# More experts than have one digit, most of which a token does not go to.
EXPERTS = {**SHAPE, "intermediate_size": 40, "num_experts_per_tok": 3, "num_experts": 12}
MOE = {**EXPERTS, "moe_intermediate_size": 16}
GLM = {key: value for key, value in MOE.items() if key != "num_experts"} | {"n_routed_experts": 12, "head_dim": 8}
LATENT = {
    **{"kv_lora_rank": 20, "q_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9},
    **{key: value for key, value in GLM.items() if key != "head_dim"},
    **{"num_key_value_heads": 6, "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
}
# What only training reads, and layers that transformers leaves out.
OF_TRAINING = {"router_aux_loss_coef", "num_nextn_predict_layers"}
BETAS = {"beta_fast": 24.0, "beta_slow": 2.0}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
YARN |= {"beta_fast": 24.0, "beta_slow": 2.0}
V2_YARN = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}
# Of transformers' models whose windows are off, these are not read.
NO_WINDOW = {"max_window_layers"}
NEOX = {
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 44,
    "max_position_embeddings": parity.POSITIONS,
}
COHERE = {key: value for key, value in SHAPE.items() if key not in ("rms_norm_eps", "tie_word_embeddings")}
COHERE |= {"num_hidden_layers": 5}
OF_LONGROPE = {"original_max_position_embeddings"}
ROWS = {
    "gpt2": Row(
        GPT2Config,
        {"n_embd": 20, "n_layer": 3, "n_head": 5, "n_positions": parity.POSITIONS, "n_inner": 44}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": llama(),
    "llama-tied-full-heads": llama(tie_word_embeddings=True, num_key_value_heads=6, rope_theta=500.0),
    "llama-biases-wide-heads": llama(attention_bias=True, mlp_bias=True, head_dim=10),
    "llama-biases-of-mlps": llama(mlp_bias=True),
    "llama-linear": scaled("linear", 4.0),
    # Contexts short enough that every branch of the scaling is taken by some of the frequencies.
    "llama3": scaled("llama3", 8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama-yarn": scaled("yarn", 4.0, original_max_position_embeddings=512, **BETAS),
    "mistral": Row(
        MistralConfig, {**SHAPE, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    ),
    "qwen2": Row(Qwen2Config, {**SHAPE, "tie_word_embeddings": True}, NO_WINDOW),
    "qwen2-window": Row(
        Qwen2Config, {**SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    ),
    "qwen2-some-windows": Row(
        Qwen2Config, {**SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3-some-windows": Row(
        Qwen3Config,
        {**SHAPE, "use_sliding_window": True, "sliding_window": 6, "head_dim": 10}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        NO_WINDOW,
    ),
    "qwen3": Row(
        Qwen3Config, {**SHAPE, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}, NO_WINDOW
    ),
    "olmo2": Row(Olmo2Config, {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "olmo2-biases": Row(Olmo2Config, {**SHAPE, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 10}),
    "smollm3": Row(
        SmolLM3Config, {**SHAPE, "num_hidden_layers": 5, "no_rope_layer_interval": 2}, {"no_rope_layer_interval"}
    ),
    "smollm3-window": Row(
        SmolLM3Config,
        {**SHAPE, "num_hidden_layers": 5, "mlp_bias": True, "use_sliding_window": True, "sliding_window": 6}
        | {"no_rope_layers": [1, 0, 1, 1, 0], "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "smollm3-no-rope": Row(SmolLM3Config, {**SHAPE, "no_rope_layers": [0, 0, 0]}),
    "phi3": Row(Phi3Config, {**SHAPE, "tie_word_embeddings": True}, OF_LONGROPE, exported_as="llama"),
    "phi3-window": Row(Phi3Config, {**SHAPE, "sliding_window": 7}, OF_LONGROPE, exported_as="mistral"),
    "phi3-partial-rope": Row(
        Phi3Config,
        {**SHAPE, "head_dim": 8, "sliding_window": 9}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}},
        OF_LONGROPE,
    ),
    "granite": Row(
        GraniteConfig,
        {**SHAPE, "attention_bias": True, "embedding_multiplier": 6.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.15, "logits_scaling": 0.7},
    ),
    "granite-yarn": Row(
        GraniteConfig, {**SHAPE, "mlp_bias": True, "attention_multiplier": 0.3, "rope_parameters": YARN}
    ),
    "gpt-neox": Row(
        GPTNeoXConfig,
        {**NEOX, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4}},
    ),
    "gpt-neox-sequential": Row(
        GPTNeoXConfig,
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
        }
        | {
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            }
        },
    ),
    "gemma2": gemma2(rope_parameters={"rope_type": "default", "rope_theta": 300.0}),
    "gemma2-untied-no-caps": gemma2(
        tie_word_embeddings=False,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        num_hidden_layers=3,
        layer_types=alternating(3, period=3),
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "gemma3": gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        final_logit_softcapping=8.0,
    ),
    "gemma3-untied-old-keys": gemma3(
        {"_sliding_window_pattern", "sliding_window_pattern"},
        tie_word_embeddings=False,
        query_pre_attn_scalar=10,
        layer_types=None,
        sliding_window_pattern=2,
        num_hidden_layers=3,
        rope_theta=300.0,
        rope_local_base_freq=20.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **BETAS},
    ),
    "gemma3-full": gemma3({"sliding_window"}, layer_types=["full_attention"] * 2, num_hidden_layers=2),
    "gemma3-windows": gemma3(layer_types=["sliding_attention"] * 2, num_hidden_layers=2),
    "cohere2": Row(
        Cohere2Config,
        {**COHERE, "sliding_window": 6, "rope_parameters": YARN, "tie_word_embeddings": False, "logit_scale": 0.9},
    ),
    "cohere2-biases": Row(
        Cohere2Config,
        {
            **COHERE,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "attention_bias": True,
            "head_dim": 10,
            "logit_scale": 0.4,
        }
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "olmo3": Row(Olmo3Config, {**SHAPE, "num_hidden_layers": 6, "sliding_window": 6}),
    "olmo3-yarn": Row(
        Olmo3Config,
        {**SHAPE, "num_hidden_layers": 5, "sliding_window": 9, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 500000.0}}},
    ),
    "olmo3-two-ropes": Row(
        Olmo3Config,
        {**SHAPE, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}}},
    ),
    "gpt-oss": gpt_oss(),
    "gpt-oss-no-yarn": gpt_oss(
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=False,
        tie_word_embeddings=True,
        swiglu_alpha=1.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "mixtral": Row(MixtralConfig, {**EXPERTS, "num_experts_per_tok": 2, "head_dim": 10}, OF_TRAINING),
    "mixtral-window": Row(
        MixtralConfig,
        {**EXPERTS, "sliding_window": 7, "tie_word_embeddings": True, "rope_theta": 500.0},
        OF_TRAINING | {"head_dim"},
    ),
    "olmoe": Row(OlmoeConfig, EXPERTS, OF_TRAINING),
    "olmoe-biases-normalized": Row(
        OlmoeConfig, {**EXPERTS, "attention_bias": True, "norm_topk_prob": True}, OF_TRAINING
    ),
    "qwen3-moe": Row(Qwen3MoeConfig, {**MOE, "norm_topk_prob": True, "head_dim": 10}, OF_TRAINING),
    "qwen3-moe-some-dense": Row(
        Qwen3MoeConfig,
        {**MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True}
        | {"use_sliding_window": True, "sliding_window": 6, "head_dim": 10},
        OF_TRAINING | {"decoder_sparse_step", "mlp_only_layers"},
    ),
    "qwen2-moe": Row(
        Qwen2MoeConfig, {**MOE, "shared_expert_intermediate_size": 36}, OF_TRAINING | NO_WINDOW | {"sliding_window"}
    ),
    "qwen2-moe-some-dense-no-biases": Row(
        Qwen2MoeConfig,
        {**MOE, "shared_expert_intermediate_size": 36, "mlp_only_layers": [1], "qkv_bias": False}
        | {"norm_topk_prob": True, "tie_word_embeddings": True},
        OF_TRAINING | NO_WINDOW | {"sliding_window"},
    ),
    "glm4-moe": Row(
        Glm4MoeConfig,
        {**GLM, "attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
        | {"routed_scaling_factor": 2.5},
        OF_TRAINING,
    ),
    "glm4-moe-two-dense": Row(
        Glm4MoeConfig,
        {**GLM, "num_hidden_layers": 4, "first_k_dense_replace": 2, "norm_topk_prob": False, "rope_theta": 500.0}
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        OF_TRAINING,
    ),
    "deepseek-v2": Row(
        DeepseekV2Config,
        {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, "rope_parameters": V2_YARN},
        OF_TRAINING,
    ),
    "deepseek-v2-lite": Row(
        DeepseekV2Config,
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "rms_norm_eps": 1e-6}
        | {"first_k_dense_replace": 2, "tie_word_embeddings": True, "rope_theta": 500.0},
        OF_TRAINING,
    ),
    "deepseek-v3": Row(
        DeepseekV3Config,
        {**LATENT, "routed_scaling_factor": 2.5, "rope_parameters": {**V2_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        OF_TRAINING,
    ),
    "deepseek-v3-no-latent-of-queries": Row(
        DeepseekV3Config,
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"tie_word_embeddings": True, "first_k_dense_replace": 0, "rms_norm_eps": 1e-6},
        OF_TRAINING,
    ),
    "starcoder2": Row(
        Starcoder2Config, {**SIZES, "norm_epsilon": 1e-4, "sliding_window": 7, "tie_word_embeddings": False}
    ),
    "starcoder2-tied-no-biases": Row(Starcoder2Config, {**SIZES, "use_bias": False}),
    **mamba2_rows.ROWS,
    **delta_rows.ROWS,
    **encoder_rows.ROWS,
}


DEEPSEEK = [name for name in ROWS if name.startswith("deepseek")]


def _first_of_families() -> list[Any]:
    """The rows: two quick ones, guard tests of the first one of each other family, and the rest, which is slow."""
    seen, found = set[str](), []
    for number, (name, row) in enumerate(ROWS.items()):
        mark = pytest.mark.slow if row.config.model_type in seen else pytest.mark.guard
        found.append(pytest.param(name, marks=[] if number < 2 else mark))
        seen.add(row.config.model_type)
    return found


@pytest.fixture(scope="module", params=_first_of_families())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    return parity.pair_of(ROWS[request.param], tmp_path_factory.mktemp(request.param), tokenizer)


def test_every_family_has_a_row() -> None:
    found = {row.config.model_type for row in (*ROWS.values(), *test_t5.ROWS.values())}
    assert found == FAMILIES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_keys(name: str) -> None:
    parity.check_keys(ROWS[name])


def test_conversion(pair: Pair, tmp_path: Path) -> None:
    parity.check_conversion(pair, tmp_path)


def test_config_json(pair: Pair, tmp_path: Path) -> None:
    parity.check_config(pair, tmp_path)


def test_logits_and_gradients(pair: Pair) -> None:
    parity.check_logits_and_gradients(pair)


def test_greedy_tokens(pair: Pair) -> None:
    if pair.row.masked:
        pytest.skip("an encoder writes no text")
    parity.check_greedy(pair)


def test_packed_documents(pair: Pair) -> None:
    parity.check_packed(pair)


REPLAYED = [name for name in delta_rows.ROWS if "next" in name or "moe" in name or "kimi" in name]
"""With experts and decays: rounding soon chooses other experts."""


TRAINED = ["llama", "gpt2", "gemma2", "mamba2", "qwen3.5", "nemotron-h"]
TRAINED += [name for name in ROWS if name not in (*TRAINED, *REPLAYED, *encoder_rows.ROWS)]


@pytest.mark.guard
@pytest.mark.parametrize("name", tiers.first(6, TRAINED, rest="slow"))
def test_twenty_steps(root: Path, name: str) -> None:
    parity.check_training(ROWS[name], root, name)


@pytest.fixture(scope="module")
def masked_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose tokenizer has a token for masks, and one more, which is RoBERTa's padding."""
    folder = tmp_path_factory.mktemp("masked")
    preprocess(load(tiny.write_run(folder, {"tokenizer.special_tokens": parity.SPECIAL_TOKENS})))
    return folder


@pytest.mark.parametrize("name", tiers.first(0, encoder_rows.ROWS, rest="slow"))
def test_twenty_masked_steps(masked_root: Path, name: str) -> None:
    parity.check_training(ROWS[name], masked_root, name)


ROUTED = ("mixtral", "kimi-linear", "gpt-oss", "olmoe", "qwen3-moe-some-dense", "qwen2-moe", "glm4-moe-two-dense")


@pytest.mark.guard
@pytest.mark.parametrize("name", tiers.first(2, dict.fromkeys((*ROUTED, *DEEPSEEK[::2], *REPLAYED)), rest="slow"))
def test_twenty_steps_with_the_same_experts(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    parity.check_replayed_training(parity.pair_of(ROWS[name], tmp_path, tokenizer))
