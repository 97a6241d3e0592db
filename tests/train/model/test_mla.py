"""Latent attention against transformers' DeepSeek-V3: outputs, gradients, names and order of rows, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.config.train import Fp8Config, RecomputeConfig
from pipeline.train.fp8.matrices import fp8_matrices
from pipeline.train.huggingface.llama_like import LLAMA_NAMES
from pipeline.train.huggingface.tensors import TensorMapping, map_rules
from pipeline.train.model.context import Context, LayerContext
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import lr_scale, weight_std
from pipeline.train.model.kernels.attention_mask import AttentionMask, Terms
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.mixers.mla.module import LatentAttention
from pipeline.train.model.mixers.mla.spec import MlaSpec
from pipeline.train.model.part_spec import CpTransfer, Reach
from pipeline.train.model.states import KVCache
from pipeline.train.rules.layout import check_layout

DIM, HEADS, LENGTH = 24, 3, 40
TOLERANCE = 1e-5
"""Relative to the largest value of a tensor."""
MLA = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 12, "value_dim": 6}
YARN = {"factor": 32.0, "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}
V3 = {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}


def their_config(q_rank: int | None, yarn: dict[str, float]) -> DeepseekV3Config:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 150.0}
    if yarn:
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": 64, **yarn}
    return DeepseekV3Config(
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=MLA["kv_rank"],
        q_lora_rank=q_rank,
        qk_nope_head_dim=MLA["nope_dim"],
        qk_rope_head_dim=MLA["rope_dim"],
        v_head_dim=MLA["value_dim"],
        rope_parameters=rope,
        max_position_embeddings=64 * 32,
        attn_implementation="eager",
    )


def our_model(q_rank: int | None, yarn: dict[str, float], **keys: Any) -> ModelConfig:
    scaling = {"type": "yarn", "original_max_positions": 64, **yarn} if yarn else None
    model = {"layers": 1, "dim": DIM, "heads": HEADS, "norm_eps": 1e-6, "rope_theta": 150.0, "rope_scaling": scaling}
    return ModelConfig.model_validate(
        {**model, "mixer": "mla", "mla": {**MLA, "q_rank": q_rank}, "mlp": "none", **keys}
    )


def mixer_of(decoder: Decoder) -> LatentAttention:
    mixer = decoder.layers["0"].get_submodule("mixer")
    assert isinstance(mixer, LatentAttention)
    return mixer


def mapping_of(mixer: LatentAttention) -> TensorMapping:
    """Theirs and ours within a layer."""
    shapes = {f"layers.0.mixer.{name}": tuple(value.shape) for name, value in mixer.named_parameters()}
    return map_rules(LLAMA_NAMES.of_layer("0", {"mixer": mixer.spec}), shapes, vocab_size=0)


def close(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert actual is not None and expected is not None, name
    assert actual.shape == expected.shape, name
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max(), name


@pytest.mark.parametrize("q_rank", [None, 10])
@pytest.mark.parametrize("yarn", [{}, YARN], ids=["plain", "yarn"])
def test_outputs_and_gradients_are_those_of_transformers(q_rank: int | None, yarn: dict[str, float]) -> None:
    config = their_config(q_rank, yarn)
    theirs, rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in theirs.parameters():
            value.normal_(std=1.0 if value.ndim == 1 else DIM**-0.5, generator=generator)
    decoder = Decoder(decoder_spec(our_model(q_rank, yarn), 50, LENGTH))
    ours = mixer_of(decoder)
    before, mapping = "model.layers.0.self_attn.", mapping_of(ours)
    of_theirs = {before + name: value.detach() for name, value in theirs.named_parameters()}
    assert of_theirs.keys() == mapping.theirs.keys()
    assert {name: tuple(value.shape) for name, value in of_theirs.items()} == mapping.their_shapes

    converted = {name: mapping.to_ours(name, of_theirs) for name in mapping.ours}
    for name, value in of_theirs.items():
        assert torch.equal(mapping.to_theirs(name, converted), value), "both ways bit for bit"
    ours.load_state_dict({name.removeprefix("layers.0.mixer."): value for name, value in converted.items()})

    x_BSD, weights_BSD = (torch.randn(2, LENGTH, DIM, generator=generator) for _ in range(2))
    in_ours, in_theirs = (x_BSD.clone().requires_grad_() for _ in range(2))
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    turns = rotary(in_theirs, torch.arange(LENGTH)[None])
    expected = theirs(in_theirs, position_embeddings=turns, attention_mask=hidden)[0]
    actual = ours(in_ours, context_of(decoder))
    close(actual, expected, "output")
    for out in (actual, expected):
        (out * weights_BSD).sum().backward()
    close(in_ours.grad, in_theirs.grad, "input")
    gradients = {f"layers.0.mixer.{name}": value.grad for name, value in ours.named_parameters()}
    for name, value in theirs.named_parameters():
        close(mapping.to_theirs(before + name, gradients), value.grad, name)  # type: ignore[arg-type]


def test_rows_without_rope_are_not_permuted() -> None:
    mapping = mapping_of(mixer_of(Decoder(decoder_spec(our_model(None, {}, positions="none"), 50, LENGTH))))
    for name in ("q_proj", "kv_a_proj_with_mqa"):
        theirs = torch.arange(float(mapping.their_shapes[f"model.layers.0.self_attn.{name}.weight"][0]))[:, None]
        found = [
            mapping.to_ours(ours, {part.theirs: theirs.expand(-1, DIM)})
            for ours, part in mapping.ours.items()
            if name in part.theirs
        ]
        assert torch.equal(torch.cat(found)[:, :1], theirs)


def context_of(decoder: Decoder) -> LayerContext:
    """What the decoder hands a layer in a pass over whole texts."""
    return decoder._prepare(torch.zeros(2, LENGTH, dtype=torch.long), Context())[2][0]


@torch.no_grad()
def test_a_cache_holds_latents_alone() -> None:
    decoder = Decoder(decoder_spec(our_model(10, YARN), 50, LENGTH))
    states = decoder.new_states(2, max_length=LENGTH)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
    whole = decoder(tokens, Context())[..., :50]
    prompt = decoder(tokens[:, : LENGTH - 2], Context(states=states))[..., :50]
    close(prompt, whole[:, : LENGTH - 2], "prompt")
    for place in (LENGTH - 2, LENGTH - 1):
        close(
            decoder(tokens[:, place : place + 1], Context(states=states))[..., :50], whole[:, place : place + 1], "step"
        )
    (cache,) = states.layers
    assert isinstance(cache, KVCache) and cache._memory is not None
    assert sum(held[0, 0].numel() for held in cache._memory) == MLA["kv_rank"] + MLA["rope_dim"]


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (20, 6), (8, 16)])
@pytest.mark.parametrize("reach", [Reach(), Reach.window(5), Reach(None, None)], ids=["causal", "window", "full"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_values_of_another_size_than_keys(
    head_dim: int, value_dim: int, reach: Reach, sinks: bool, cap: float | None
) -> None:
    """The kernel of CPUs, with and without tiles, and the way in which a GPU is fed."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 17, HEADS, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in (head_dim, head_dim, value_dim)
    )
    sinks_H = torch.randn(HEADS, generator=generator, dtype=torch.float64) if sinks else None
    mask = AttentionMask.of(2, (0, 17), reach, torch.device("cpu"))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    distance = torch.arange(17)[:, None] - torch.arange(17)
    seen = torch.ones(17, 17, dtype=torch.bool) if reach.ahead is None else distance >= 0
    seen &= distance <= (16 if reach.back is None else reach.back)
    of_sinks = torch.full((HEADS,), -torch.inf, dtype=torch.float64) if sinks_H is None else sinks_H
    scores = torch.cat((of_sinks[:, None, None].expand(2, HEADS, 17, 1), scores.masked_fill(~seen, -torch.inf)), dim=-1)
    expected = torch.einsum("bhqk,bkhv->bqhv", scores.softmax(-1)[..., 1:], v)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    of_expected = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for kernel in (Sdpa(), Sdpa(on_gpu=True)):
        found = kernel(q, k, v, kernel.prepare(mask), Terms(0.3, cap), sinks_H)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), (q, k, v)), of_expected)


