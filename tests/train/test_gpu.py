"""Training on a GPU: as on the CPU, and with `train.deterministic` the same bits twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.train.run_folder import read_metrics
from tests.train.averages import averages_differ
from tests.train.runs import column, exact, train, weights_hash

pytestmark = pytest.mark.gpu

FP32 = "train.precision.compute=fp32"


def test_a_gpu_computes_what_a_cpu_does(root: Path) -> None:
    cpu = train(root, "cpu", FP32, "launch.device=cpu")
    gpu = train(root, "gpu", FP32, "launch.device=cuda")
    for key in ("order_hash", "data_hash", "tokens"):
        assert column(gpu, key) == column(cpu, key)
    assert column(gpu, "loss") == pytest.approx(column(cpu, "loss"), rel=1e-4)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_deterministic_runs_have_the_same_bits(root: Path, compute: str) -> None:
    values = ("launch.device=cuda", "train.deterministic=true", f"train.precision.compute={compute}")
    once, again = (train(root, f"{compute}-{name}", *values) for name in ("once", "again"))
    assert exact(again) == exact(once)
    assert weights_hash(again) == weights_hash(once)


def test_the_average_of_the_weights_on_a_gpu(root: Path) -> None:
    keep = ("train.checkpoint.every_steps=1", "train.checkpoint.keep=99")
    run = train(root, "average", "launch.device=cuda", "train.ema.decay=0.8", *keep)
    assert averages_differ(run, 0.8, first=1, last=8) == []


def test_a_gpu_sees_by_layer_what_a_cpu_does(root: Path) -> None:
    values = (FP32, "train.duration=3 steps", "train.metrics.layers_every_steps=1")
    rows = [
        read_metrics(train(root, f"seen-{device}", *values, f"launch.device={device}")) for device in ("cpu", "cuda")
    ]
    for cpu, gpu in zip(*rows, strict=True):
        for key in ("grad_norm_by_layer", "activation_rms_by_layer", "attention_logit_max_by_layer"):
            assert gpu[key] == pytest.approx(cpu[key], rel=1e-3), key


def test_layers_that_are_recomputed_moved_or_compiled_on_a_gpu(root: Path) -> None:
    values = (FP32, "launch.device=cuda", "train.deterministic=true", "train.compile=false")
    plain = train(root, "layers-plain", *values)
    for name, how in (("full", "mode: full"), ("moved", "mode: full, offload: true"), ("some", "mode: selective")):
        run = train(root, f"layers-{name}", *values, f"train.recompute={{{how}}}")
        assert exact(run) == exact(plain)
        assert weights_hash(run) == weights_hash(plain)
    compiled = train(root, "layers-compiled", FP32, "launch.device=cuda", "train.compile=true")
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)
