"""Optimizers in one process: against torch's, against fp32 moments, and what a withheld step leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.config.train import MuonConfig
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.init import is_layer_matrix
from pipeline.train.optim.bf16_adamw import Bf16AdamW
from pipeline.train.optim.muon import orthogonalize
from pipeline.train.optim.optimizers import Optimizers, make_states
from pipeline.train.optim.stochastic_rounding import Rounding
from pipeline.train.parallel.parallelize import ParallelModel, build_model
from pipeline.train.torch_compat.core import local_shard, with_local
from tests import tiers
from tests.train.one_process import config_of, setup_of
from tests.train.runs import column, exact, start, train, weights_hash

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, bias="all", vocab_multiple=8)
SPEC = decoder_spec(MODEL, 61, 16)
YES, NO = torch.tensor(True), torch.tensor(False)
LR = 1e-2


def config(**optimizer: Any) -> Config:
    keys = {"lr": LR, **optimizer}
    return config_of(MODEL, sequence_length=16, precision={"compute": "fp32"}, optimizer=keys)


def build() -> ParallelModel:
    return build_model(config(), setup_of(config()))


def gradients(step: int) -> Iterator[tuple[str, Tensor]]:
    """Of some rank, as they are in training; the embedding has rows without."""
    generator = torch.Generator().manual_seed(step)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Decoder(SPEC).named_parameters()}
    for name, shape in shapes.items():
        gradient = torch.randn(shape, generator=generator) * 1e-3
        if gradient.ndim == 2:
            gradient += torch.randn(shape[0], 2, generator=generator) @ torch.randn(2, shape[1], generator=generator)
        if name == "embedding.weight":
            gradient[step::3] = 0
        yield name, gradient


def give(model: ParallelModel, step: int) -> None:
    parameters = dict(model.named_parameters())
    for name, gradient in gradients(step):
        parameters[name].grad = with_local(parameters[name], gradient)


def weights(model: ParallelModel) -> dict[str, Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def states(optimizers: Optimizers) -> list[Tensor]:
    found = [value for each in optimizers.all() for values in each.state.values() for value in values.values()]
    return [value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone() for value in found]


@pytest.mark.parametrize("keys", [{"states": "bf16"}, {"type": "muon"}, {"type": "muon", "states": "bf16"}], ids=str)
def test_moments_are_loaded_without_a_copy_in_another_format(keys: dict[str, Any]) -> None:
    model = build()
    ours = Optimizers(config(**keys), model)
    give(model, 0)
    ours.step(LR, YES)
    for optimizer in ours.all():
        given = optimizer.state_dict()
        values = [dict(value) for value in given["state"].values()]
        optimizer.load_state_dict(given)
        for before, after in zip(values, optimizer.state.values(), strict=True):
            assert before.keys() == after.keys()
            assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_that_of_torch(nesterov: bool, adjust: str) -> None:
    model = build()
    reference = {name: nn.Parameter(value) for name, value in weights(model).items()}
    matrices = [value for name, value in reference.items() if is_layer_matrix(name, model.spec)]
    assert len(matrices) == 7 * MODEL.layers
    tables = [value for name, value in reference.items() if value.ndim == 2 and not is_layer_matrix(name, model.spec)]
    vectors = [value for value in reference.values() if value.ndim == 1]
    wanted = config(type="muon", muon={"nesterov": nesterov, "adjust_lr": adjust, "momentum": 0.9})
    muon = torch.optim.Muon(
        matrices, lr=LR, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=5, adjust_lr_fn=adjust
    )
    adamw = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=wanted.train.optimizer.betas,
        eps=wanted.train.optimizer.eps,
        fused=True,
    )
    ours = Optimizers(wanted, model)
    for step in range(4):
        give(model, step)
        for name, gradient in gradients(step):
            reference[name].grad = gradient
        ours.step(LR, YES)
        muon.step()
        adamw.step()
    for name, value in weights(model).items():
        assert torch.equal(value, reference[name]), name


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_singular_values_come_near_to_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = torch.linalg.svdvals(orthogonalize(matrix, MuonConfig().steps).float())
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(shape).bfloat16(), 5), torch.zeros(shape).bfloat16())


KINDS: list[dict[str, Any]] = [
    {"states": "bf16"},
    {"type": "muon"},
    {"type": "muon", "states": "bf16"},
]


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_a_withheld_step_leaves_every_bit_as_it_was(keys: dict[str, Any]) -> None:
    model = build()
    ours = Optimizers(config(**keys), model)
    for step in range(2):
        give(model, step)
        ours.step(LR, YES)
    before = [*weights(model).values(), *states(ours)]
    give(model, 2)
    for _, parameter in model.named_parameters():
        assert parameter.grad is not None
        parameter.grad.to_local().fill_(float("nan"))  # type: ignore[attr-defined]
    ours.step(LR, NO)
    after = [*weights(model).values(), *states(ours)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    give(model, 3)
    ours.step(LR, YES)
    assert not any(torch.equal(*pair) for pair in zip(before, weights(model).values(), strict=False))


def test_moments_in_bf16_take_half_the_memory_and_follow_those_in_fp32() -> None:
    models, kinds = [build(), build()], ("fp32", "bf16")
    both = [Optimizers(config(states=kind), model) for model, kind in zip(models, kinds, strict=True)]
    for step in range(30):
        for model, optimizers in zip(models, both, strict=True):
            give(model, step)
            optimizers.step(LR, YES)
    assert {value.dtype for value in states(both[1]) if value.ndim} == {torch.bfloat16}
    start = weights(build())
    for name, value in weights(models[0]).items():
        way, other = value - start[name], weights(models[1])[name] - start[name]
        assert ((way - other).norm() / way.norm()).item() < 1e-2, name


def test_rounding_is_right_on_average_and_leaves_what_bf16_can_hold() -> None:
    rows, columns, steps = 64, 96, 400
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    rounding = Rounding({"w": value}, 2)
    total = [torch.zeros(rows, columns) for _ in range(2)]
    into = torch.empty(rows, columns, dtype=torch.bfloat16)
    below = torch.tensor([value.bfloat16()[0, 0].item()])
    for step in range(steps):
        rounding.draw(torch.tensor([float(step)]))
        for kind in range(2):
            rounding.store("w", kind, value.clone(), into)
            total[kind] += into.float()
    # The two neighbours in bf16 are 2**-8 to 2**-7 of the value apart; a mean of 400 is 20 times as exact, here 4.5 of
    # its standard deviations, for 6144 elements.
    for each in total:
        errors = (each / steps - value) / value.abs()
        assert errors.abs().max() < 4.5 * 0.5 * 2**-7 / 20
        assert errors.mean().abs() < 5e-6
    rounding.draw(below)
    rounding.store("w", 0, value.bfloat16().float(), into)
    assert torch.equal(into, value.bfloat16())
    special = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), 1e-45]] * 2)
    rounding = Rounding({"w": special}, 1)
    rounding.draw(torch.tensor([1.0]))
    rounding.store("w", 0, special.clone(), target := torch.empty(2, 5, dtype=torch.bfloat16))
    assert torch.equal(target[:, :4].float(), special[:, :4])


def test_rounding_of_elements_and_steps_is_independent() -> None:
    value = torch.full((128, 128), 1 + 2**-8)  # in the middle between two numbers
    rounding = Rounding({"w": value, "v": value}, 2)
    draws = []
    for step in range(3):
        rounding.draw(torch.tensor([float(step)] * 2))
        for name, kind in (("w", 0), ("w", 1), ("v", 0)):
            into = torch.empty(128, 128, dtype=torch.bfloat16)
            rounding.store(name, kind, value.clone(), into)
            draws.append((into.float() > 1).double() * 2 - 1)
    # No direction stands out, as it would if rows had their signs in common.
    assert all(torch.linalg.matrix_norm(draw, 2) < 2.2 * 128**0.5 for draw in draws)
    ups = torch.stack(draws).flatten(1)
    correlation = ups @ ups.T / ups.shape[1] - torch.eye(len(ups))
    assert correlation.abs().max() < 5 / 128
    for shift in ((0, 1), (1, 0), (1, 1), (7, 3)):
        shifted = torch.stack(draws).roll(shift, (1, 2)).flatten(1)
        assert ((ups * shifted).mean(1)).abs().max() < 5 / 128


def fork(run: Path, root: Path, name: str, *values: str) -> tuple[Path, str]:
    """Go on from the last checkpoint of a run in another folder; what was printed."""
    last = (run / "checkpoints" / "latest").read_text().strip()
    shutil.copytree(run / "checkpoints" / last, root / name / "checkpoints" / last)
    code, out = start(root, name, "train.duration=8 steps", "train.schedule.type=constant", *values)
    assert code == 0, out
    return root / name, out


@pytest.mark.parametrize("keys", tiers.first(1, KINDS, rest="slow"), ids=str)
def test_a_run_goes_on_bit_for_bit(root: Path, keys: dict[str, Any]) -> None:
    name = "-".join(keys.values())
    values = [f"train.optimizer.{key}={value}" for key, value in keys.items()]
    half = train(root, f"{name}-half", "train.duration=4 steps", "train.schedule.type=constant", *values)
    whole = train(root, f"{name}-whole", "train.schedule.type=constant", *values)
    run, _ = fork(half, root, f"{name}-on", *values)
    assert exact(run) == exact(whole)[4:]
    assert weights_hash(run) == weights_hash(whole)
    # It learns, too.
    losses = column(whole, "loss")
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_runs_go_on_with_another_format_or_type(root: Path) -> None:
    def keys(type: str, states: str) -> tuple[str, str]:
        return f"train.optimizer.type={type}", f"train.optimizer.states={states}"

    halves = {
        type: train(
            root, f"other-{type}", "train.duration=4 steps", "train.schedule.type=constant", *keys(type, "fp32")
        )
        for type in ("adamw", "muon")
    }
    same, _ = fork(halves["adamw"], root, "other-same", *keys("adamw", "fp32"))
    narrow, out = fork(halves["adamw"], root, "other-narrow", *keys("adamw", "bf16"))
    assert "train.optimizer.states: fp32 -> bf16" in out and "begin at zero" not in out
    # The moments of the checkpoint count: without them the loss would be another one at once.
    assert column(narrow, "loss") == pytest.approx(column(same, "loss"), rel=2e-3)
    wide, _ = fork(narrow, root, "other-wide", *keys("adamw", "fp32"), "train.duration=9 steps")
    assert len(column(wide, "loss")) == 1
    for before, after in (("adamw", "muon"), ("muon", "adamw")):
        run, out = fork(halves[before], root, f"other-{before}-{after}", *keys(after, "fp32"))
        assert f"train.optimizer.type: {before} -> {after}" in out
        assert "moments of the layers' matrices begin at zero: step-00000004 has those of another" in out
        assert max(column(run, "loss")) < column(halves[before], "loss")[0]


def test_dice_are_those_of_a_parameters_own_step() -> None:
    """Of some parameters that began anew later than others: who else is on a process does not count."""
    values = {name: torch.full((8, 16), 1 + 2**-8) for name in ("a", "b")}

    def rounded(names: str, steps: list[float]) -> dict[str, Tensor]:
        rounding = Rounding({name: values[name] for name in names}, 1)
        rounding.draw(torch.tensor(steps))
        into = {name: torch.empty(8, 16, dtype=torch.bfloat16) for name in names}
        for name in names:
            rounding.store(name, 0, values[name].clone(), into[name])
        return into

    together = rounded("ab", [7.0, 3.0])
    for name, step in (("a", 7.0), ("b", 3.0)):
        assert torch.equal(together[name], rounded(name, [step])[name])
    assert not torch.equal(together["b"], rounded("b", [7.0])["b"])


@pytest.mark.gpu
@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_a_gpu_computes_what_a_cpu_does_and_the_same_bits_twice(root: Path, keys: dict[str, Any]) -> None:
    name = "-".join(keys.values())
    values = [f"train.optimizer.{key}={value}" for key, value in keys.items()]
    values += ["train.precision.compute=fp32", "train.deterministic=true"]
    cpu, once, again = (
        train(root, f"{name}-{place}-{n}", f"launch.device={place}", *values)
        for n, place in enumerate(("cpu", "cuda", "cuda"))
    )
    assert column(once, "loss") == pytest.approx(column(cpu, "loss"), rel=1e-3)
    assert exact(again) == exact(once)
    assert weights_hash(again) == weights_hash(once)


def test_a_second_moment_that_falls_slowly_does_fall() -> None:
    """To the nearest, bf16 cannot go down by a thousandth; by chance it does so on average."""
    parameter = nn.Parameter(torch.zeros(512))
    group = {"params": [parameter], "lr": 0.0, "weight_decay": 0.0}
    ours = Bf16AdamW([group], {parameter: "norm.weight"}, (0.9, 0.999), 1e-8)
    exact_moment, nearest = torch.zeros(()), torch.zeros((), dtype=torch.bfloat16)
    for step in range(1200):
        gradient = 1.0 if step < 200 else 0.01
        parameter.grad = torch.full((512,), gradient)
        ours.step()
        exact_moment, nearest = (
            moment.float().lerp(torch.tensor(gradient**2), 0.001).to(moment.dtype) for moment in (exact_moment, nearest)
        )
    assert nearest > 2 * exact_moment
    assert ours.state[parameter]["exp_avg_sq"].float().mean().item() == pytest.approx(exact_moment.item(), rel=0.01)


def test_states_are_made_as_the_first_step_of_torch_makes_them() -> None:
    first, second = (Optimizers(config(), build()) for _ in range(2))
    for optimizer in first.all():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for optimizer in second.all():
        make_states(optimizer)
    for made, expected in zip(second.all(), first.all(), strict=True):
        assert len(made.state) == len(expected.state) > 0
        for values, others in zip(made.state.values(), expected.state.values(), strict=True):
            assert values.keys() == others.keys()
            for name, value in values.items():
                other = others[name]
                assert type(value) is type(other) and not value.requires_grad
                assert (value.shape, value.dtype, value.device) == (other.shape, other.dtype, other.device)
                local = local_shard(value)
                assert local.stride() == local_shard(other).stride() and not local.any()
