"""Multi-token prediction against its formula written out, against transformers, and documents against each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.config.parallel import PipelineConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.checkpoint.fingerprint import LATER_KEYS
from pipeline.train.model.context import Ahead
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import flops_per_token, num_parameters
from pipeline.train.model.init import is_layer_matrix, weight_std
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.parallel.compile import compile_layers
from pipeline.train.parallel.pipeline_stages import compute_costs, split_stages
from tests.train.model.test_layer_kinds import LENGTH, MODELS, VOCAB, Reference, built, section

DEPTH = 2
TEXT = torch.randint(VOCAB, (2, LENGTH + 1 + DEPTH), generator=torch.Generator().manual_seed(9))
"""Inputs, and what is predicted from them."""


def weights(depths: int = 1 + DEPTH) -> Tensor:
    """For the next token and each depth, [depths, B, S]; some are 0."""
    drawn = torch.rand(depths, *TEXT[:, :LENGTH].shape, generator=torch.Generator().manual_seed(4))
    return drawn.where(drawn > 0.2, 0.0)


def context(**keys: Any) -> Context:
    targets = [TEXT[:, 1 + depth : 1 + depth + LENGTH] for depth in range(1 + DEPTH)]
    first, *rest = weights()
    criterion = Criterion(targets[0], first, chunk_tokens=keys.pop("chunk_tokens", None))
    return Context(criterion=criterion, ahead=Ahead(torch.stack(targets[1:], 1), torch.stack(rest, 1)), **keys)


def reference(config: ModelConfig, model: Decoder) -> list[Tensor]:
    """Cross entropy [B, S] of the next token and of each depth."""
    formulas, w = Reference(config, model), dict(model.named_parameters())
    kinds = [config.layer(kind) for kind in config.layer_kinds]
    x = w["embedding.weight"][TEXT[:, :LENGTH]] * config.embedding_scale
    for index, kind in enumerate(kinds):
        x = formulas.layer(x, f"layers.{index}.", kind)
    streams = [formulas.norm(x, "norm")]
    for depth in range(DEPTH):
        name = f"mtp.{depth}."
        ahead = w["embedding.weight"][TEXT[:, 1 + depth : 1 + depth + LENGTH]] * config.embedding_scale
        both = (formulas.norm(ahead, f"{name}embedding_norm"), formulas.norm(streams[-1], f"{name}stream_norm"))
        x = torch.cat(both, -1) @ torch.cat([w[f"{name}of_{each}.weight"] for each in ("embedding", "stream")], 1).T
        streams.append(formulas.norm(formulas.layer(x, f"{name}layer.", kinds[-1]), f"{name}norm"))
    head = w["embedding.weight" if config.tie_embeddings else "head.weight"]
    return [
        F.cross_entropy(
            (stream @ head.T * config.logit_scale)[..., :VOCAB].transpose(1, 2),
            TEXT[:, 1 + depth : 1 + depth + LENGTH],
            reduction="none",
        )
        for depth, stream in enumerate(streams)
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_losses_and_gradients_are_those_of_the_formula(name: str, chunk_tokens: int | None) -> None:
    config = section(name, mtp={"depth": DEPTH})
    model = built(config)
    losses = model(TEXT[:, :LENGTH], context(chunk_tokens=chunk_tokens))
    expected = reference(config, model)
    for one, other in zip((losses.loss_BS, *losses.of_depths), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    total = (torch.stack(expected) * weights()).sum()
    ours, theirs = (torch.autograd.grad(each, list(model.parameters())) for each in (losses.total, total))
    for (parameter, _), one, other in zip(model.named_parameters(), ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-6, parameter


def test_transformers_computes_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no MtpModel")
    shape = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_multiple": 1}
    model = built(ModelConfig.model_validate({**shape, "mtp": {"depth": DEPTH}}))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "num_mtp_layers": DEPTH},
        )
    )
    mtp = layers.MtpModel(theirs, DEPTH)
    of_block = {
        **{"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.w1": "mlp.gate_proj"},
        **{"mlp.w3": "mlp.up_proj", "mlp.w2": "mlp.down_proj"},
        **{f"mixer.w{each}": f"self_attn.{each}_proj" for each in "qkvo"},
    }
    ours = {name.removesuffix(".weight"): value.detach() for name, value in model.named_parameters()}
    with torch.no_grad():
        for index in range(2):
            for one, other in of_block.items():
                theirs.model.layers[index].get_parameter(f"{other}.weight").copy_(ours[f"layers.{index}.{one}"])
        for one, tensor in (("embedding", theirs.model.embed_tokens), ("norm", theirs.model.norm)):
            tensor.weight.copy_(ours[one])
        theirs.lm_head.weight.copy_(ours["head"])
        for depth, layer in enumerate(mtp.layers):
            name = f"mtp.{depth}."
            for one, other in of_block.items():
                layer.mtp_block.get_parameter(f"{other}.weight").copy_(ours[f"{name}layer.{one}"])
            layer.enorm.weight.copy_(ours[f"{name}embedding_norm"])
            layer.hnorm.weight.copy_(ours[f"{name}stream_norm"])
            layer.post_norm.weight.copy_(ours[f"{name}norm"])
            layer.eh_proj.weight.copy_(torch.cat((ours[f"{name}of_embedding"], ours[f"{name}of_stream"]), 1))
        losses = model(TEXT[:, :LENGTH], context())
        stream = theirs.model(TEXT[:, :LENGTH]).last_hidden_state
        for depth, loss in enumerate(losses.of_depths):
            ahead, targets = (TEXT[:, first : first + LENGTH] for first in (1 + depth, 2 + depth))
            positions = torch.arange(1 + depth, 1 + depth + LENGTH)[None]
            stream = mtp.forward_layer(depth, stream, positions, None, input_ids=ahead)
            expected = F.cross_entropy(theirs.lm_head(stream).transpose(1, 2), targets, reduction="none")
            torch.testing.assert_close(loss, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_targets_within_documents_are_computed_as_if_these_were_alone(name: str) -> None:
    model, cut = built(section(name, mtp={"depth": DEPTH})), 10
    bounds = torch.zeros(2, LENGTH, dtype=torch.int64)
    bounds[:, cut:] = cut
    together: TokenLosses = model(TEXT[:, :LENGTH], context(bounds_BS=bounds))
    for first, end in ((0, cut), (cut, LENGTH + 1 + DEPTH)):
        length = end - first - 1 - DEPTH  # inputs with all targets in the document
        pieces = [TEXT[:, first + depth : first + depth + length] for depth in range(2 + DEPTH)]
        ones = torch.ones(2, length)
        criterion = Criterion(pieces[1], ones)
        ahead = Ahead(torch.stack(pieces[2:], 1), torch.stack([ones] * DEPTH, 1))
        alone: TokenLosses = model(pieces[0], Context(criterion=criterion, ahead=ahead))
        for one, other in zip(together.of_depths, alone.of_depths, strict=True):
            torch.testing.assert_close(one[:, first : first + length], other, atol=2e-5, rtol=1e-4)


def test_logits_are_those_without_it() -> None:
    config = section("branches", mtp={"depth": DEPTH})
    model, plain = built(config), Decoder(decoder_spec(section("branches"), VOCAB, 64))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")})
    tokens = TEXT[:, :LENGTH]
    assert torch.equal(model(tokens, Context()), plain(tokens, Context()))
    states = model.new_states(2)
    torch.testing.assert_close(model(tokens, Context(states=states)), plain(tokens, Context()), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_products_are_counted(name: str) -> None:
    plain, config = section(name), section(name, mtp={"depth": DEPTH})
    model, spec = built(config), decoder_spec(plain, VOCAB, 64)
    assert num_parameters(model.spec) == sum(parameter.numel() for parameter in model.parameters())
    last = decoder_spec(plain.model_copy(update={"layers": 4}), VOCAB, 64)
    assert spec.layers[:-1] == last.layers
    layer = flops_per_token(spec, LENGTH, causal=True) - flops_per_token(last, LENGTH, causal=True)
    more = DEPTH * (layer + 3 * (2 * 2 * 32 * 32 + 2 * 32 * VOCAB))
    whole = flops_per_token(model.spec, LENGTH, causal=True)
    assert whole == pytest.approx(flops_per_token(spec, LENGTH, causal=True) + more)
    stages = split_stages(model.spec, 2, PipelineConfig(), LENGTH)
    assert sum(compute_costs(model.spec, stages, LENGTH)) == pytest.approx(whole / 3)


def test_the_last_stage_has_fewer_layers() -> None:
    shape = {"layers": 8, "dim": 32, "heads": 4, "vocab_multiple": 1}
    found = []
    for keys in ({}, {"mtp": {"depth": DEPTH}}):
        spec = decoder_spec(ModelConfig.model_validate({**shape, **keys}), VOCAB, 64)
        found.append([len(stage.part.layers) for stage in split_stages(spec, 2, PipelineConfig(), LENGTH)])
    assert found == [[4, 4], [5, 3]]


def test_initial_weights_have_the_rules_of_layers() -> None:
    config = section("branches", mtp={"depth": 1})
    spec = decoder_spec(config, VOCAB, 64)
    assert weight_std("mtp.0.of_stream.weight", spec, config.init) == 0.02
    assert weight_std("mtp.0.layer.mixer.wo.weight", spec, config.init) == 0.02 / 10**0.5
    assert all(is_layer_matrix(f"mtp.0.{name}.weight", spec) for name in ("of_embedding", "layer.mixer.wq"))
    assert not is_layer_matrix("mtp.0.norm.weight", spec)
    assert "mtp" in LATER_KEYS


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_share_what_is_compiled_for_layers() -> None:
    config = section("norms, windows, rope", mtp={"depth": DEPTH})
    plain, model = built(config), built(config)
    compile_layers(model, RecomputeConfig())
    found, expected = (each(TEXT[:, :LENGTH], context()) for each in (model, plain))
    torch.testing.assert_close(found.total, expected.total, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(config.kinds)
