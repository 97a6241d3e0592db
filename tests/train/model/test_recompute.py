"""Recomputation: the bits of keeping everything, and the bytes that closed forms say are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.train import RecomputeConfig
from pipeline.train.model.block import Block
from pipeline.train.model.decoder import Context, Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.recompute import Recompute
from pipeline.train.parallel.tested import TESTED, WITHIN_LAYERS
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.run.folder import read_metrics
from tests.train.runs import exact, start, train, weights_hash

SEEN = ("grad_norm_by_layer", "activation_rms_by_layer", "attention_logit_max_by_layer")
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"mode": "full"},
    "every": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "selective-every": {"mode": "selective", "every": 3},
    "attention": {"mode": "selective", "keep": ["attention"]},
    "matmul": {"mode": "selective", "keep": ["matmul", "communication"]},
}
B, S, D, H, K, E, F, LAYERS = 2, 24, 64, 4, 2, 16, 96, 4


def decoder(**keys: Any) -> Decoder:
    shape = {"layers": LAYERS, "dim": D, "heads": H, "kv_heads": K, "ffn_dim": F, "vocab_multiple": 8, **keys}
    torch.manual_seed(1)
    return Decoder(decoder_spec(ModelConfig.model_validate(shape), 61, S))


def recompute(model: Decoder, **keys: Any) -> None:
    config = RecomputeConfig.model_validate(keys)
    for index, block in model.layers.items():
        assert isinstance(block, Block)
        block.recompute = Recompute.of_layer(config, int(index), model.spec.layers[int(index)])


@pytest.mark.guard
def test_whole_runs_have_the_same_bits(root: Path) -> None:
    """What is seen by layer too: a second forward pass is not seen."""
    values = ["model.layers=3", "train.duration=3 steps", "train.metrics.layers_every_steps=2"]
    runs = {}
    for name in ("none", "every", "selective"):
        given = ["train.recompute=" + str(MODES[name]).replace("'", "")] if MODES[name] else []
        runs[name] = train(root, name, *values, "model.document_attention=true", *given)
    plain = runs.pop("none")
    for run in runs.values():
        assert exact(run) == exact(plain)
        assert weights_hash(run) == weights_hash(plain)
        for row, other in zip(read_metrics(run), read_metrics(plain), strict=True):
            assert [row.get(key) for key in SEEN] == [other.get(key) for key in SEEN]


@pytest.mark.first(7)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "window"])
def test_gradients_have_the_same_bits(mode: str, family: str) -> None:
    model = decoder(
        **{
            "llama": {},
            "gpt2": {"norm": "layernorm", "mlp": "gelu", "bias": "all", "positions": "learned", "tie_embeddings": True},
            "window": {"sliding_window": 5, "qk_norm": True},
        }[family]
    )
    tokens = torch.randint(61, (B, S))
    bounds = torch.zeros(B, S, dtype=torch.int64)
    bounds[:, 10:] = 10

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(tokens, Context(bounds_BS=bounds))
        logits[..., :61].sin().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    recompute(model, **MODES[mode])
    found = gradients()
    assert len(found) == len(expected) == len(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def kept_bytes(model: Decoder) -> int:
    """Bytes that the forward pass of the layers allocates and does not free."""
    model.train()
    x = torch.randn(B, S, D, requires_grad=True)
    *_, (context, *_) = model._prepare(torch.zeros(B, S, dtype=torch.int64), Context())

    def forward() -> torch.Tensor:
        out = x
        for block in model.layers.values():
            out = block(out, context)
        return out

    forward()  # what is made once
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = forward()
    assert out.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.events())


def test_what_is_kept() -> None:
    model, tokens = decoder(), B * S
    none = kept_bytes(model)
    recompute(model, mode="full")
    # A layer's input is the output of the one before it.
    assert kept_bytes(model) == 4 * LAYERS * tokens * D
    recompute(model, mode="selective")
    matmuls = (H + 2 * K) * E + D + 2 * F  # q, k, v; wo; w1, w3. Nobody needs that of w2 again
    attention = H * E + H  # with the sum of exponentials of each query and head
    selective = kept_bytes(model)
    assert selective == 4 * LAYERS * tokens * (D + matmuls + attention)
    recompute(model, mode="selective", keep=["attention"])
    assert kept_bytes(model) == 4 * LAYERS * tokens * (D + attention)
    recompute(model, mode="full", every=2)
    assert kept_bytes(model) == none / 2 + 4 * LAYERS / 2 * tokens * D
    assert none > selective


def test_only_training_recomputes() -> None:
    model = decoder()
    recompute(model, mode="full")
    tokens = torch.randint(61, (B, S))
    model.train(False)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(1) or x, lambda x: x):
        model(tokens, Context())
        evaluated = len(saved)
        model.train()
        model(tokens, Context())
    assert len(saved) - evaluated < evaluated / 4


def test_names_of_parameters_stay() -> None:
    model = decoder()
    names = [name for name, _ in model.named_parameters()]
    recompute(model, mode="selective")
    assert [name for name, _ in model.named_parameters()] == names


def test_moving_to_the_host_needs_a_gpu(root: Path) -> None:
    code, out = start(root, "host", "train.recompute={mode: full, offload: true}", "launch.device=cpu")
    assert code == 2
    assert "train.recompute.offload=true moves activations" in out and "train.recompute.offload=false" in out
    assert not list((root / "host").glob("checkpoints/step-*"))


@pytest.mark.slow
def test_moving_to_the_host_changes_nothing() -> None:
    model, tokens = decoder(), torch.randint(61, (B, S))
    results = []
    for offload in (False, True):
        recompute(model, mode="full", offload=offload)
        model.zero_grad()
        model(tokens, Context())[..., :61].sin().sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


PIPELINE = ("parallel.pp=2", "model.layers=4", "train.batch_size=8", "train.micro_batch_size=1")
REFUSED: list[tuple[int, tuple[str, ...], str]] = [
    (
        2,
        (*PIPELINE, "parallel.pipeline.schedule=zbv", "train.recompute.mode=selective"),
        "selective with schedule=zbv: .* set train.recompute.mode=full, or take one of gpipe, 1f1b, interleaved_1f1b",
    ),
    (1, ("train.recompute={mode: selective, keep: []}",), "keeps only the input .* set train.recompute.mode=full"),
    (1, ("train.recompute.mode=budget",), "train.compile=null: set train.compile=true"),
    (1, ("train.recompute.mode=budget", "train.compile=false"), "train.compile=false: set train.compile=true"),
    (2, ("train.recompute.mode=budget", "train.compile=true", "parallel.tp=2"), "parallel.tp=2: .* parallel.tp=1"),
    (1, ("train.recompute.offload=true",), "offload=true with mode=none: .* set train.recompute.mode=full"),
    (1, ("train.recompute={mode: full, offload: true}", "train.compile=true"), "set train.compile=false"),
    (
        2,
        (*PIPELINE, "parallel.pipeline.schedule=dualpipev", "train.compile=true"),
        "train.compile=true with schedule=dualpipev gives wrong gradients: .* set train.compile=false, or take one of",
    ),
]


@pytest.mark.parametrize(("world", "values", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(root: Path, world: int, values: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(load(root / "run.yaml", values), world)


def test_full_goes_with_every_schedule(root: Path) -> None:
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        values = (*PIPELINE, f"parallel.pipeline.schedule={schedule}", "train.recompute.mode=full")
        check_layout(load(root / "run.yaml", values), 2)


def test_keys_without_effect_are_told(root: Path) -> None:
    config = load(root / "run.yaml", ["train.recompute={every: 2, keep: [matmul], budget: 0.25}"])
    told = [line for line in layout_warnings(config, check_layout(config, 1)) if "recompute" in line]
    assert [line.split()[0] for line in told] == [f"train.recompute.{key}" for key in ("every", "keep", "budget")]
    config = load(root / "run.yaml", ["train.recompute={mode: selective, every: 2, keep: [matmul]}"])
    assert not [line for line in layout_warnings(config, check_layout(config, 1)) if "recompute" in line]


def test_rows_have_names_of_their_own_and_tested_layouts() -> None:
    assert len({row.name for row in (*TESTED, *WITHIN_LAYERS)}) == len(TESTED) + len(WITHIN_LAYERS)
    assert {row.kind for row in WITHIN_LAYERS} <= {row.kind for row in TESTED}
    assert all(row.compile or row.recompute.mode != "none" for row in WITHIN_LAYERS)
