"""Layers of several kinds against the same formulas written out with plain operations on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig, head_size
from pipeline.config.train import RecomputeConfig
from pipeline.train.checkpoint.fingerprint import LATER_KEYS
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.model.init import init_weights
from pipeline.train.parallel.compile import compile_layers
from tests import tiers
from tests.train.model.decoders import check_states, uneven_decoder
from tests.train.parallel.layouts import FAMILIES

VOCAB, LENGTH = 97, 24

MODELS: dict[str, dict[str, Any]] = {
    "norms, windows, rope": {
        "kv_heads": 2,
        "norm_offset": 1.0,
        "embedding_scale": 6.0,
        "residual_scale": 0.7,
        "pattern": ["near", "far", "far"],
        "kinds": {
            "near": FAMILIES["mixed"]["model.kinds"]["near"],
            "far": {
                "positions": "none",
                "kv_heads": 1,
                "head_dim": 6,
                "qk_norm": True,
                "norm_place": "output",
                "mlp": "relu2",
                "attention_scale": 0.3,
                "attention_soft_cap": 0.8,
            },
        },
    },
    "branches": {
        "norm": "layernorm",
        "norm_bias": False,
        "logit_scale": 0.25,
        "tie_embeddings": True,
        "pattern": ["shared", "beside", "mlp", "post"],
        "kinds": {
            "shared": {"residual": "parallel_shared", "mlp": "gelu_exact", "bias": "mlp"},
            "beside": {"residual": "parallel", "mlp": "geglu_exact", "ffn_dim": 40},
            "mlp": {"mixer": "none", "norm_place": "both"},
            "post": {"mlp": "none", "norm_place": "post", "bias": "all"},
        },
    },
    "latents": {
        "mixer": "mla",
        "norm_offset": 0.5,
        "pattern": ["latent", "near", "grouped", "unturned"],
        "kinds": {
            "latent": {"mla": {"kv_rank": 12, "q_rank": 10, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}},
            "near": {
                "heads": 3,
                "mla": {"kv_rank": 6, "nope_dim": 3, "rope_dim": 2, "value_dim": 7},
                "rope_theta": 300.0,
                "sliding_window": 5,
                "sinks": True,
                "norm_place": "both",
            },
            "grouped": {"mixer": "attention", "kv_heads": 2},
            "unturned": {
                "mla": {"kv_rank": 8, "nope_dim": 4, "rope_dim": 3, "value_dim": 4},
                "positions": "none",
                "attention_scale": 0.3,
                "attention_soft_cap": 0.8,
            },
        },
    },
}


def section(name: str, **keys: Any) -> ModelConfig:
    shape = {"layers": 5, "dim": 32, "heads": 4, "ffn_dim": 48, "vocab_multiple": 20}
    return ModelConfig.model_validate({**shape, **MODELS[name], **keys})


def built(config: ModelConfig) -> Decoder:
    return uneven_decoder(config, VOCAB, seed=3)


class Reference:
    """The model by its `model:` section and its weights alone."""

    def __init__(self, config: ModelConfig, model: Decoder) -> None:
        self.config = config
        self.weights = dict(model.named_parameters())

    def logits(self, tokens_BS: Tensor) -> Tensor:
        config, w = self.config, self.weights
        x = w["embedding.weight"][tokens_BS] * config.embedding_scale
        for index, kind in enumerate(config.layer_kinds):
            x = self.layer(x, f"layers.{index}.", config.layer(kind))
        head = w["embedding.weight"] if config.tie_embeddings else w["head.weight"]
        return (self.norm(x, "norm") @ head.T * config.logit_scale)[..., :VOCAB]

    def layer(self, x: Tensor, name: str, layer: LayerConfig) -> Tensor:
        def mixer(x: Tensor) -> Tensor:
            formula = self.latent_attention if layer.mixer == "mla" else self.attention
            return formula(x, f"{name}mixer.", layer)

        def mlp(x: Tensor) -> Tensor:
            return self.mlp(x, f"{name}mlp.", layer)

        def add(x: Tensor, place: str, part: Any) -> Tensor:
            y = self.norm(x, f"{name}{place}_norm") if layer.norm_place in ("pre", "both") else x
            y = part(y)
            y = self.norm(y, f"{name}{place}_out_norm") if layer.norm_place in ("output", "both") else y
            x = x + self.config.residual_scale * y
            return self.norm(x, f"{name}{place}_sum_norm") if layer.norm_place == "post" else x

        if layer.residual != "sequential":
            first = self.norm(x, f"{name}mixer_norm")
            second = first if layer.residual == "parallel_shared" else self.norm(x, f"{name}mlp_norm")
            return x + mixer(first) + mlp(second)
        x = x if layer.mixer == "none" else add(x, "mixer", mixer)
        return x if layer.mlp == "none" else add(x, "mlp", mlp)

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        normalized = x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        offset = 0 if self.config.norm == "layernorm" else self.config.norm_offset
        return normalized * (self.weights[f"{name}.weight"] + offset)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def attention(self, x: Tensor, name: str, layer: LayerConfig) -> Tensor:
        size = head_size(layer, self.config.dim)
        q, k, v = (self.linear(x, f"{name}w{each}") for each in "qkv")
        if layer.qk_norm == "full":
            q, k = self.norm(q, f"{name}q_norm"), self.norm(k, f"{name}k_norm")
        q, k, v = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in (q, k, v))
        if layer.qk_norm is True:
            q, k = self.norm(q, f"{name}q_norm"), self.norm(k, f"{name}k_norm")
        if layer.positions == "rope":
            share = layer.rope_share * size
            q, k = self.turned(q, layer, int(share)), self.turned(k, layer, int(share))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        out = self.attended(q, k, v, name, layer, size)
        if layer.output_gate:
            out = out * torch.sigmoid(self.linear(x, f"{name}wg"))
        return self.linear(out, f"{name}wo")

    def latent_attention(self, x: Tensor, name: str, layer: LayerConfig) -> Tensor:
        mla = layer.mla
        assert mla is not None

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (layer.heads, -1)).transpose(1, 2)

        if mla.q_rank is None:
            q = heads(self.linear(x, f"{name}wq"))
        else:
            q = heads(self.linear(self.norm(self.linear(x, f"{name}wqa"), f"{name}q_norm"), f"{name}wqb"))
        latent = self.norm(self.linear(x, f"{name}wkva"), f"{name}kv_norm")
        q, turned_q = q[..., : mla.nope_dim], q[..., mla.nope_dim :]
        turned_k = self.linear(x, f"{name}wkr")[:, None]
        if layer.positions == "rope":
            turned_q, turned_k = (self.turned(each, layer, mla.rope_dim) for each in (turned_q, turned_k))
        k = torch.cat((heads(self.linear(latent, f"{name}wkb")), turned_k.repeat(1, layer.heads, 1, 1)), -1)
        v, q = heads(self.linear(latent, f"{name}wvb")), torch.cat((q, turned_q), -1)
        return self.linear(self.attended(q, k, v, name, layer, mla.nope_dim + mla.rope_dim), f"{name}wo")

    def attended(self, q: Tensor, k: Tensor, v: Tensor, name: str, layer: LayerConfig, size: int) -> Tensor:
        scores = q @ k.transpose(-1, -2) * (layer.attention_scale or size**-0.5)
        if layer.attention_soft_cap is not None:
            scores = layer.attention_soft_cap * torch.tanh(scores / layer.attention_soft_cap)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        hidden = (distance < 0) | (distance >= (layer.sliding_window or LENGTH))
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer.sinks:  # a key more, whose value is 0
            sink = self.weights[f"{name}sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
            scores, v = torch.cat((scores, sink), -1), F.pad(v, (0, 0, 0, 1))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def turned(self, x: Tensor, layer: LayerConfig, dims: int) -> Tensor:
        half = dims // 2
        angles = torch.arange(x.shape[2])[:, None] * layer.rope_theta ** -(torch.arange(half) / half)
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones(()), angles)
        return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)

    def mlp(self, x: Tensor, name: str, layer: LayerConfig) -> Tensor:
        hidden = self.linear(x, f"{name}w1")
        if layer.mlp == "relu2":
            hidden = hidden.clamp(min=0) ** 2
        elif layer.mlp == "swiglu":
            hidden = hidden * torch.sigmoid(hidden)
        else:
            hidden = F.gelu(hidden, approximate="none" if layer.mlp.endswith("exact") else "tanh")
        if f"{name}w3.weight" in self.weights:
            hidden = hidden * self.linear(x, f"{name}w3")
        return self.linear(hidden, f"{name}w2")


TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 31 % VOCAB


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_formulas(name: str) -> None:
    config = section(name)
    model = built(config)
    logits = model(TOKENS, Context())[..., :VOCAB]
    expected = Reference(config, model).logits(TOKENS)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((each * weight).sum(), list(model.parameters())) for each in (logits, expected))
    for (parameter, _), one, other in zip(model.named_parameters(), ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-6, parameter


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_products_are_counted(name: str) -> None:
    config = section(name)
    model = built(config)
    assert num_parameters(model.spec) == sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(parameter.numel() for key, parameter in model.named_parameters() if parameter.ndim == 2)
    matrices += model.spec.vocab_size * 32 - (1 if config.tie_embeddings else 2) * model.spec.vocab_padded * 32
    scores = 0.0
    for kind in config.layer_kinds:
        layer = config.layer(kind)
        if layer.mixer != "none":
            window = min(layer.sliding_window or LENGTH, LENGTH)
            sizes = 2 * head_size(layer, 32)
            if layer.mixer == "mla":
                assert layer.mla is not None
                sizes = layer.mla.nope_dim + layer.mla.rope_dim + layer.mla.value_dim
            scores += 2 * layer.heads * sizes * (window - window**2 / (2 * LENGTH))
    assert flops_per_token(model.spec, LENGTH, causal=True) == pytest.approx(3 * (2 * matrices + scores))


@pytest.mark.parametrize("name", MODELS)
def test_a_text_goes_on_from_its_states(name: str) -> None:
    """Prompts of unequal lengths, a row that joins and one that leaves, against whole passes."""
    check_states(built(section(name)), TOKENS, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_documents_are_computed_as_if_alone(name: str) -> None:
    model = built(section(name))
    bounds = torch.zeros(2, LENGTH, dtype=torch.int64)
    bounds[0, 10:] = 10
    together = model(TOKENS, Context(bounds_BS=bounds))[0, :, :VOCAB]
    for part in (slice(0, 10), slice(10, LENGTH)):
        alone = model(TOKENS[:1, part], Context())[0, :, :VOCAB]
        torch.testing.assert_close(together[part], alone, atol=2e-5, rtol=1e-4)


def test_equal_layers_written_as_kinds_have_the_same_names_and_weights() -> None:
    keys = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2}
    plain = ModelConfig.model_validate(keys)
    kinds = ModelConfig.model_validate({**keys, "kv_heads": 4, "pattern": ["a"], "kinds": {"a": {"kv_heads": 2}}})
    found = []
    for config in (plain, kinds):
        spec = decoder_spec(config, VOCAB, 64)
        model = Decoder(spec)
        init_weights(model, spec, config.init, 3)
        found.append(model.state_dict())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    assert {"pattern", "kinds"} <= set(LATER_KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers.first(1, ["norms, windows, rope", "latents"], rest="slow"))
@pytest.mark.usefixtures("fresh_compiler")
def test_layers_of_a_kind_share_what_is_compiled(name: str) -> None:
    config = section(name)
    plain, model = built(config), built(config)
    compile_layers(model, RecomputeConfig())
    found, expected = (each(TOKENS, Context())[..., :VOCAB] for each in (model, plain))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    of_found, of_expected = (
        torch.autograd.grad(logits.sin().sum(), list(each.parameters()))
        for logits, each in ((found, model), (expected, plain))
    )
    for one, other in zip(of_found, of_expected, strict=True):
        assert (one - other).abs().max() <= 1e-3 * other.abs().max() + 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(config.kinds)
