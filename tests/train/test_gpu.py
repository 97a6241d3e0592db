"""Training on a GPU: as on the CPU, and with `train.deterministic` the same bits twice."""

from __future__ import annotations

from pathlib import Path

import pytest

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
