"""Mixtures of experts: routers of published families, the layer written out, losses that nothing but tokens changes."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.context import Context, LayerContext
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import active_parameters, num_parameters
from pipeline.train.model.init import init_weights
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.mlps.experts.dispatch import DispatchOrder
from pipeline.train.model.mlps.experts.module import Experts
from pipeline.train.model.mlps.experts.router import Router
from pipeline.train.model.mlps.experts.routing import Routed, Routing
from pipeline.train.model.mlps.experts.spec import ExpertsSpec
from pipeline.train.model.recompute import Recompute

DIM = 32
CONTEXT = LayerContext(None, None, None, None, None, Sdpa())

V3 = {"score": "sigmoid", "score_bias": True, "scale": 2.5, "groups": 4, "top_groups": 2}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral.modeling_mixtral.MixtralTopKRouter": ({}, {}),
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter": ({}, {"norm_topk_prob": True}),
    "olmoe.modeling_olmoe.OlmoeTopKRouter": ({"normalize": False}, {"norm_topk_prob": False}),
    "gpt_oss.modeling_gpt_oss.GptOssTopKRouter": ({"router_bias": True}, {}),
    "deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter": (
        {"normalize": False, "scale": 16.0, "groups": 4, "top_groups": 2, "group_score": "max"},
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter": (
        V3,
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter": (
        {"score": "sigmoid", "score_bias": True},
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    ),
}
"""Class in transformers -> keys of `experts`, and of its config."""


def spec_of(**experts: Any) -> ExpertsSpec:
    keys = {"count": 8, "top_k": 3, "ffn_dim": 24, **experts}
    model = ModelConfig.model_validate({"layers": 1, "dim": DIM, "heads": 4, "mlp": "experts", "experts": keys})
    (layer,) = decoder_spec(model, 64, 64).layers
    assert isinstance(layer.mlp, ExpertsSpec)
    return layer.mlp


@torch.no_grad()
def filled(module: Any, seed: int = 0) -> Any:
    """A module with random numbers in parameters and biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.05 if "score_bias" in name else 0.2))
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_choose_as_those_of_published_families(family: str) -> None:
    keys, theirs = FAMILIES[family]
    module, _, name = family.rpartition(".")
    config = SimpleNamespace(
        num_experts_per_tok=3,
        num_experts=12,
        num_local_experts=12,
        n_routed_experts=12,
        hidden_size=DIM,
        **theirs,
    )
    other = getattr(import_module(f"transformers.models.{module}"), name)(config)
    ours: Router = filled(Router(spec_of(count=12, **keys).router, DIM))
    bias = {} if ours.bias is None else {"bias": ours.bias}
    score_bias = {} if ours.score_bias is None else {"e_score_correction_bias": ours.score_bias}
    other.load_state_dict({"weight": ours.weight, **bias, **score_bias})
    x_TD = torch.randn(2000, DIM, generator=torch.Generator().manual_seed(1))
    choice = ours(x_TD)
    found = other(x_TD)
    weights, ids = (each.flatten(0, -2) for each in found[1:])
    places = ids.sort(-1)
    ours_sorted = choice.ids_TK.sort(-1)
    assert torch.equal(ours_sorted.values, places.values)
    torch.testing.assert_close(
        choice.gates_TK.gather(1, ours_sorted.indices), weights.gather(1, places.indices), rtol=1e-5, atol=1e-7
    )


