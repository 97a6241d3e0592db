"""Attention of GPT-OSS against transformers' own: sinks, windows in alternate layers, YaRN with fractions, biases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from pipeline.config.model import ModelConfig
from pipeline.train.model.context import Context, LayerContext
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec

DIM, HEADS, KV_HEADS, HEAD_DIM, WINDOW, LENGTH = 24, 6, 2, 16, 5, 40
TOLERANCE = 1e-4
"""Relative to the largest value of a tensor."""
# A context so short, and limits so close, that some frequencies stay, some are mixed and some scaled, by a ramp
# between fractions.
YARN = {"factor": 32.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}
NAMES = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}


def their_config() -> GptOssConfig:
    rope = {"rope_type": "yarn", "rope_theta": 150.0, "original_max_position_embeddings": 64, **YARN}
    return GptOssConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        rope_parameters=rope,
        attn_implementation="eager",
    )


def our_model() -> ModelConfig:
    """As a run file has the two layers, without the experts."""
    return ModelConfig.model_validate(
        {
            "layers": 2,
            "dim": DIM,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "mlp": "none",
            "bias": "attention",
            "sinks": True,
            "rope_theta": 150.0,
            "rope_scaling": {"type": "yarn", "original_max_positions": 64, **YARN},
            "pattern": ["window", "full"],
            "kinds": {"window": {"sliding_window": WINDOW}, "full": {}},
        }
    )


def close(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert actual is not None and expected is not None, name
    assert actual.shape == expected.shape, name
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max(), name


def mask(windowed: bool) -> Tensor:
    """What is added to the products: a query sees itself and those before it, within a window or all."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & ((distance < WINDOW) if windowed else True)
    return torch.zeros(LENGTH, LENGTH).masked_fill(~seen, -torch.inf)[None, None]


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_outputs_and_gradients(layer: int) -> None:
    config = their_config()
    assert config.layer_types == ["sliding_attention", "full_attention"]
    theirs, rotary = GptOssAttention(config, layer), GptOssRotaryEmbedding(config)
    generator = torch.Generator().manual_seed(layer)
    with torch.no_grad():
        for value in theirs.parameters():
            value.normal_(std=1.0 if value.ndim == 1 else DIM**-0.5, generator=generator)

    decoder = Decoder(decoder_spec(our_model(), 50, LENGTH))
    ours = decoder.layers[str(layer)].get_submodule("mixer")
    pairs = [(f"{mine}.{kind}", f"{their}.{kind}") for mine, their in NAMES.items() for kind in ("weight", "bias")]
    pairs.append(("sinks", "sinks"))
    named, theirs_named = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert dict(pairs).keys() == named.keys() and set(dict(pairs).values()) == theirs_named.keys()
    with torch.no_grad():
        for mine, their in pairs:
            named[mine].copy_(theirs_named[their])

    x_BSD = torch.randn(2, LENGTH, DIM, generator=generator)
    weights_BSD = torch.randn(2, LENGTH, DIM, generator=generator)
    in_ours, in_theirs = (x_BSD.clone().requires_grad_() for _ in range(2))
    turns = rotary(in_theirs, torch.arange(LENGTH)[None])
    expected = theirs(in_theirs, position_embeddings=turns, attention_mask=mask(windowed=layer == 0))[0]
    actual = ours(in_ours, context_of(decoder, layer))
    close(actual, expected, "output")
    for out in (actual, expected):
        (out * weights_BSD).sum().backward()
    close(in_ours.grad, in_theirs.grad, "input")
    for mine, their in pairs:
        close(named[mine].grad, theirs_named[their].grad, mine)


def context_of(decoder: Decoder, layer: int) -> LayerContext:
    """What the decoder hands a layer in a pass over whole texts."""
    return decoder._prepare(torch.zeros(2, LENGTH, dtype=torch.long), Context())[2][layer]
