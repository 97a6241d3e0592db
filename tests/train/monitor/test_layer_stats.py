"""What is seen by layer, against plain PyTorch with hooks, and that nothing of it reaches the training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.config.model import EncoderConfig, ModelConfig
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.loop.quantities.layers import Observer, largest_logits
from pipeline.train.loop.step import Stepper
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.part_spec import Reach
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.run.folder import read_metrics
from tests.train.one_process import config_of, setup_of
from tests.train.runs import exact, train, weights_hash

CPU = torch.device("cpu")
SEEN = ("grad_norm_by_layer", "activation_rms_by_layer", "attention_logit_max_by_layer")
MODELS = {
    "llama": ModelConfig(layers=3, dim=32, heads=4, kv_heads=2, vocab_multiple=8, document_attention=True),
    "window": ModelConfig(layers=2, dim=32, heads=4, kv_heads=1, vocab_multiple=8, sliding_window=3, qk_norm=True),
    "gpt2": ModelConfig(
        layers=2,
        dim=32,
        heads=2,
        vocab_multiple=8,
        norm="layernorm",
        mlp="gelu",
        bias="all",
        positions="learned",
        tie_embeddings=True,
    ),
}


def batches(count: int, *, padding: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    made = []
    for number in range(count):
        tokens = torch.randint(0, 61, (3, 17), generator=generator)
        weight = (torch.rand(3, 16, generator=generator) < 0.8).float()
        sources = torch.tensor([0, 1, 0])
        if padding and number == count - 1:
            weight[2], sources[2] = 0, -1
        starts = torch.tensor([0, 5, 16, 32, 39], dtype=torch.int32)
        made.append(Batch(tokens[:, :-1], tokens[:, 1:], weight, starts, sources, {}))
    return made


def stepper(model_config: ModelConfig, every: int | None) -> tuple[Decoder, Stepper]:
    config = config_of(
        model_config,
        sequence_length=16,
        optimizer={"clip_norm": 0.01},
        precision={"compute": "fp32"},
        metrics={"layers_every_steps": every},
    )
    setup = setup_of(config)
    model = build_model(config, setup)
    return model.whole, Stepper(config, setup, model, Optimizers(config, model), sources=["a", "b"])


def observed(ours: Stepper, data: list[Batch], step: int = 1) -> dict[str, Any]:
    valid = int(sum(batch.weight.sum() for batch in data))
    row = ours.step(StepData(step - 1, data, valid), 1e-2).columns()
    return {name: value for name, value in row.items() if name.endswith("_by_layer")}


def plain_copy(model: Decoder) -> Decoder:
    other = Decoder(model.spec)
    other.load_state_dict({name: value.full_tensor().clone() for name, value in model.state_dict().items()})
    return other


@pytest.mark.first(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", [False, True])
def test_a_step_shows_what_hooks_on_plain_pytorch_see(
    name: str, padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS[name]
    model, ours = stepper(config, 1)
    reference, data = plain_copy(model), batches(3, padding=padding)
    reference.kernel = Sdpa(on_gpu=True)  # a mask in memory, to look at
    row = observed(ours, data)

    # All real samples one at a time, through hooks and a look at the arguments of torch's attention.
    outputs: dict[int, list[torch.Tensor]] = {index: [] for index in range(config.layers)}
    logits: list[float] = []
    attend = F.scaled_dot_product_attention

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        k_all = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        products = torch.einsum("bhqe,bhke->bhqk", q, k_all) * how["scale"]
        mask = how["attn_mask"]
        allowed = torch.ones(16, 16).tril().bool() if mask is None else mask
        logits.append(products.where(allowed, torch.tensor(-1e9)).max().item())
        return attend(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)

    def keep(index: int) -> Callable[..., None]:
        return lambda module, inputs, output: outputs[index].append(output.detach())

    for index, block in reference.layers.items():
        block.register_forward_hook(keep(int(index)))
    valid = sum(batch.weight.sum() for batch in data)
    for batch in data:
        for sample in range(3):
            if batch.sources[sample] < 0:
                continue
            bounds = batch.bounds[sample : sample + 1] if config.document_attention else None
            out = reference(batch.tokens[sample : sample + 1], Context(bounds_BS=bounds))[..., :61]
            losses = F.cross_entropy(out[0], batch.targets[sample], reduction="none")
            ((losses * batch.weight[sample]).sum() / valid).backward()

    for index in range(config.layers):
        rms = torch.cat(outputs[index]).double().square().mean().sqrt().item()
        assert row["activation_rms_by_layer"][str(index)] == pytest.approx(rms, rel=1e-5)
        largest = max(logits[index :: config.layers])
        assert row["attention_logit_max_by_layer"][str(index)] == pytest.approx(largest, rel=1e-5)
    norms: dict[str, float] = {}
    for parameter_name, parameter in reference.named_parameters():
        words = parameter_name.split(".")
        group = words[1] if words[0] == "layers" else words[0]
        assert parameter.grad is not None
        norms[group] = norms.get(group, 0.0) + parameter.grad.double().square().sum().item()
    assert row["grad_norm_by_layer"].keys() == norms.keys()
    for group, square in norms.items():
        assert row["grad_norm_by_layer"][group] == pytest.approx(square**0.5, rel=1e-4), group


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "cache"])
@pytest.mark.parametrize("at_once", [1, 500, 2**24])
def test_the_largest_logits_do_not_depend_on_the_rows_at_once(kv_heads: int, mask: str, at_once: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    queries, keys = (5, 11) if mask == "cache" else (11, 11)
    q = torch.randn(3, queries, 6, 4, generator=generator)
    k = torch.randn(3, keys, kv_heads, 4, generator=generator)
    bounds = torch.tensor([[0] * 4 + [4] * 7, [0] * 11, [0] * 10 + [10]]) if mask == "documents" else None
    reach = Reach.window(3 if mask == "window" else None)
    documents = None if bounds is None else Documents(bounds)
    given = AttentionMask.of(3, (keys - queries, keys), reach, CPU, documents).mask()
    expected = torch.full((3,), -torch.inf)
    for sample in range(3):
        for query in range(queries):
            position = keys - queries + query
            first = 0 if bounds is None else int(bounds[sample, position])
            first = max(first, position - 2) if mask == "window" else first
            for head in range(6):
                seen = k[sample, first : position + 1, head // (6 // kv_heads)]
                expected[sample] = max(expected[sample], (seen @ q[sample, query, head]).max())
    torch.testing.assert_close(largest_logits(q, k, given, False, at_once), expected)


def test_the_largest_logits_to_both_sides() -> None:
    """Of a key behind the query, and of one of another sequence."""
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 6, 1, 2)
    q[0, 1], k[0, 5] = 2.0, 3.0
    mask = AttentionMask.of(1, (0, 4), Reach(None, None), CPU, length=6)
    assert largest_logits(q, k, mask.mask(), mask.sees_ahead).tolist() == [12.0]
    near = AttentionMask.of(1, (0, 4), Reach(None, 3), CPU, length=6)
    assert largest_logits(q, k, near.mask(), near.sees_ahead).tolist() == [0.0]
    across = AttentionMask.across(1, (0, 4), 6, CPU)
    assert largest_logits(q, k, across.mask(), across.sees_ahead, at_once=1).tolist() == [12.0]


def test_only_the_steps_asked_for_are_observed() -> None:
    _, ours = stepper(MODELS["llama"], 3)
    assert [bool(observed(ours, batches(2), step)) for step in range(1, 8)] == [False, False, True] * 2 + [False]
    _, never = stepper(MODELS["llama"], None)
    assert not observed(never, batches(2))


def test_a_step_that_is_not_finite_shows_where() -> None:
    model, ours = stepper(MODELS["llama"], 1)
    with torch.no_grad():
        model.layers["1"].mixer.wq.weight.to_local().fill_(float("nan"))
    row = observed(ours, batches(2))
    assert row["activation_rms_by_layer"]["0"] > 0
    assert row["activation_rms_by_layer"]["1"] != row["activation_rms_by_layer"]["1"]
    assert row["attention_logit_max_by_layer"]["0"] < 100
    assert row["attention_logit_max_by_layer"]["1"] == float("inf")


@pytest.mark.guard
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_observing_changes_no_bit_of_a_run(root: Path, compute: str) -> None:
    values = [f"train.precision.compute={compute}", "train.duration=5 steps"]
    plain = train(root, f"plain-{compute}", *values)
    watched = train(root, f"watched-{compute}", *values, "train.metrics.layers_every_steps=2")
    assert exact(plain) == exact(watched)
    assert weights_hash(plain) == weights_hash(watched)
    rows = {row["step"]: row for row in read_metrics(watched)}
    assert [step for step, row in rows.items() if any(key in row for key in SEEN)] == [2, 4]
    for step in (2, 4):
        if rows[step]["skipped"]:
            continue
        # Also with fp16: the factor on the loss is no part of it.
        together = sum(norm**2 for norm in rows[step]["grad_norm_by_layer"].values()) ** 0.5
        assert together == pytest.approx(rows[step]["grad_norm"], rel=1e-4)
        for key in SEEN[1:]:
            assert list(rows[step][key]) == ["0", "1"]
            assert all(value > 0 for value in rows[step][key].values())
    assert not any(key in row for row in read_metrics(plain) for key in SEEN)


def test_layers_of_two_sides_show_their_own_positions() -> None:
    """And the tables of relative positions are a group."""
    config = ModelConfig(
        encoder=EncoderConfig(layers=1), layers=1, dim=16, heads=2, vocab_multiple=8, positions="relative"
    )
    shapes: dict[int, torch.Size] = {}

    class Shapes:
        def attention(self, *_: Any) -> None:
            pass

        def output(self, block: Any, x_BSD: torch.Tensor) -> None:
            shapes[block.index] = x_BSD.shape

    spec = decoder_spec(config, 61, 16)
    Decoder(spec)(torch.zeros(2, 11, dtype=torch.int64), Context(encoder=7, observer=Shapes()))
    assert shapes == {0: (2, 7, 16), 1: (2, 4, 16)}
    setup = config_of(config, objective={"type": "spans"}, precision={"compute": "fp32"})
    observer = Observer(build_model(setup, setup_of(setup)), torch.device("cpu"), 1)
    names = [name for name, _ in Decoder(spec).named_parameters()]
    assert {name.split(".")[1 if name.startswith("layers.") else 0] for name in names} == set(observer._groups)