def written_out(module: Experts, x_BSD: Tensor, ids_TK: Tensor) -> Tensor:
    """The layer an expert after the other, from the formulas of its keys."""
    spec, router, stacks = module.spec, module.router, module.experts
    x_TD = x_BSD.flatten(0, 1)
    logits_TE = x_TD @ router.weight.T + (0 if router.bias is None else router.bias)
    scores_TE = logits_TE.softmax(-1) if spec.router.score == "softmax" else logits_TE.sigmoid()
    gates_TK = scores_TE.gather(1, ids_TK)
    if spec.router.normalize:
        gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
    out_TD = torch.zeros_like(x_TD)
    for expert in range(spec.router.count):
        names = ("b1", "b3", "b2")
        b1, b3, b2 = (getattr(stacks, name)[expert] if spec.bias else 0 for name in names)
        gate, up = x_TD @ stacks.w1[expert].T + b1, x_TD @ stacks.w3[expert].T + b3
        if spec.clamp is None:
            hidden = F.silu(gate) * up
        else:
            limit, alpha = spec.clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = gate * torch.sigmoid(alpha * gate) * (up + 1)
        weight_T = (gates_TK * (ids_TK == expert)).sum(-1) * spec.router.scale
        out_TD = out_TD + weight_T[:, None] * (hidden @ stacks.w2[expert].T + b2)
    out_BSD = out_TD.view(x_BSD.shape)
    if spec.shared is not None:
        shared = module.shared(x_BSD)
        out_BSD = out_BSD + (shared * module.shared_gate(x_BSD).sigmoid() if spec.shared_gate else shared)
    return out_BSD


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"bias": True, "router_bias": True, "activation": "clamped_swiglu", "clamp": 0.3},
        {**V3, "shared_ffn_dim": 40, "shared_gate": True},
        {"count": 1, "top_k": 1, "normalize": False},
        {"count": 4, "top_k": 4, "shared_ffn_dim": 16},
    ],
)
def test_the_layer_is_the_sum_over_the_chosen_experts(keys: dict[str, Any]) -> None:
    module: Experts = filled(Experts(spec_of(**keys)))
    x_BSD = torch.randn(3, 10, DIM, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids_TK = module.router(x_BSD.flatten(0, 1)).ids_TK
    probe = torch.randn(3, 10, DIM, generator=torch.Generator().manual_seed(2))
    parameters = [x_BSD, *module.parameters()]
    ours = torch.autograd.grad((module(x_BSD, CONTEXT) * probe).sum(), parameters)
    expected = torch.autograd.grad((written_out(module, x_BSD, ids_TK) * probe).sum(), parameters)
    torch.testing.assert_close(module(x_BSD, CONTEXT), written_out(module, x_BSD, ids_TK), rtol=1e-5, atol=1e-5)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{}, {"bias": True, "activation": "clamped_swiglu"}], ids=str)
