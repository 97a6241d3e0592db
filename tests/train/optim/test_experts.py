"""Optimizers of experts: each matrix of a stack by itself, and on any layout what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.config.train import EmaConfig, MuonConfig
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import expert_orthogonal_flops, muon_parameters, orthogonal_flops
from pipeline.train.model.init import init_weights, is_layer_matrix, stack_of
from pipeline.train.optim.ema import Ema
from pipeline.train.optim.muon import orthogonalize, rate_factor
from pipeline.train.optim.muon_owners import group_of, has_whole_experts
from pipeline.train.optim.optimizers import Optimizers, _build, make_states
from pipeline.train.optim.stochastic_rounding import Rounding
from pipeline.train.parallel.parallelize import ParallelModel, build_model
from pipeline.train.torch_compat.core import guard_optimizer_step, local_shard, with_local
from tests.train.distributed import ranks
from tests.train.distributed.ranks import Ranks
from tests.train.one_process import config_of, setup_of
from tests.train.parallel import layouts

LR, DECAY, STEPS, WITHHELD = 1e-2, 0.1, 4, 2
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw-bf16": {"states": "bf16"},
    "muon": {"type": "muon"},
    "muon-bf16": {"type": "muon", "states": "bf16"},
}
# How FSDP places what expert parallelism has cut along the same dimension into two.
AFTER_EP2 = _StridedShard(0, split_factor=2)
Case = tuple[int, dict[str, int], tuple[Placement, ...]]
CASES: dict[str, Case] = {
    "ep2-efsdp2": (8, {"efsdp": 2, "ep": 2}, (AFTER_EP2, Shard(0))),
    "ep4": (8, {"efsdp": 1, "ep": 4}, (Shard(0), Shard(0))),
    "ep1-efsdp4": (8, {"efsdp": 4}, (Shard(0),)),
    "ep1-efsdp4-uneven": (6, {"efsdp": 4}, (Shard(0),)),
    "ep2-hsdp": (8, {"dp_replicate": 2, "efsdp": 1, "ep": 2}, (Replicate(), Shard(0), Shard(0))),
    "cut-ep2-efsdp2": (2, {"efsdp": 2, "ep": 2}, (Shard(1), Shard(0))),
    "cut-ep1-efsdp4": (2, {"efsdp": 4}, (Shard(1),)),
    "cut-hsdp": (1, {"dp_replicate": 2, "efsdp": 2}, (Replicate(), Shard(1))),
}
"""Experts, the axes of their mesh, and placements."""
QUICK = ("cut-ep2-efsdp2",)


def model_config(count: int) -> ModelConfig:
    experts = {"count": count, "top_k": 1, "ffn_dim": 24, "bias": True, "router_bias": True, "shared_ffn_dim": 16}
    shape = {"layers": 2, "dim": 16, "heads": 2, "mlp": "experts", "experts": experts, "vocab_multiple": 8}
    return ModelConfig.model_validate(shape)


def config(count: int, **optimizer: Any) -> Config:
    keys = {"lr": LR, "weight_decay": DECAY, **optimizer}
    return config_of(model_config(count), sequence_length=16, precision={"compute": "fp32"}, optimizer=keys)


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name) + sum(map(ord, name)))
    found = torch.randn(shape, generator=generator)
    if step == WITHHELD:
        found[0] = float("nan")
    return found


def part_on_ranks(count: int, axes: dict[str, int], placements: tuple[Placement, ...]) -> Decoder:
    """A model whose experts are on a mesh of their own, and all else on one of the same processes."""
    model = model_config(count)
    part = Decoder(decoder_spec(model, 61, 16))
    init_weights(part, part.spec, model.init, 1)
    experts = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    others = init_device_mesh("cpu", (prod(axes.values()),), mesh_dim_names=("shards",))
    for name, parameter in list(part.named_parameters()):
        of_expert = stack_of(name, part.spec) is not None
        mesh, where = (experts, placements) if of_expert else (others, (Shard(0),))
        spec = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        like = DTensor.from_local(torch.empty(0), mesh, where, **spec)
        own = layouts.own_part(like, parameter.detach())
        module, _, last = name.rpartition(".")
        sharded = nn.Parameter(DTensor.from_local(own, mesh, where, **spec))
        part.get_submodule(module).register_parameter(last, sharded)
    return part


def updated(
    count: int, axes: dict[str, int], placements: tuple[Placement, ...], keys: dict[str, Any]
) -> dict[str, Tensor]:
    """Weights and states after some steps with known gradients, whole."""
    part = part_on_ranks(count, axes, placements)
    parameters = dict(part.named_parameters())
    group = group_of(parameters["layers.0.mlp.experts.w1"].device_mesh)  # type: ignore[attr-defined]
    optimizers = _build(config(count, **keys), part, group)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            own = layouts.own_part(parameter, gradient(name, parameter.shape, step))
            parameter.grad = with_local(parameter, own)  # type: ignore[assignment]
        for optimizer in optimizers:
            guard_optimizer_step(optimizer, torch.tensor(float(step == WITHHELD)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    names = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in {**values, "weight": parameter.detach()}.items():
                found[f"{names[parameter]} {key}"] = (
                    value.full_tensor() if isinstance(value, DTensor) else value.clone()
                )
    return found


@pytest.fixture(scope="module")
def one() -> Callable[[int, str], dict[str, Tensor]]:
    """What one process computes, by number of experts and kind."""
    kept: dict[tuple[int, str], dict[str, Tensor]] = {}

    def get(count: int, kind: str) -> dict[str, Tensor]:
        if (count, kind) not in kept:
            (kept[count, kind],) = ranks.run(1, updated, count, {"efsdp": 1}, (Shard(0),), KINDS[kind])
        return kept[count, kind]

    return get


@pytest.fixture(scope="module")
def four() -> Iterator[Callable[[], Ranks]]:
    """Four connected processes, kept from one test to the next."""
    kept: list[Ranks] = []
    with ExitStack() as stack:

        def get() -> Ranks:
            if not kept or kept[-1].failed or kept[-1].calls > 8:
                kept.append(stack.enter_context(Ranks(4, connect=True)))
            return kept[-1]

        yield get


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_with_the_gradients_of_one_process_there_are_its_bits(
    one: Callable[[int, str], dict[str, Tensor]], four: Callable[[], Ranks], case: str
) -> None:
    count, axes, placements = CASES[case]
    spec = decoder_spec(model_config(count), 61, 16)
    for kind, keys in KINDS.items():
        expected = one(count, kind)
        for found in four().call(updated, count, axes, placements, keys):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                # torch's AdamW rounds the elements at the end of a shard, and those that it vectorizes, differently.
                alike = "muon" in kind and is_layer_matrix(name.split()[0], spec)
                torch.testing.assert_close(
                    value, expected[name], rtol=0 if alike else 1e-6, atol=0 if alike else 1e-8, msg=f"{kind} {name}"
                )


def _rounded(
    count: int, axes: dict[str, int], placements: tuple[Placement, ...]
) -> tuple[dict[str, Tensor], list[bool]]:
    """Stacks rounded on this process, whole; and for each whether whole experts are here."""
    part = part_on_ranks(count, axes, placements)
    stacks = {name: each for name, each in part.named_parameters() if each.ndim == 3}
    rounding = Rounding(stacks, 1)
    rounding.draw(torch.full((len(stacks),), 5.0))
    found = {}
    for name, stack in stacks.items():
        value = local_shard(stack.detach())
        into = torch.empty_like(value, dtype=torch.bfloat16)
        rounding.store(name, 0, value.clone(), into)
        found[name] = with_local(stack.detach(), into).full_tensor()  # type: ignore[attr-defined]
    return found, [has_whole_experts(each) for each in stacks.values()]  # type: ignore[arg-type]


@pytest.mark.guard
@pytest.mark.parallel
def test_what_is_rounded_up_does_not_depend_on_the_layout(four: Callable[[], Ranks]) -> None:
    for case in ("ep2-efsdp2", "ep1-efsdp4-uneven", "cut-ep2-efsdp2", "cut-hsdp"):
        count, axes, placements = CASES[case]
        ((expected, _),) = ranks.run(1, _rounded, count, {"efsdp": 1}, (Shard(0),))
        for found, whole in four().call(_rounded, count, axes, placements):
            assert set(whole) == {"cut" not in case}
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            assert len(found) == len(expected) == 6


def test_experts_and_rows_have_dice_of_their_own() -> None:
    value = torch.full((6, 64, 64), 1 + 2**-8)  # in the middle between two numbers
    rounding, into = Rounding({"w": value}, 1), torch.empty(6, 64, 64, dtype=torch.bfloat16)
    rounding.draw(torch.tensor([3.0]))
    rounding.store("w", 0, value.clone(), into)
    ups = (into.float() > 1).double() * 2 - 1
    experts = ups.flatten(1)
    assert (experts @ experts.T / experts.shape[1] - torch.eye(6)).abs().max() < 5 / 64
    assert all(torch.linalg.matrix_norm(each, 2) < 2.4 * 64**0.5 for each in ups)
    # Rows of a part of the stack, counted through.
    part = torch.empty(2, 64, 64, dtype=torch.bfloat16)
    rounding.store("w", 0, value[2:4].clone(), part, slice(2 * 64, 4 * 64))
    assert torch.equal(part, into[2:4])


def build(count: int = 4, **optimizer: Any) -> ParallelModel:
    return build_model(config(count, **optimizer), setup_of(config(count, **optimizer)))


def weights(model: ParallelModel) -> dict[str, Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_that_of_torch_for_each_expert(adjust: str) -> None:
    keys = {"type": "muon", "muon": {"adjust_lr": adjust}}
    model = build(**keys)
    ours = Optimizers(config(4, **keys), model)
    experts = {
        name: [nn.Parameter(each.clone()) for each in value]
        for name, value in weights(model).items()
        if value.ndim == 3
    }
    assert len(experts) == 6
    muon = torch.optim.Muon(
        [each for every in experts.values() for each in every],
        lr=LR,
        weight_decay=DECAY,
        momentum=MuonConfig().momentum,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn=adjust,
    )
    for step in range(2):
        for name, parameter in model.named_parameters():
            whole = gradient(name, parameter.shape, step)
            parameter.grad = with_local(parameter, whole)  # type: ignore[assignment]
            for place, each in enumerate(experts.get(name, [])):
                each.grad = whole[place]
        ours.step(LR, torch.tensor(True))
        muon.step()
    for name, value in weights(model).items():
        if name in experts:
            assert torch.equal(value, torch.stack([each.detach() for each in experts[name]])), name


def test_matrices_of_a_stack_are_orthogonalized_each() -> None:
    for shape in ((5, 16, 24), (5, 24, 16), (1, 16, 16)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        expected = torch.stack([orthogonalize(each, 5) for each in stack])
        assert torch.equal(orthogonalize(stack, 5), expected)
        assert rate_factor(stack.shape, "original") == rate_factor(stack[0].shape, "original")
    assert torch.equal(orthogonalize(torch.zeros(2, 8, 16).bfloat16(), 5), torch.zeros(2, 8, 16).bfloat16())
    assert orthogonalize(torch.zeros(0, 8, 16).bfloat16(), 5).shape == (0, 8, 16)


def test_pieces_of_a_stack_are_updated_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys in ({"type": "muon", "states": "bf16"}, {"states": "bf16"}):
        found = []
        for at_once in (1 << 24, 16 * 24 * 3, 100):
            monkeypatch.setattr("pipeline.train.optim.bf16_adamw._AT_ONCE", at_once)
            model = build(**keys)
            ours = Optimizers(config(4, **keys), model)
            for step in range(2):
                for name, parameter in model.named_parameters():
                    parameter.grad = with_local(parameter, gradient(name, parameter.shape, step))  # type: ignore[assignment]
                ours.step(LR, torch.tensor(True))
            found.append(weights(model))
        for other in found[1:]:
            for name, value in other.items():
                torch.testing.assert_close(value, found[0][name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)
def test_biases_of_experts_do_not_decay(keys: dict[str, Any]) -> None:
    model = build(**keys)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays = {}
    for optimizer in Optimizers(config(4, **keys), model).all():
        make_states(optimizer)
        for group in optimizer.param_groups:
            decays |= {names[each]: (group["weight_decay"], type(optimizer).__name__) for each in group["params"]}
    assert decays.keys() == set(names.values())
    for name, (decay, kind) in decays.items():
        last = name.rpartition(".")[2]
        assert decay == (0.0 if last in ("b1", "b2", "b3", "bias") or "norm" in name else DECAY), name
        assert (kind == "Muon") == ("muon" in str(keys) and is_layer_matrix(name, model.spec)), name


def test_the_moving_average_has_experts() -> None:
    model = build()
    ema, first = Ema(EmaConfig(decay=0.75), model), weights(model)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            local_shard(parameter).mul_(2)
    ema.update(torch.tensor(True))
    assert ema.averages.keys() == first.keys()
    for name, average in ema.averages.items():
        torch.testing.assert_close(average.full_tensor(), 1.25 * first[name])  # type: ignore[attr-defined]


def test_flops_and_matrices_count_those_of_experts() -> None:
    layer = decoder_spec(model_config(6), 61, 16).layers[0]
    assert len(orthogonal_flops(layer, 5)) == len(layer.matrices)
    one = 5 * 2.0 * 16**2 * (2 * 24 + 16)
    assert [expert_orthogonal_flops(layer, 5, shards) for shards in (1, 4, 6, 8)] == [3 * n * one for n in (6, 2, 1, 1)]
    dense = sum(part.matrix_parameters(1) for part in layer.parts.values())
    assert muon_parameters(layer) == dense + 3 * 6 * 16 * 24
