"""Scaled rotary frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from pipeline.config.layers.layer import RopeScalingConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.part_spec import RopeSpec, softmax_factor
from pipeline.train.model.positions.rope import rope_frequencies

DEEPSEEK = {"type": "yarn", "factor": 40, "original_max_positions": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
SCALINGS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "linear": (64, 1e4, {"type": "linear", "factor": 4}),
    "llama3": (128, 5e5, {"type": "llama3", "factor": 8, "original_max_positions": 8192}),
    "yarn": (128, 1e6, {"type": "yarn", "factor": 4, "original_max_positions": 32768}),
    "yarn of gpt-oss": (
        64,
        150000.0,
        {"type": "yarn", "factor": 32, "original_max_positions": 4096, "truncate": False},
    ),
    "yarn of deepseek": (64, 1e4, DEEPSEEK),
    "mscales that differ": (64, 1e4, {**DEEPSEEK, "mscale": 0.5, "mscale_all_dim": 0.707, "truncate": False}),
    "a factor that is given": (64, 1e4, {**DEEPSEEK, "attention_factor": 1.25}),
    "a shorter context": (64, 1e4, {**DEEPSEEK, "factor": 0.5}),
    "other limits": (
        32,
        500.0,
        {
            "type": "yarn",
            "factor": 3,
            "original_max_positions": 512,
            "beta_fast": 20.5,
            "beta_slow": 2.5,
            "truncate": False,
        },
    ),
}
"""Size of a head, base and scaling."""


def theirs(head_dim: int, theta: float, scaling: dict[str, Any]) -> LlamaConfig:
    names = {"type": "rope_type", "original_max_positions": "original_max_position_embeddings"}
    # As `low_freq_factor` and the like have no defaults there, all keys are given that decide the frequencies.
    usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling["type"] == "llama3" else {}
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters={"rope_theta": theta, **usual, **{names.get(key, key): each for key, each in scaling.items()}},
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factors_are_those_of_transformers(name: str) -> None:
    head_dim, theta, scaling = SCALINGS[name]
    config = theirs(head_dim, theta, scaling)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["type"]](config, torch.device("cpu"))
    spec = RopeSpec(head_dim, theta, RopeScalingConfig.model_validate(scaling))
    found, own = rope_frequencies(spec, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert own == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_factor_on_attention_is_that_of_deepseek(name: str) -> None:
    head_dim, theta, scaling = SCALINGS[name]
    shape = {"layers": 1, "dim": 4 * head_dim, "heads": 4, "rope_theta": theta}
    model = ModelConfig.model_validate({**shape, "rope_scaling": scaling})
    expected = yarn_apply_mscale(theirs(head_dim, theta, scaling).rope_parameters, head_dim**-0.5)
    assert AttentionSpec.of(model, model).scale == pytest.approx(expected, rel=1e-12)
    assert (softmax_factor(model.rope_scaling) > 1) == (scaling.get("mscale_all_dim", 0) > 0 and scaling["factor"] > 1)
    assert softmax_factor(None) == 1
