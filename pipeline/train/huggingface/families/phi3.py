"""Phi-3 and Phi-4: queries, keys and values in one matrix, w1 and w3 of an mlp in another, often a partial rope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_rope import ROPE_SHARE
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, anything, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec


def _read(source: ConfigSource) -> Json:
    source.get("original_max_position_embeddings")  # of longrope alone, which is refused
    found = read_llama_like(source, eps=1e-5, share=1.0)
    if found["rope_scaling"] is not None:
        source.refuse("rope_scaling", found["rope_scaling"]["type"], "transformers has none but longrope for Phi-3")
    window = source.size("sliding_window", least=0)
    return {**found, "sliding_window": None if window is None else int(window)}


def _write(model: ModelConfig, positions: int) -> Json:
    more = {"sliding_window": model.sliding_window, ROPE_SHARE: model.rope_share}
    return write_llama_like(model, positions, **more, original_max_position_embeddings=positions)


def _is_special(layers: Sequence[ModelConfig]) -> bool:
    return layers[0].rope_share != 1  # else it is a Llama or Mistral


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    title="Phi-3",
    what="`rope_share`, `sliding_window` or none, no `rope_scaling`",
    read=_read,
    write=_write,
    mark="rope_share",
    needs={
        **LLAMA_NEEDS,
        "rope_share": anything(),
        "rope_scaling": only(None, has="no rope_scaling that is computed here"),
        "bias": only("none", has="no biases"),
        "sliding_window": anything(),
    },
    special=_is_special,
    names=replace(
        LLAMA_NAMES,
        tables={
            AttentionSpec: (("self_attn.qkv_proj", ("wq", "wk", "wv")), ("self_attn.o_proj", ("wo",))),
            MlpSpec: (("mlp.gate_up_proj", ("w1", "w3")), ("mlp.down_proj", ("w2",))),
        },
    ),
    positions=("max_position_embeddings", 4096),
    pads=True,
)
