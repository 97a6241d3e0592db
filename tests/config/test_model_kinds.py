"""`model.pattern` and `model.kinds`: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder_spec import decoder_spec

SHAPE: dict[str, Any] = {"layers": 5, "dim": 64, "heads": 4}


def model(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **keys})


def test_a_pattern_repeats_and_a_kind_changes_its_keys_alone() -> None:
    found = model(
        kv_heads=2,
        sliding_window=16,
        pattern=["near", "near", "far"],
        kinds={"near": {"rope_theta": 500.0}, "far": {"sliding_window": None, "kv_heads": 4}},
    )
    assert found.layer_kinds == ["near", "near", "far", "near", "near"]
    near, far = found.layer("near"), found.layer("far")
    assert (near.kv_heads, near.sliding_window, near.rope_theta) == (2, 16, 500.0)
    assert (far.kv_heads, far.sliding_window, far.rope_theta) == (4, None, 10000.0)
    assert found.layer(None) is found


def test_the_values_of_a_kind_are_written_as_they_were_given() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    keys = {"pattern": ["a", "b"], "kinds": {"a": {"sliding_window": None}, "b": {"rope_scaling": scaling}}}
    found = model(sliding_window=16, **keys)
    assert found.model_dump(mode="json")["kinds"]["a"] == {"sliding_window": None}
    for how in ({}, {"exclude_defaults": True}, {"exclude_unset": True}):
        assert ModelConfig.model_validate(found.model_dump(mode="json", **how)) == found


def test_one_head_is_written_where_defaults_are_left_out() -> None:
    found = model(heads=1)
    assert ModelConfig.model_validate(found.model_dump(mode="json", exclude_defaults=True)) == found


def test_what_no_layer_has_is_not_checked() -> None:
    scaling = {"type": "linear", "factor": 2}
    found = model(rope_scaling=scaling, pattern=["a", "b"], kinds={"a": {}, "b": {"positions": "none"}})
    assert found.layer("b").positions == "none"
    assert model(heads=3, pattern=["a"], kinds={"a": {"heads": 4}}).layer("a").heads == 4


EXPERTS = {"count": 4, "top_k": 2, "ffn_dim": 16}
MLA = {"kv_rank": 8, "nope_dim": 4, "rope_dim": 2, "value_dim": 4}


def test_keys_of_attention_are_for_the_layers_that_have_it() -> None:
    found = model(
        kv_heads=2,
        qk_norm=True,
        mla=MLA,
        pattern=["a", "b"],
        kinds={"a": {"mixer": "mla", "rope_scaling": {"type": "linear", "factor": 2}}, "b": {}},
    )
    assert [found.layer(name).mixer for name in "ab"] == ["mla", "attention"]
    assert model(heads=5, mixer="mla", mla=MLA).mla is not None, "heads need not divide the width"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"experts": EXPERTS}, "experts needs layers with mlp: experts, and there are none"),
        (
            {"experts": EXPERTS, "pattern": ["a"], "kinds": {"a": {}}},
            "experts needs layers with mlp: experts, and there are none",
        ),
        ({"pattern": ["a"], "kinds": {"a": {"experts": EXPERTS}}}, "kinds.a: experts needs mlp: experts"),
        ({"mixer": "mla"}, "mixer: mla needs the section mla"),
        ({"mla": MLA}, "mla needs mixer: mla, and mixer is attention"),
        ({"mla": MLA, "pattern": ["a"], "kinds": {"a": {}}}, "mla needs layers with mixer: mla, and there are none"),
        ({"pattern": ["a"], "kinds": {"a": {"mla": MLA}}}, "kinds.a: mla needs mixer: mla"),
        ({"mixer": "mla", "mla": MLA, "kv_heads": 2}, "kv_heads is not for mixer: mla"),
        ({"mixer": "mla", "mla": MLA, "head_dim": 8}, "head_dim is not for mixer: mla"),
        ({"mixer": "mla", "mla": MLA, "qk_norm": True}, "qk_norm is not for mixer: mla"),
        ({"mixer": "mla", "mla": MLA, "rope_share": 0.5}, "rope_share is not for mixer: mla"),
        ({"mixer": "mla", "mla": MLA, "output_gate": True}, "output_gate is not for mixer: mla"),
        ({"mixer": "mamba2"}, "mixer: mamba2 needs the section mamba2"),
        (
            {"heads": None, "mixer": "kda", "delta": {"key_heads": 2, "value_heads": 4}},
            "delta.value_heads must be as many",
        ),
        ({"heads": None, "mixer": "gated_delta", "delta": {"key_heads": 2, "rank": 4}}, "delta.rank needs mixer: kda"),
        (
            {"heads": None, "mixer": "mamba2", "mamba2": {"heads": 4}, "kv_heads": 2},
            "kv_heads is not for mixer: mamba2",
        ),
        ({"mixer": "mamba2", "mamba2": {"heads": 4, "groups": 3}}, "heads 4 must be a multiple of groups 3"),
        ({"mixer": "mla", "mla": MLA, "bias": "all"}, "bias: all is not for mixer: mla"),
        ({"mixer": "mla", "mla": {**MLA, "rope_dim": 3}}, "mla.rope_dim 3 must be an even number"),
        (
            {"mla": MLA, "pattern": ["a", "b"], "kinds": {"a": {"mixer": "mla", "qk_norm": True}, "b": {}}},
            "kinds.a: qk_norm is not for mixer: mla",
        ),
        (
            {"mla": MLA, "qk_norm": True, "pattern": ["a"], "kinds": {"a": {"mixer": "mla"}}},
            "qk_norm is not for mixer: mla",
        ),
        ({"pattern": ["a"]}, r"pattern has 'a', which is not in kinds \(none\)"),
        ({"pattern": ["a", "c"], "kinds": {"a": {}, "b": {}}}, r"'c', which is not in kinds \(a, b\)"),
        ({"pattern": ["a"], "kinds": {"a": {}, "b": {}}}, "kinds has 'b', which is not in pattern"),
        ({"kinds": {"b": {}}}, "kinds has 'b', which is not in pattern"),
        ({"pattern": ["a"] * 6, "kinds": {"a": {}}}, "pattern has 6 layers, but layers is 5"),
        ({"pattern": ["a"], "kinds": {"a": {"heads": 3}}}, "kinds.a: dim 64 is not divisible by heads 3"),
        ({"pattern": ["a"], "kinds": {"a": {"kv_heads": 3}}}, "kinds.a: heads 4 must be a multiple of kv_heads 3"),
        ({"pattern": ["a"], "kinds": {"a": {"head_dim": 15}}}, "kinds.a: rope needs an even head_dim"),
        ({"pattern": ["a"], "kinds": {"a": {"rope_share": 0.3}}}, r"kinds.a: rope_share 0.3 of a head is 4.8"),
        ({"pattern": ["a"], "kinds": {"a": {"positions": "learned"}}}, "kinds.a.positions: learned positions are"),
        ({"pattern": ["a"], "kinds": {"a": {"mixer": "none", "mlp": "none"}}}, "kinds.a: mixer and mlp are both none"),
        ({"pattern": ["a"], "kinds": {"a": {"dim": 32}}}, "dim"),
        ({"residual": "parallel", "norm_place": "both"}, "residual: parallel needs an mlp and norm_place: pre"),
        ({"mixer": "none", "residual": "parallel"}, "residual: parallel needs a mixer"),
        (
            {"pattern": ["a", "b"], "kinds": {"a": {}, "b": {"mixer": "none", "sliding_window": 8}}},
            "kinds.b: sliding_window needs a mixer with attention, and mixer is none",
        ),
        (
            {"pattern": ["a", "b"], "kinds": {"a": {}, "b": {"mlp": "none", "ffn_dim": 48}}},
            "kinds.b: ffn_dim needs an mlp, and mlp is none",
        ),
        ({"positions": "none", "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling needs positions: rope"),
        (
            {"attention_scale": 0.1, "init": {"scheme": "mup", "mup_base_dim": 32}},
            "attention_scale and init.scheme: mup both set the factor",
        ),
        ({"norm": "layernorm", "norm_offset": 1.0}, "norm_offset needs norm: rmsnorm"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model(**keys)


def test_a_share_of_a_head_is_whole_but_for_its_last_bits() -> None:
    found = model(head_dim=200, rope_share=0.07)
    mixer = decoder_spec(found, 97, 64).layers[0].mixer
    assert mixer and mixer.rope and mixer.rope.dims == 14  # 0.07 * 200 > 14 as a float
