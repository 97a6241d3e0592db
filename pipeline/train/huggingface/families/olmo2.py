"""OLMo 2: norms on the outputs of mixers and mlps, and of queries and keys over all heads together."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.config_source import ConfigSource, Json
from pipeline.train.huggingface.family import Family, only
from pipeline.train.huggingface.llama_like import LLAMA_NAMES, LLAMA_NEEDS, read_llama_like, write_llama_like

OLMO_NAMES = replace(
    LLAMA_NAMES,
    norms={"post_attention_layernorm": "mixer_out_norm", "post_feedforward_layernorm": "mlp_out_norm"},
)
OLMO_NEEDS = {
    **LLAMA_NEEDS,
    "norm_place": only("output"),
    "qk_norm": only("full"),
    "bias": only("none", "attention", has="no biases of mlps"),
}


def read_olmo(source: ConfigSource, rope: Json | None = None) -> Json:
    """Keys of `model:` that OLMo 2 and 3 have; those of rope as in Llama where none are given."""
    found = read_llama_like(source, eps=1e-5, rope=rope)
    biases = source.flag("attention_bias", False)
    return {**found, "norm_place": "output", "qk_norm": "full", "bias": "attention" if biases else "none"}


def _write(model: ModelConfig, positions: int) -> Json:
    return write_llama_like(model, positions, attention_bias=model.bias == "attention")


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    title="OLMo 2",
    what="`norm_place: output`, `qk_norm: full`, `bias: none` or `attention`",
    read=read_olmo,
    write=_write,
    mark="norm_place",
    needs=OLMO_NEEDS,
    names=OLMO_NAMES,
    pads=True,
)
