"""Gemma's files as they are published, and what is refused in them by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from pipeline.common.errors import UserError
from pipeline.config.model import ModelConfig
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "intermediate_size": 96,
    "max_position_embeddings": 131072,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window": 16,
    "sliding_window_pattern": 6,
    "vocab_size": 100,
}
"""As version 4 of transformers wrote it, with the keys of the published 4B."""
LOCAL, FULL = "sliding_attention", "full_attention"


def read(values: dict[str, Any]) -> ModelConfig:
    return from_hf_config(values, "config.json")[1]


def test_gemma3_as_published_and_as_transformers_5_writes_it() -> None:
    found = read(GEMMA3)
    assert found.layer_kinds == [LOCAL] * 5 + [FULL] + [LOCAL] * 2
    local, full = found.layer(LOCAL), found.layer(FULL)
    assert (local.sliding_window, local.rope_theta, local.rope_scaling) == (16, 1e4, None)
    assert full.sliding_window is None and full.rope_theta == 1e6
    assert full.rope_scaling is not None and full.rope_scaling.factor == 8
    assert found.attention_scale is None and found.tie_embeddings and found.embedding_scale == 48**0.5
    newer = AutoConfig.for_model(**GEMMA3).to_dict()
    assert newer["rope_parameters"][LOCAL]["rope_theta"] == 1e4
    assert read(newer) == found
    assert read(to_hf_config(found, 100, 131072)[1]) == found


def test_gemma3_where_nothing_is_said() -> None:
    shape = {"hidden_size": 48, "num_hidden_layers": 7, "intermediate_size": 96, "vocab_size": 100}
    found = read({"model_type": "gemma3_text", **shape})
    theirs = AutoConfig.for_model("gemma3_text", **shape)
    assert read(theirs.to_dict()) == found
    assert found.layer_kinds == theirs.layer_types
    assert found.layer(LOCAL).sliding_window == theirs.sliding_window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation: 'gelu'.*only 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0.*Gemma 3 has none"),
        ({"sliding_window": None}, "sliding_window: None.*sliding_attention need one"),
        ({"layer_types": [LOCAL] * 3}, "layer_types: .*a list of 8 types"),
        ({"layer_types": [LOCAL] * 7 + ["chunked_attention"]}, "layer_types: 'chunked_attention'"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters: .*it must have full_attention and sliding"),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0}}},
            "rope_scaling: .*rope_parameters differs from it",
        ),
        (
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}},
            "frequencies of sliding_attention are not scaled",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling: 'dynamic'"),
    ],
)
def test_what_gemma3_does_not_compute_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read({**GEMMA3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": "swiglu"}, "model.norm_offset is 1.0 and model.mlp is 'swiglu'"),
        ({"norm_place": "pre"}, "model.norm_place is 'pre'"),
        ({"embedding_scale": 7.0}, r"model.embedding_scale is 7.0: .*Gemma 3 has embedding_scale sqrt\(dim\)"),
        ({"attention_scale": 0.17}, "model.attention_scale is 0.17: .*Gemma 3 has 1 / sqrt of a whole number"),
        ({"heads": 10, "kv_heads": 2}, "model.heads is 10: .*Gemma 3 has heads that divide dim"),
        ({"kinds": {LOCAL: {"sliding_window": 8, "kv_heads": 1}}}, "model.kv_heads differs between layers"),
        ({"kinds": {LOCAL: {"rope_scaling": {"type": "linear", "factor": 2}}}}, f"model.kinds.{LOCAL}.rope_scaling"),
        (
            {"pattern": [LOCAL, "other", FULL], "kinds": {"other": {"sliding_window": 9}}},
            "model.sliding_window differs between layers",
        ),
        (
            {"pattern": [FULL, "other"], "kinds": {"other": {"rope_scaling": {"type": "linear", "factor": 8}}}},
            "model.rope_theta differs between layers",
        ),
    ],
)
def test_a_model_that_gemma3_does_not_compute_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    values = read(GEMMA3).model_dump()
    kinds = changes.pop("kinds", {})
    values |= changes
    values["kinds"] = {
        name: {**values["kinds"].get(name, {}), **kinds.get(name, {})} for name in dict.fromkeys(values["pattern"])
    }
    with pytest.raises(UserError, match=message):
        to_hf_config(ModelConfig.model_validate(values), 100, 64)


def test_gemma2_as_published() -> None:
    """With both names of the activation, as its first files had it, and what is left out there."""
    other = ("rope_local_base_freq", "rope_scaling", "sliding_window_pattern", "rope_theta")
    published = {key: value for key, value in GEMMA3.items() if key not in other} | {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 144,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10000.0,
        "num_hidden_layers": 5,
    }
    found = read(published)
    assert found.layer_kinds == [LOCAL, FULL, LOCAL, FULL, LOCAL]
    assert (found.attention_scale, found.attention_soft_cap, found.logit_soft_cap) == (144**-0.5, 50, 30)
    assert not found.qk_norm
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "rope_theta"):
        assert read({name: value for name, value in published.items() if name != key}) == found
    assert read(AutoConfig.for_model(**published).to_dict()) == found
    assert read(to_hf_config(found, 100, 8192)[1]) == found
    without = read({**published, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert without.attention_soft_cap is None and without.logit_soft_cap is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_soft_cap": 50.0}, "model.norm_offset is 1.0 and model.attention_soft_cap is 50.0"),
        (
            {
                "attention_soft_cap": 50.0,
                "qk_norm": False,
                "output_gate": True,
                "kinds": {LOCAL: {"sliding_window": 8}, FULL: {}},
            },
            "model.norm_offset is 1.0 and model.output_gate is True: .*Gemma 2 has no output_gate",
        ),
    ],
)
def test_gemma2_has_caps_and_gemma3_norms_of_queries_and_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_hf_config(ModelConfig.model_validate(read(GEMMA3).model_dump() | changes), 100, 64)


@torch.no_grad()
def test_embeddings_in_16_bits_are_scaled_as_there() -> None:
    dim = 24  # whose root has more digits than bf16
    model = ModelConfig(layers=1, dim=dim, heads=2, embedding_scale=dim**0.5, mixer="none", vocab_multiple=1)
    ours = Decoder(decoder_spec(model, 50, 64)).bfloat16()
    seen = []
    ours.layers["0"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    theirs = Gemma3TextScaledWordEmbedding(50, dim, None, embed_scale=dim**0.5).bfloat16()
    theirs.weight.copy_(ours.embedding.weight)
    tokens = torch.arange(50)[None]
    ours(tokens, Context())
    assert torch.equal(seen[0], theirs(tokens))
