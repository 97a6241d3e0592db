"""Training on a GPU: as on the CPU, and with `train.deterministic` the same bits twice."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.train.host.host_copy import HostCopy
from pipeline.train.loop import trainer
from pipeline.train.run.folder import read_metrics
from tests.data import pairs
from tests.train.optim.averages import averages_differ
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


def test_pairs_on_a_gpu(tmp_path: Path) -> None:
    """The reference and the steps, as on the CPU; deterministic ones have the same bits twice."""
    pairs.make(pairs.write(tmp_path))
    pairs.base(tmp_path, {"launch.device": "cpu"})
    devices = {"cpu": [], "cuda": ["train.deterministic=true"], "again": ["train.deterministic=true"]}
    runs = {
        name: train(
            tmp_path,
            name,
            f"launch.device={'cpu' if name == 'cpu' else 'cuda'}",
            f"train.preference.reference_dir={tmp_path / f'reference-{name}'}",
            *values,
            file="pairs.yaml",
        )
        for name, values in devices.items()
    }
    assert exact(runs["again"]) == exact(runs["cuda"]) and weights_hash(runs["again"]) == weights_hash(runs["cuda"])
    found = column(runs["cuda"], "preference_loss")
    assert found[:3] == pytest.approx(column(runs["cpu"], "preference_loss")[:3], rel=1e-3)


def test_layers_that_are_recomputed_moved_or_compiled_on_a_gpu(root: Path) -> None:
    values = (FP32, "launch.device=cuda", "train.deterministic=true", "train.compile=false")
    plain = train(root, "layers-plain", *values)
    for name, how in (("full", "mode: full"), ("moved", "mode: full, offload: true"), ("some", "mode: selective")):
        run = train(root, f"layers-{name}", *values, f"train.recompute={{{how}}}")
        assert exact(run) == exact(plain)
        assert weights_hash(run) == weights_hash(plain)
    compiled = train(root, "layers-compiled", FP32, "launch.device=cuda", "train.compile=true")
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)


STRICT: dict[str, list[str]] = {
    "plain": ["train.compile=false"],
    "compiled": ["train.compile=true"],
    "documents": ["model.document_attention=true"],
    "fp16": ["train.precision.compute=fp16"],
    "more": ["train.faults.on_spike=skip", "train.ema.decay=0.9", "train.metrics.layers_every_steps=1"],
}


@pytest.mark.parametrize("case", STRICT)
def test_nothing_waits_for_the_device_between_steps(root: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """torch raises where an operation would; an event that is waited for is none. The first steps may compile."""
    original = trainer.Profile.step
    strict = []

    @contextmanager
    def strictly(self: trainer.Profile, step: int) -> Iterator[None]:
        if 4 <= step < 8:
            torch.cuda.set_sync_debug_mode("error")
            strict.append(step - 1)
        try:
            with original(self, step):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(trainer.Profile, "step", strictly)
    rare = ("launch.device=cuda", "train.validation.samples=0", "train.checkpoint.every_steps=99")
    run = train(root, f"strict-{case}", *rare, *STRICT[case])
    assert strict == [3, 4, 5, 6]
    assert len(read_metrics(run)) == 8


def test_numbers_are_read_while_the_device_goes_on() -> None:
    device = torch.device("cuda")
    values = [torch.tensor(0.1, dtype=torch.float64, device=device), torch.tensor([True, False], device=device)]
    torch.cuda.synchronize()
    copy = HostCopy(values)
    torch.cuda._sleep(2_000_000_000)  # about a second
    after = torch.cuda.Event()
    after.record()
    number, flags = copy.wait()
    assert not after.query(), "it waited for what came later"
    assert number.item() == 0.1 and flags.tolist() == [True, False] and flags.dtype == torch.bool
    after.synchronize()


def test_a_profile_of_a_gpu(root: Path) -> None:
    values = ("launch.device=cuda", "train.deterministic=true")
    plain = train(root, "unprofiled", *values)
    run = train(root, "profiled", *values, "train.profile={steps: [3, 4], memory: true}")
    assert exact(run) == exact(plain)
    (trace,) = run.rglob("trace-*")
    with gzip.open(trace) as opened:
        kinds = {event.get("cat") for event in json.load(opened)["traceEvents"]}
    assert "kernel" in kinds and "user_annotation" in kinds
    (memory,) = run.rglob("memory-*")
    assert memory.name == "memory-step-00000004.rank-0000.pickle"
    assert any(pickle.loads(memory.read_bytes())["device_traces"])
