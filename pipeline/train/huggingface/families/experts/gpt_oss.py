"""GPT-OSS: experts with biases and a clamped SwiGLU, sinks, and a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_experts import SIZES, WITH_EXPERTS, experts_of, needs_experts, read_experts
from pipeline.train.huggingface.config_kinds import read_kinds
from pipeline.train.huggingface.config_rope import read_rope, read_rope_values, write_rope_values
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.config_windows import FULL, SLIDING, has_window, read_periodic, types_of, windows_of
from pipeline.train.huggingface.family import Family, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.tensor_names import RowOrder, TensorNames, by_group

_THETA = 150000.0
_WINDOW = 128
_LIMIT, _ALPHA = 7.0, 1.702
_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where the file has no scaling."""
_IN_TURN = RowOrder("of both in turn", lambda part: by_group(part.ffn_dim, 1, 1))
_EXPERTS: Json = {"activation": "clamped_swiglu", "bias": True, "router_bias": True}

_OF_ATTENTION = (
    *AttentionSpec.huggingface["llama"][:4],
    TensorNames("self_attn.sinks", ("sinks",), parameter=True),
)
_STACKED: Json = {"experts": "stacked"}
_OF_EXPERTS = (
    ("mlp.router", ("router",)),
    TensorNames("mlp.experts.gate_up_proj", ("experts.w1", "experts.w3"), _IN_TURN, transposed=True, **_STACKED),
    TensorNames("mlp.experts.gate_up_proj_bias", ("experts.b1", "experts.b3"), _IN_TURN, **_STACKED),
    TensorNames("mlp.experts.down_proj", ("experts.w2",), transposed=True, **_STACKED),
    TensorNames("mlp.experts.down_proj_bias", ("experts.b2",), **_STACKED),
)


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=8, eps=1e-5, rope=_read_rope(source))
    types, window = read_periodic(source, found["layers"], period=2, default=_WINDOW)
    top_k = source.size("num_experts_per_tok", 4)
    source.must_be("experts_per_token", (top_k,), top_k)  # the same once more, in published files
    source.get("initial_context_length")  # of training
    experts = {
        **_EXPERTS,
        "count": source.size("num_local_experts", 128),
        "top_k": top_k,
        "ffn_dim": found.pop("ffn_dim"),
        "clamp": source.number("swiglu_limit", _LIMIT),
        "alpha": source.number("swiglu_alpha", _ALPHA),
    }
    found |= {
        "head_dim": source.size_or_null("head_dim", 64),
        "sinks": True,
        "bias": "attention" if source.flag("attention_bias", True) else "none",
        **read_kinds(types, {FULL: {}, SLIDING: {"sliding_window": window}}),
    }
    return read_experts(source, found, [True] * found["layers"], experts)


def _read_rope(source: ConfigSource) -> Json:
    if source.get("rope_parameters") is None and not source.get("rope_scaling"):
        return read_rope_values(source, _YARN, source.number("rope_theta", _THETA))
    return read_rope(source, _THETA)


def _write(model: ModelConfig, positions: int) -> Json:
    experts = experts_of(model)
    found = write_llama_like(
        model,
        positions,
        intermediate_size=experts.ffn_dim,
        num_local_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        swiglu_limit=experts.clamp,
        swiglu_alpha=experts.alpha,
        attention_bias=model.bias == "attention",
        sliding_window=next(filter(None, windows_of(model)), None),
        layer_types=types_of(model),
    )
    if model.rope_scaling is None:  # nothing said would be YaRN
        found |= {"rope_parameters": write_rope_values(model)}
    return found


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    title="GPT-OSS",
    what="`mlp: experts` with `activation: clamped_swiglu`, `bias` and `router_bias`; `sinks`; "
    "`sliding_window` in all, some or no layers; `bias: attention` or `none`",
    read=_read,
    write=_write,
    mark="sinks",
    needs={
        **needs_experts({*SIZES, "clamp", "alpha"}, **_EXPERTS),
        "mlp": only("experts"),
        "sinks": only(True),
        "bias": only("attention", "none"),
        "sliding_window": anything(),
    },
    varies=frozenset({"sliding_window"}),
    alike={"sliding_window": has_window},
    names=replace(
        LLAMA_NAMES,
        tables={AttentionSpec: _OF_ATTENTION, ExpertsSpec: _OF_EXPERTS},
        layers=WITH_EXPERTS,
    ),
    positions=("max_position_embeddings", 131072),
)
