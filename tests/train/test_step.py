"""One optimizer step against plain PyTorch: accumulation, masks, clipping, z-loss, and the guard."""

import copy

import pytest
import torch
import torch.nn.functional as F

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.loop.step import Stepper
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.loss import token_loss
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from tests.train.one_process import config_of, numbers, setup_of

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=2, dim=32, heads=2, vocab_multiple=8)
SPEC = decoder_spec(MODEL, 61, 16)


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        tokens = torch.randint(0, 61, (2, 17), generator=generator)
        # Unequal numbers of valid targets, so that a mean of means would be wrong.
        weight = (torch.rand(2, 16, generator=generator) < (index + 1) / count).float()
        starts = torch.tensor([0, 16], dtype=torch.int32)
        made.append(Batch(tokens[:, :-1], tokens[:, 1:], weight, starts, torch.tensor([0, 1]), {}))
    return made


def step_config(*, precision: str = "fp32", **optimizer: float | None) -> Config:
    keys = {"weight_decay": 0.1, **optimizer}
    return config_of(MODEL, sequence_length=16, optimizer=keys, precision={"compute": precision})


def stepper(config: Config) -> tuple[Decoder, torch.optim.Optimizer, Stepper]:
    setup = setup_of(config)
    model = build_model(config, setup)
    optimizers = Optimizers(config, model)
    made = Stepper(config, setup, model, optimizers, sources=["a", "b"])
    (optimizer,) = optimizers.all()
    return model.whole, optimizer, made


def plain_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def plain_copy(model: Decoder) -> Decoder:
    other = Decoder(SPEC)
    other.load_state_dict(plain_weights(model))
    return other


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_three_steps_equal_plain_pytorch(clip_norm: float | None) -> None:
    # With a smaller eps a gradient that is rounding alone would move its weight by the whole learning rate.
    config = step_config(lr=1e-2, clip_norm=clip_norm, eps=1e-3)
    model, _, ours = stepper(config)
    reference = plain_copy(model)
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=config.train.optimizer.betas,
        eps=config.train.optimizer.eps,
    )
    for number in range(3):
        data = batches(3, seed=number)
        valid = int(sum(batch.weight.sum() for batch in data))
        result = numbers(ours.step(StepData(number, data, valid), 1e-2))

        # All micro-batches as one batch, mean over its valid targets.
        tokens, targets, weight = (torch.cat([getattr(b, n) for b in data]) for n in ("tokens", "targets", "weight"))
        logits = reference(tokens, Context())[..., :61]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        loss = losses[weight > 0].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf") if clip_norm is None else clip_norm)
        optimizer.step()

        assert result["finite"].item()
        assert (result["nats"].sum() / result["targets"].sum()).item() == pytest.approx(loss.item(), rel=1e-5)
        assert result["norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        assert result["targets"].tolist() == [sum(float(b.weight[row].sum()) for b in data) for row in (0, 1)]
    for name, value in plain_weights(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_without_clipping_gradients_are_those_below_the_bound(precision: str) -> None:
    """The same bits as with a bound that no norm comes near; the loss scale is taken out all the same."""
    ends = []
    for clip_norm in (None, 1e30):
        model, _, ours = stepper(step_config(precision=precision, clip_norm=clip_norm))
        norms = [numbers(ours.step(StepData(seed, batches(2, seed), 40), 1e-2))["norm"] for seed in range(3)]
        ends.append([*norms, *plain_weights(model).values()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize(
    ("poison", "clip_norm"), [("loss", 1.0), ("gradient", 1.0), ("gradient", None)], ids=["loss", "gradient", "no-clip"]
)
def test_a_non_finite_step_leaves_every_bit_as_it_was(poison: str, clip_norm: float | None) -> None:
    model, optimizer, ours = stepper(step_config(lr=1e-2, clip_norm=clip_norm))
    ours.step(StepData(0, batches(2), 40), 1e-2)
    weights, states = plain_weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    data = StepData(1, batches(2, seed=1), 40)
    if poison == "loss":
        local = model.norm.weight.to_local()
        saved = local.detach().clone()
        with torch.no_grad():
            local.fill_(float("inf"))
        result = numbers(ours.step(data, 1e-2))
        with torch.no_grad():
            local.copy_(saved)
    else:

        def poison_gradient(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: gradient * float("nan"))

        handle = model.layers["1"].mlp.register_forward_hook(poison_gradient)
        result = numbers(ours.step(data, 1e-2))
        handle.remove()
        assert torch.isfinite(result["nats"]).all()
    assert not result["finite"].item()
    after = plain_weights(model)
    for name, value in weights.items():
        assert torch.equal(value, after[name]), name
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            now = value.full_tensor() if hasattr(value, "full_tensor") else value
            before = states[index][key]
            before = before.full_tensor() if hasattr(before, "full_tensor") else before
            assert torch.equal(now, before), (index, key)
    assert numbers(ours.step(StepData(2, batches(2, seed=2), 40), 1e-2))["finite"].item()


def test_z_loss_is_the_squared_log_partition_function() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64).float()
    targets = torch.randint(0, 7, (2, 3))
    loss, objective = token_loss(logits, targets, z_loss=0.5)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(objective - loss, 0.5 * logits.exp().sum(-1).log() ** 2, rtol=1e-4, atol=1e-4)


def test_bf16_is_for_parameters_and_activations_alone() -> None:
    """What is said of positions and of the weight of tokens stays fp32, as in a model without FSDP."""
    config = step_config(precision="bf16")
    model, _, ours = stepper(config)
    plain = plain_copy(model).to(torch.bfloat16)
    (batch,) = batches(1)
    loss, objective = token_loss(plain(batch.tokens, Context()), batch.targets)
    valid = int(batch.weight.sum())
    (objective * (batch.weight / valid)).sum().backward()
    norm = torch.stack([p.grad.float().norm() for p in plain.parameters() if p.grad is not None]).norm()
    result = numbers(ours.step(StepData(0, [batch], valid), 0.0))
    torch.testing.assert_close(result["nats"].sum(), (loss * batch.weight).sum().double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(result["norm"].float(), norm, rtol=1e-5, atol=0)


def test_bf16_keeps_fp32_master_weights() -> None:
    config = step_config(precision="bf16", lr=1e-2)
    model, optimizer, ours = stepper(config)
    before = plain_weights(model)
    result = numbers(ours.step(StepData(0, batches(2), 40), 1e-5))
    assert result["finite"].item()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    after = plain_weights(model)
    # Updates of 1e-5 are below the resolution of bf16 at these values and would be lost without master weights.
    changed = (after["head.weight"] != before["head.weight"]).float().mean()
    assert changed > 0.9
    assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())