def test_what_does_not_fit_a_layout_is_refused_by_name() -> None:
    def config(*, backend: str = "auto", **parallel: Any) -> Config:
        train = {
            "duration": "1 steps",
            "sequence_length": 64,
            "optimizer": {"lr": 1e-3},
            "attention": {"backend": backend},
        }
        return Config.model_validate(
            {
                "run": {"dir": "x"},
                "data": {"sources": [{"name": "s", "type": "text", "paths": ["a"]}]},
                "tokenizer": {"train": {"vocab_size": 300}},
                "model": our_model(None, {}, heads=6).model_dump(exclude_unset=True),
                "train": {**train, "batch_size": 4, "precision": {"compute": "bf16"}},
                "parallel": parallel,
            }
        )

    assert check_layout(config(tp=2, cp=2), 4).cp == 2
    with pytest.raises(UserError, match="model.heads=6 cannot be cut over parallel.tp=4"):
        check_layout(config(tp=4), 4)
    with pytest.raises(
        UserError, match="model.heads=6 cannot be cut over parallel.tp=2 x parallel.cp=2 with cp_method"
    ):
        check_layout(config(tp=2, cp=2, cp_method="ulysses"), 4)
    with pytest.raises(UserError, match="but this model's is 20: change the sizes in model.mla, or train.attention"):
        check_layout(config(backend="flash"), 1)


