"""Bamba: Mamba-2 in most layers, attention with a partial rope in the others, an mlp in each."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_hybrid import attention_of, hybrid, of_attention, some_recurrent
from pipeline.train.huggingface.config_kinds import by_layer
from pipeline.train.huggingface.config_mamba2 import (
    ATTENTION,
    HYBRID_NEEDS,
    MAMBA,
    read_bamba_sizes,
    read_hybrid,
    write_bamba_sizes,
)
from pipeline.train.huggingface.config_rope import ROPE_SHARE, write_rope_values
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, only
from pipeline.train.huggingface.llama_like import (
    BIASES,
    LLAMA_NAMES,
    LLAMA_NEEDS,
    read_bias,
    read_llama_like,
    write_bias,
    write_llama_like,
)
from pipeline.train.huggingface.names import HEAD_RULE, TensorRule
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mixers.mamba2.spec import Mamba2Spec
from pipeline.train.model.mlps.dense.spec import MlpSpec

_SHARE = 0.5
"""Of a head that transformers turns where `rope_parameters` does not say otherwise, whatever else does."""
_TURNED = "attn_rotary_emb"
"""Dimensions of a head that are turned. vLLM and llama.cpp read it, and turn whole heads without it; transformers
reads the share alone."""


def _read(source: ConfigSource) -> Json:
    found = read_llama_like(source, kv_heads=8, eps=1e-5, share=_SHARE)
    source.must_be(ROPE_SHARE, (found["rope_share"],), found["rope_share"])
    nested = source.object("rope_parameters") or source.object("rope_scaling")
    if ROPE_SHARE not in nested:
        source.must_be(ROPE_SHARE, (_SHARE,), _SHARE)
    for key in ("z_loss_coefficient", "num_logits_to_keep"):  # of training, and of generation
        source.get(key)
    _check_turned(source, found)
    attends = source.get("attn_layer_indices", [])
    if not isinstance(attends, list) or not set(attends) <= set(range(found["layers"])):
        source.refuse("attn_layer_indices", attends, f"it must be a list of numbers from 0 to {found['layers'] - 1}")
    names = [ATTENTION if index in attends else MAMBA for index in range(found["layers"])]
    bias = read_bias(source)
    if ATTENTION not in names:
        bias = {"attention": "none", "all": "mlp"}.get(bias, bias)
    return read_hybrid({**found, "bias": bias}, names, {}, read_bamba_sizes(source))


def _check_turned(source: ConfigSource, found: Json) -> None:
    """Refuse a file of which programs turn different dimensions."""
    if (stated := source.get(_TURNED)) is None:
        return
    turned = found["rope_share"] * (found["head_dim"] or found["dim"] // found["heads"])
    if stated != turned:
        source.refuse(_TURNED, stated, f"{ROPE_SHARE} {found['rope_share']} of a head is {turned:g} dimensions")


def _write(model: ModelConfig, positions: int) -> Json:
    attention = attention_of(model)
    mixers = by_layer(model, lambda layer: layer.mixer)
    found = write_llama_like(attention, positions, **write_bias(model), **write_bamba_sizes(model))
    if attention.heads_fill_dim:
        del found["head_dim"]
    if attention.rope_share != _SHARE:
        del found["rope_theta"], found["rope_scaling"]
        found["rope_parameters"] = {**write_rope_values(attention), ROPE_SHARE: attention.rope_share}
    attends = [index for index, mixer in enumerate(mixers) if mixer == "attention"]
    return {**found, "attn_layer_indices": attends, _TURNED: round(attention.rope_share * attention.head_size)}


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    title="Bamba",
    what="layers with `mixer: mamba2` and with attention and `rope_share`; `bias` as Llama",
    read=_read,
    write=_write,
    needs={
        **HYBRID_NEEDS,
        "positions": of_attention(only("rope")),
        "rope_theta": anything(),
        "rope_scaling": of_attention(LLAMA_NEEDS["rope_scaling"]),
        "rope_share": anything(),
        "mlp": only("swiglu"),
        "bias": only(*BIASES),
    },
    special=some_recurrent,
    names=replace(
        LLAMA_NAMES,
        norms={"input_layernorm": "mixer_norm", "pre_ff_layernorm": "mlp_norm"},
        after=(TensorRule("model.final_layernorm.weight", ("norm.weight",)), HEAD_RULE),
        tables={
            MlpSpec: (
                ("feed_forward.gate_proj", ("w1",)),
                ("feed_forward.up_proj", ("w3",)),
                ("feed_forward.down_proj", ("w2",)),
            )
        },
        layers=({"mixer": Mamba2Spec, "mlp": MlpSpec}, {"mixer": AttentionSpec, "mlp": MlpSpec}),
    ),
    positions=("max_position_embeddings", 262144),
    pads=True,
    **hybrid("mamba2"),
)
