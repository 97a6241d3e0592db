"""The memory of a process, estimated on fake tensors, against what real steps allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.train.distributed.layout import Layout
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.flops import layer_parameters, muon_parameters, num_parameters
from pipeline.train.model.kernels.attention_mask import AttentionMask, Kernel, Terms
from pipeline.train.model.part_spec import Reach
from pipeline.train.parallel.footprint import checkpoint_bytes
from pipeline.train.parallel.step_shapes import StepShape
from pipeline.train.planning import ledger
from pipeline.train.planning import memory as planning
from pipeline.train.planning.activations import _Fused, _Masked, measure
from pipeline.train.planning.fake import fake_mesh
from pipeline.train.planning.memory import RankMemory, memory
from pipeline.train.planning.stage_memory import Shape
from tests import tiers, tiny
from tests.train.distributed import ranks
from tests.train.parallel import layouts
from tests.train.planning.steps import CASES, case_config, measured_peak, of_case

TOLERANCE = 0.1
_QUICK = (
    "one process",
    "chunked loss",
    "experts, ep2",
)


def _estimate(config: Config, device_type: str = "cpu") -> list[RankMemory]:
    assert device_type in ("cpu", "cuda")
    layout, spec, shape = of_case(config)
    return memory(config, layout, spec, shape, device_type)  # type: ignore[arg-type]


def _compare(config: Config) -> None:
    layout, _, _ = of_case(config)
    found = ranks.run(layout.world_size, measured_peak, config, timeout=300)
    for each in _estimate(config):
        most = min(peak for rank, peak in found if rank == each.pp_rank)  # they need the same; gloo keeps some longer
        assert each.total == pytest.approx(most, rel=TOLERANCE), (each, most)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers.first(2, sorted(CASES), rest="slow"))
def test_shortened_operations_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    config, found = case_config(name), []
    for shortened in (ledger._PLAIN, frozenset()):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(len(shortened))))
        monkeypatch.setattr(ledger, "_PLAIN", shortened)
        monkeypatch.setattr(planning, "_measured", {})
        found.append(_estimate(config, "cuda"))
    for one, other in zip(*found, strict=True):
        # A number of 4 bytes, which tells pipelines whether ranks agree, may live an operation longer.
        assert astuple(one)[:-1] == pytest.approx(astuple(other)[:-1], abs=16) and one.when == other.when


@pytest.mark.parallel
@pytest.mark.parametrize("name", tiers.first(1, _QUICK, rest="slow"))
def test_the_estimate_is_what_torch_allocates(name: str) -> None:
    _compare(case_config(name))


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=layouts.trains(case_config(name).parallel.pipeline.schedule))
        for name in sorted(CASES.keys() - set(_QUICK))
    ],
)
def test_the_estimate_is_what_torch_allocates_on_every_layout(name: str) -> None:
    _compare(case_config(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one process, bf16", "chunked loss", "full recomputation"])
def test_the_estimate_is_what_a_gpu_allocates(name: str) -> None:
    config = case_config(
        name,
        model__dim=2048,
        model__heads=16,
        model__ffn_dim=5632,
        train__sequence_length=2048,
        train__precision={"compute": "bf16"},
        train__compile=False,  # what a compiler keeps is not estimated
    )
    ((_, most),) = ranks.run(1, measured_peak, config, "cuda", connect=False, timeout=300)
    (each,) = _estimate(config, "cuda")
    assert each.total == pytest.approx(most, rel=TOLERANCE)


@pytest.mark.slow
def test_a_large_model_over_many_ranks() -> None:
    """Llama 3 405B over 16,384: weights, gradients and moments by hand, activations by what one layer keeps."""
    config = case_config(
        "one process",
        model={"layers": 126, "dim": 16384, "heads": 128, "kv_heads": 8, "ffn_dim": 53248},
        train={
            "duration": "2 steps",
            "sequence_length": 8192,
            "batch_size": 2048,
            "micro_batch_size": 1,
            "recompute": {"mode": "full"},
        },
        parallel={"tp": 8, "pp": 16, "dp_shard": 128},
    )
    layout = Layout(pp=16, dp_shard=128, tp=8)
    spec = decoder_spec(config.model, 128256, 8192)
    shape = StepShape("", "", "", 2048, 8192, 1, 128, StreamShape(8192, 0, 8192, 8192))
    found = memory(config, layout, spec, shape)
    assert [each.pp_rank for each in found] == list(range(16))
    layer = layer_parameters(spec.layers[0], 8)
    for each in found[1:-1]:
        assert each.count == 8 * layer
        # Every shard is padded to whole rows of its tensor.
        assert 4 * each.count / 128 <= each.parameters <= 1.05 * 4 * each.count / 128
        assert each.moments == pytest.approx(2 * each.parameters, rel=0.01)
        assert each.gradients == pytest.approx(4 * each.count, rel=0.05)  # whole, fp32, until the step ends
        assert each.unsharded == pytest.approx(2 * each.count, rel=0.05)
    # Of each layer of a micro-batch its input is kept, a piece of the sequence in bf16. 1F1B keeps 15 on rank 1.
    piece = 8192 // 8 * 16384 * 2
    assert found[1].activations == pytest.approx(15 * 8 * piece, rel=0.15)
    assert found[0].total > found[-1].total


@pytest.mark.slow
def test_the_layers_that_are_not_run_are_as_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from two and three layers is what running all of them gives."""
    config = case_config("one process, bf16", train__recompute={"mode": "full", "every": 2})
    (few,) = _estimate(config)
    monkeypatch.setattr("pipeline.train.planning.memory._runs", lambda *_: (6, 8))
    (each,) = _estimate(config)
    assert few == each


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_pattern_that_does_not_repeat_is_a_sum_over_kinds(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """As running all of its layers says."""
    pattern = ["wide"] * 3 + ["near", "wide", "near", "near", "near", "wide", "near"]
    config = case_config(
        "layers of two kinds", model__layers=10, model__pattern=pattern, train__recompute={"mode": mode}
    )
    monkeypatch.setattr("pipeline.train.planning.memory._LONG_PERIOD", 10)
    (each,) = _estimate(config)
    monkeypatch.setattr("pipeline.train.planning.memory._LONG_PERIOD", 4)
    (few,) = _estimate(config)
    assert (few.count, few.parameters, few.moments) == (each.count, each.parameters, each.moments)
    assert few.total == pytest.approx(each.total, rel=1e-3)
    assert few.activations == pytest.approx(each.activations, rel=0.01)


@pytest.mark.guard
@pytest.mark.parametrize("name", tiers.first(1, ["one process", "mamba", "delta"], rest="slow"))
def test_bounds_of_what_layers_keep(name: str) -> None:
    """What backward needs of each kind of layer is between what the kinds say, and near to the lower one."""
    config = case_config(name)
    layout, spec, _ = of_case(config)
    for layer in spec.different_layers:
        equal = replace(spec, layers=(layer,))
        few, more = measure(config, layout, equal, Shape(2, 256, 1), "whole", [(0, 2), (0, 3)], "cpu")
        kept = (more.kept - few.kept) / 512 / 4
        parts = layer.parts.values()
        least = (2 + len(layer.norms)) * layer.dim + sum(part.kept_numbers(1) for part in parts)
        peak = max(
            more.at(label)["activations"] + more.at(label)["working"] for label in more.labels if "layer" in label
        )
        assert 0.75 * kept < least < kept
        assert peak / 512 / 4 < 3 * sum(part.most_numbers(256) for part in parts)


@pytest.mark.slow
def test_stages_of_unequal_lengths() -> None:
    """That in the middle is run as it is, with the larger of the two numbers of layers that others follow from."""
    config = case_config(
        "one process",
        model__layers=11,
        train__batch_size=3,
        train__micro_batch_size=1,
        parallel={"pp": 3, "pipeline": {"layers_per_stage": [4, 3, 4]}},
    )
    first, middle, last = _estimate(config)
    _, spec, _ = of_case(config)
    ends = spec.vocab_padded * spec.dim
    layer = layer_parameters(spec.layers[0], 1)
    assert [first.count, middle.count, last.count] == [4 * layer + ends, 3 * layer, 4 * layer + ends + spec.dim]


def test_nothing_stays_behind() -> None:
    for size in (1, 2, 64):
        with fake_mesh(Layout(dp_shard=size), size - 1) as mesh:
            assert mesh.rank("params") == size - 1
            with pytest.raises(RuntimeError, match="process group"), fake_mesh(Layout(), 0):
                pass
        assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_mesh(Layout(), 0):
        raise ZeroDivisionError
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_checkpoint_is_as_large_as_said(tmp_path: Path) -> None:
    file = tiny.write_run(
        tmp_path,
        {
            "model.dim": 512,  # so that what the format adds to each tensor is little
            "model.tie_embeddings": True,
            "model.layers": 2,
            "train.ema": {"decay": 0.9},
            "train.duration": "2 steps",
            "train.schedule": {"warmup": "1 steps"},
        },
    )
    for stage in ("preprocess", "train"):
        done = tiny.pipeline(stage, file)
        assert done.returncode == 0, done.stderr
    folder = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    config = load(file)
    spec = decoder_spec(config.model, 300, config.max_positions)
    assert checkpoint_bytes(config, spec) == 16 * num_parameters(spec)
    assert size == pytest.approx(checkpoint_bytes(config, spec), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers.first(1, ["one process", "mamba"], rest="slow"))
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "muon", "states": "bf16"}, lambda count, matrices: 4 * count - 2 * matrices),
        pytest.param({"states": "bf16"}, lambda count, _: 4 * count, marks=pytest.mark.slow),
        pytest.param({"type": "muon"}, lambda count, matrices: 8 * count - 4 * matrices, marks=pytest.mark.slow),
    ],
)
def test_moments_of_other_optimizers(name: str, keys: dict[str, Any], expected: Callable[[int, int], int]) -> None:
    """Matrices of rates have two moments whatever the optimizer is."""
    config = case_config(name, train__optimizer=keys)
    _, spec, _ = of_case(config)
    (each,) = _estimate(config)
    matrices = sum(map(muon_parameters, spec.layers))
    assert each.moments == pytest.approx(expected(num_parameters(spec), matrices), rel=0.002)