def test_numbers_of_v3() -> None:
    model = our_model(None, {}, dim=7168, heads=128, mla=V3, init={"scheme": "mup", "mup_base_dim": 1792})
    spec = decoder_spec(model, 50, 4096)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, MlaSpec) and mixer.scale == 8 / 192
    whole = 7168 * (1536 + 512 + 64)
    heads = 128 * (1536 * 192 + 512 * 256 + 7168 * 128)
    assert [mixer.parameters(tp) for tp in (1, 8)] == [whole + heads + 2048, whole + heads // 8 + 2048]
    assert list(mixer.partial_gradients(8)) == [1536, 512, 1536 * 7168, 512 * 7168, 64 * 7168]
    assert mixer.extra_flops(4096, causal=True) == 2 * 128 * (192 + 128) * 2048
    made = 2 * 512 * 128 * 256
    assert mixer.cp_transfer("all_gather", 8, 4) == CpTransfer("latents and rotary keys", 1, 4 * 576, 3 * made)
    assert mixer.cp_transfer("all_gather", 1, 1).repeated_flops == 0
    assert mixer.cp_transfer("ulysses", 8, 4) == CpTransfer("queries, keys, values, outputs", 2, 16 * 2 * 320)
    chosen = fp8_matrices(Fp8Config(min_size=64), spec, tp=8)[0]
    assert [each.name for each in chosen] == [f"mixer.{name}" for name in "wqa wqb wkva wkr wkb wvb wo".split()]
    assert [(each.rows, each.columns) for each in chosen[:3]] == [(1536, 7168), (3072, 1536), (512, 7168)]
    assert weight_std("layers.0.mixer.wkb.weight", spec, model.init) == 0.02 / 2
    assert lr_scale("layers.0.mixer.wkva.weight", spec, model.init) == 0.25


@pytest.mark.parametrize("q_rank", [None, 10])
def test_kept_numbers_are_those_that_autograd_keeps(q_rank: int | None) -> None:
    """Besides input and output. Values are as large as keys, since the kernel of CPUs would fill up smaller ones."""
    sizes = {**MLA, "q_rank": q_rank, "value_dim": 20}
    decoder = Decoder(decoder_spec(our_model(q_rank, {}, heads=8, mla=sizes), 50, 256))
    mixer, kept = mixer_of(decoder), dict[int, int]()
    context = decoder._prepare(torch.zeros(1, 256, dtype=torch.long), Context())[2][0]
    skipped = {value.untyped_storage().data_ptr() for value in (*mixer.parameters(), *(context.rope or ()))}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in skipped:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    x_BSD = torch.randn(1, 256, DIM, requires_grad=True)
    skipped.add(x_BSD.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = mixer(x_BSD, context)
    assert out.requires_grad
    counted = mixer.spec.kept_numbers(1)
    assert counted <= sum(kept.values()) / 256 <= 1.1 * counted


def test_recomputation_keeps_what_is_counted() -> None:
    model = our_model(10, {})
    mixer = decoder_spec(model, 50, 256).layers[0].mixer
    assert mixer is not None
    keep = RecomputeConfig(mode="selective").keep
    products = 10 + 16 + 12 + HEADS * (20 + 8 + 6)
    assert mixer.kept_results(["attention", "matmul"], 1) == products + HEADS * 6
    assert mixer.kept_results(keep, 1) >= HEADS * 6