def test_double_precision_has_the_gradients_of_differences(more: dict[str, Any]) -> None:
    """Of a weight, in a direction; the router computes in fp32, so only what is behind it moves."""
    layer = filled(Experts(spec_of(**more))).double()
    x_BSD = torch.randn(2, 9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def total() -> Tensor:
        out_BSD: Tensor = layer(x_BSD, CONTEXT)
        assert out_BSD.dtype == torch.float64
        return out_BSD.square().sum()

    total().backward()
    for name, parameter in layer.named_parameters():
        if "router" in name:
            continue
        assert parameter.grad is not None
        with torch.no_grad():
            length = parameter.grad.norm()
            step = 1e-5 * parameter.grad / length
            parameter.add_(step)
            up = total()
            parameter.sub_(2 * step)
            slope = (up - total()) / 2e-5
            parameter.add_(step)
        assert float(slope) == pytest.approx(float(length), rel=1e-6), name


def test_rows_are_in_the_order_of_experts_and_counted_by_sample() -> None:
    ids_TK = torch.randint(0, 7, (30, 3), generator=torch.Generator().manual_seed(0))
    order = DispatchOrder.of(ids_TK, 5, 7)
    flat = ids_TK.flatten()
    assert torch.equal(flat[order.order_N], flat.sort(stable=True).values)
    assert torch.equal(order.order_N[order.inverse_N], torch.arange(90))
    expected = torch.stack([row.flatten().bincount(minlength=7) for row in ids_TK.chunk(5)])
    assert torch.equal(order.counts_BE, expected)


def routing(**changes: Any) -> Routing:
    return replace(Routing(4, 4, 10, 0.5, "sequence", 0.25), **changes)


def losses(module: Experts, x_BSD: Tensor, demand: Routing) -> tuple[dict[str, Tensor], Routed]:
    """Gradients of the losses alone, and what the layer says of its choices."""
    routed: list[Routed] = []
    out_BSD = module(x_BSD, replace(CONTEXT, routing=demand, routed=routed))
    module.zero_grad()
    (out_BSD * 0).sum().backward()  # type: ignore[no-untyped-call]
    return {"router": module.router.weight.grad}, routed[0]


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_are_those_of_their_formulas(over: Any, score: str) -> None:
    module: Experts = filled(Experts(spec_of(score=score)))
    with torch.no_grad():
        module.router.loads.copy_(torch.arange(8.0) + 1)
    x_BSD = torch.randn(4, 10, DIM, generator=torch.Generator().manual_seed(1))
    gradients, routed = losses(module, x_BSD, routing(over=over))
    weight = module.router.weight.detach().clone().requires_grad_()
    logits_BSE = x_BSD @ weight.T
    scores = logits_BSE.softmax(-1) if score == "softmax" else logits_BSE.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(shares).scatter(2, scores.topk(3).indices, 1.0)
    of_sample = (8 / (3 * 10) * chosen.sum(1) * shares.mean(1)).sum(-1).mean()
    of_batch = (8 * module.router.loads / module.router.loads.sum() * shares.mean((0, 1))).sum()
    balance = of_sample if over == "sequence" else of_batch
    z = logits_BSE.logsumexp(-1).square().mean()
    (0.5 * balance + 0.25 * z).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(routed.balance, balance.detach())
    torch.testing.assert_close(routed.z, z.detach())
    torch.testing.assert_close(gradients["router"], weight.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(routed.counts_E, chosen.sum((0, 1)).long())


def test_losses_of_micro_batches_add_up_and_padding_changes_nothing() -> None:
    module: Experts = filled(Experts(spec_of()))
    x_BSD = torch.randn(4, 10, DIM, generator=torch.Generator().manual_seed(1))
    whole, of_whole = losses(module, x_BSD, routing())
    padded = torch.cat((x_BSD[3:], torch.full_like(x_BSD[:2], 1e3)))
    pieces = [losses(module, x_BSD[:3], routing(real=3)), losses(module, padded, routing(real=1))]
    torch.testing.assert_close(sum(each["router"] for each, _ in pieces), whole["router"], rtol=1e-4, atol=1e-7)
    assert torch.equal(sum(each.counts_E for _, each in pieces), of_whole.counts_E)
    assert pieces[1][1].rows == 30
    out = module(padded, replace(CONTEXT, routing=routing(real=1), routed=[]))
    assert not out[1:].any()


def test_a_batch_without_real_samples_has_gradients_of_zero() -> None:
    module: Experts = filled(Experts(spec_of(bias=True, shared_ffn_dim=8)))
    x_BSD = torch.randn(2, 10, DIM, generator=torch.Generator().manual_seed(1))
    gradients, routed = losses(module, x_BSD, routing(real=0))
    assert not gradients["router"].any() and not routed.counts_E.any()
    assert not module.experts.w1.grad.any()


def decoder(**keys: Any) -> Decoder:
    experts = {"count": 8, "top_k": 2, "ffn_dim": 16, "shared_ffn_dim": 24}
    model = {"layers": 2, "dim": DIM, "heads": 4, "mlp": "experts", "experts": experts, **keys}
    config = ModelConfig.model_validate(model)
    spec = decoder_spec(config, 100, 64)
    module = Decoder(spec)
    init_weights(module, spec, config.init, 0)
    return module


def test_parameters_are_counted() -> None:
    module = decoder()
    assert num_parameters(module.spec) == sum(parameter.numel() for parameter in module.parameters())
    assert active_parameters(module.spec) == num_parameters(module.spec) - 2 * 6 * 3 * 16 * DIM


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_gives_the_same_bits(mode: Any) -> None:
    tokens = torch.randint(0, 100, (3, 16), generator=torch.Generator().manual_seed(0))
    context = Context(routing=Routing(2, 2, 16, 0.01, "sequence", 0.001))
    gradients = []
    for recompute in (RecomputeConfig(), RecomputeConfig(mode=mode)):
        module = decoder()
        for block in module.layers.values():
            block.recompute = Recompute.of_layer(recompute, block.index, block.spec)
            block.mlp.experts.recompute = Recompute.of_experts(recompute, block.index, block.spec)
        out = module(tokens, context)
        out[..., :100].square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_what_was_chosen_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    choose = Router.choose

    def noisy(self: Router, scores_TE: Tensor) -> Tensor:
        calls.append(choose(self, scores_TE + torch.rand_like(scores_TE)))
        return calls[-1]

    monkeypatch.setattr(Router, "choose", noisy)
    module = decoder()
    for block in module.layers.values():
        block.recompute = Recompute.of_layer(RecomputeConfig(mode="full"), block.index, block.spec)
    out = module(torch.randint(0, 100, (2, 16)), Context(routing=Routing(2, 2, 16, 0.01, "sequence", 0.0)))
    out[..., :100].sum().backward()
    assert len(calls) == 2


def test_forced_tokens_are_dealt_in_turn() -> None:
    module: Experts = filled(Experts(spec_of()))
    module.router.force = True
    routed: list[Routed] = []
    module(torch.randn(2, 8, DIM), replace(CONTEXT, routed=routed))
    assert routed[0].counts_E.tolist() == [6] * 8