def test_parts_of_the_estimate() -> None:
    """One process, fp32: weights, moments and gradients are 4, 8 and 4 bytes of each parameter."""
    config = case_config("one process")
    _, spec, _ = of_case(config)
    (each,) = _estimate(config)
    count = num_parameters(spec)
    assert each.count == count
    assert each.parameters == 4 * count
    assert each.moments == pytest.approx(8 * count, rel=0.001)
    assert each.gradients == pytest.approx(0, abs=0.3 * 4 * count)  # few of them are there when the head is at work
    assert each.total == sum(
        (each.parameters, each.moments, each.gradients, each.unsharded, each.activations, each.working)
    )


@pytest.mark.parametrize("kernel", [_Fused(), _Masked(on_gpu=True)])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("reach", [Reach(), Reach(None, None), Reach(6), Reach(3, 3)])
def test_kernels_of_estimates_take_all_terms(kernel: Kernel, cap: float | None, reach: Reach) -> None:
    """On fake tensors, with sinks and values of another size."""
    mask = AttentionMask.of(2, (0, 64), reach, torch.device("cpu"))
    shapes = ((2, 64, 4, 8), (2, 64, 2, 8), (2, 64, 2, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        qkv = [torch.empty(shape, requires_grad=True) for shape in shapes]
        sinks = torch.empty(4, requires_grad=True)
        out = kernel(qkv[0], qkv[1], qkv[2], kernel.prepare(mask), Terms(0.3, cap), sinks)
        assert out.shape == (2, 64, 4, 4)
        gradients = torch.autograd.grad(out.sum(), [*qkv, sinks])
    assert [x.shape for x in gradients] == [x.shape for x in (*qkv, sinks)]
