"""A step reads nothing of what the device computes: whoever reads waits for it, and the device for what comes next.

The step is issued on fake tensors, which have shapes and no values: reading one is an error, and so is an operation
whose output's shape depends on values. On the meta device, which is not that of the batches as on a GPU, an operation
on tensors of both is an error too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp._fully_shard as fsdp
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import flex_attention

from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import destroy
from pipeline.train.loop.quantities.data_hash import DataHash
from pipeline.train.loop.quantities.requests import AgreedRequests
from pipeline.train.loop.quantities.windows import WindowLosses
from pipeline.train.loop.quantities.work import RankWork
from pipeline.train.loop.step import Stepper, StepResult
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.model.kernels.attention_mask import Kernel
from pipeline.train.model.kernels.flex import Flex
from pipeline.train.model.kernels.packed import Varlen
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.part_spec import KernelUse, Reach
from pipeline.train.monitor.spikes import SpikeGuard
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import parallelize
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.teacher import Teacher, build_teacher, teacher_config
from pipeline.train.planning.fake import fake_mesh
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.stop_requests import StopRequest
from tests import tiers
from tests.train.one_process import config_of

CPU, META = torch.device("cpu"), torch.device("meta")
SAMPLES, LENGTH = 2, 16
READS = (DataDependentOutputException, DynamicOutputShapeException)

MODEL: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_multiple": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Layout]] = {
    "plain": ({}, {}, Layout()),
    "documents": ({"document_attention": True}, {}, Layout()),
    "window": ({"sliding_window": 3}, {}, Layout()),
    "gpt2": (
        {"norm": "layernorm", "mlp": "gelu", "bias": "all", "positions": "learned", "tie_embeddings": True},
        {},
        Layout(),
    ),
    "spikes, average, observed": (
        {},
        {
            "faults": {"on_spike": "skip"},
            "ema": {"decay": 0.9},
            "metrics": {"layers_every_steps": 1},
            "loss": {"z_loss": 1e-4, "chunk_tokens": 8},
        },
        Layout(),
    ),
    "fp16": ({}, {"precision": {"compute": "fp16"}}, Layout()),
    "dropout": ({"dropout": 0.1}, {}, Layout()),
    "recomputed": ({}, {"recompute": {"mode": "full"}}, Layout()),
    "fsdp2": ({}, {}, Layout(dp_shard=2)),
    "hsdp, documents": ({"document_attention": True}, {}, Layout(dp_replicate=2, dp_shard=2)),
    "tp2": ({}, {"metrics": {"layers_every_steps": 1}}, Layout(tp=2)),
    "taught": (
        {"document_attention": True},
        {"distill": {"teacher": {"hf": "/nowhere"}, "temperature": 2.0}, "loss": {"chunk_tokens": 8}},
        Layout(dp_shard=2),
    ),
    "taught, tp2": ({}, {"distill": {"teacher": {"hf": "/nowhere"}}}, Layout(tp=2)),
    "cp2": ({}, {}, Layout(cp=2)),
    "pairs": ({"document_attention": True}, {"preference": {}, "loss": {"chunk_tokens": 8}}, Layout()),
    "pairs, cp2": ({}, {"preference": {"label_smoothing": 0.1}}, Layout(cp=2)),
}


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Tests of a whole run may have come before."""
    destroy()


def issue(
    case: str, change: Callable[[Stepper], None] = lambda stepper: None, device: torch.device = CPU
) -> StepResult:
    """Two steps of two micro-batches, which are on the host at first, and the result of the second."""
    model_changes, train_changes, layout = CASES[case]
    train = {"sequence_length": LENGTH, "micro_batch_size": SAMPLES, **train_changes}
    config = config_of({**MODEL, **model_changes}, parallel=layout.degrees, **train)
    spec = decoder_spec(config.model, 61, LENGTH)
    # On the host, where everybody may read them.
    starts = torch.tensor([0, 5, LENGTH, LENGTH + 3], dtype=torch.int32)
    with fake_mesh(layout, 0) as mesh:
        model, teacher = parallelize(config, Setup(META, mesh, spec)), None
        if (distill := config.train.teacher) is not None:
            frozen = build_teacher(teacher_config(config, config.model), Setup(META, mesh, spec))
            teacher = Teacher(distill, frozen)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.whole.to_empty(device=device)
            if teacher is not None:
                frozen.whole.to_empty(device=device)
            agreement = AgreedRequests(lambda: StopRequest(False, False), device)
            folder = cast(RunFolder, SimpleNamespace(path=Path("/nowhere"), attempt=1))
            windows = WindowLosses(config, folder, device)
            more = [agreement, DataHash(mesh), RankWork(lambda rank: None), windows]
            setup, optimizers = Setup(device, mesh, spec), Optimizers(config, model)
            stepper = Stepper(config, setup, model, optimizers, sources=["a", "b"], quantities=more, teacher=teacher)
            change(stepper)
            for step in range(2):
                ids, size = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64), (SAMPLES, LENGTH)
                sources = torch.zeros(SAMPLES, dtype=torch.int64)
                batches = [Batch(ids, ids, torch.ones(size), starts, sources, {}, sources) for _ in range(2)]
                if config.train.preference is not None:
                    pairs = {"conversation": ids, "reference": torch.zeros(3, 2, dtype=torch.float64)}
                    batches = [replace(batch, **pairs) for batch in batches]
                if stepper.spikes is not None:
                    stepper.spikes.compare_within("some")
                data = StepData(step, batches, 2 * SAMPLES * LENGTH, samples=range(2 * SAMPLES))
                result = stepper.step(data, 1e-3)
                result.to_host()
    return result


@pytest.mark.parametrize("case", tiers.first(4, CASES, rest="guard"))
def test_a_step_is_issued_without_a_value_of_the_device(case: str) -> None:
    result = issue(case)
    assert len(result.readings) >= 4
    for reading in result.readings:
        with pytest.raises(READS):
            reading.read(**reading.tensors)


class _Stream(torch.cpu.Stream):
    stream_id = device_index = device_type = 0  # what 2.15 asks for

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch takes the meta device for an accelerator, with streams and kernels of its own."""
    handle = {**vars(torch.cpu), "Stream": _Stream, "current_stream": lambda device=None: _Stream()}
    monkeypatch.setattr(torch, "meta", SimpleNamespace(**handle), raising=False)
    monkeypatch.setattr(fsdp._fully_shard, "_get_device_from_mesh", lambda mesh: META)
    monkeypatch.setattr(fsdp._fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None)
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        for kind in ("foreach", "fused"):
            name = f"_get_{kind}_kernels_supported_devices"
            monkeypatch.setattr(importlib.import_module(module), name, lambda: ["cpu", "meta"])
    with torch.library._scoped_library("aten", "IMPL") as library:
        # torch has none; what it is told to change keeps its shape.
        library.impl("_fused_sgd_", lambda *_, **__: None, "Meta")
        yield


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "case", ["spikes, average, observed", "fp16", "dropout", "hsdp, documents", "tp2", "taught", "pairs"]
)
def test_a_step_has_everything_on_its_device(accelerated: None, case: str) -> None:
    """Forward, backward and update, the batches sent by the step; where an attention is in tiles, these are a CPU's."""
    result = issue(case, device=META)
    assert {tensor.device for reading in result.readings for tensor in reading.tensors.values()} == {META}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_fp8_as_a_gpu_has_them(accelerated: None, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Not emulated: torch checks formats, scales and the order in memory of both factors, forward and backward."""
    products, multiply = [], torch._scaled_mm

    def spy(*factors: torch.Tensor, **how: Any) -> torch.Tensor:
        products.append({factor.dtype for factor in factors[:2]})
        return multiply(*factors, **how)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    monkeypatch.setitem(CASES, "fp8", ({}, {"precision": {"fp8": {"min_size": 16, "recipe": recipe}}}, Layout()))
    issue("fp8", device=META)
    # 3 products of each of 7 matrices in 2 layers, in 2 micro-batches of 2 steps.
    assert len(products) == 7 * 2 * 2 * 2 * 3
    assert all(each <= {torch.float8_e4m3fn, torch.float8_e5m2} for each in products)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(partial(Sdpa, on_gpu=True), "documents"), (Varlen, "documents"), (Varlen, "window"), (Flex, "documents")],
)
@pytest.mark.parametrize("reach", tiers.first(1, [None, Reach(None, None)], rest="guard"))
def test_attention_as_a_gpu_has_it(
    accelerated: None, monkeypatch: pytest.MonkeyPatch, kernel: Callable[[], Kernel], case: str, reach: Reach | None
) -> None:
    """torch's own, with both passes; what they compute is for `tests/train/model/kernels`."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it knows GPUs by name

    def change(stepper: Stepper) -> None:
        for each in stepper._model.parts.values():
            each.kernel = kernel()

    if reach is not None:
        use = KernelUse(reach, 8, 8)
        monkeypatch.setattr(AttentionSpec, "kernel", property(lambda _: use))
    issue(case, change, META)


def test_a_tensor_of_the_host_is_found(accelerated: None) -> None:
    def spoil(stepper: Stepper) -> None:
        assert isinstance(stepper.spikes, SpikeGuard)
        judge = stepper.spikes.judge

        def mixing(loss: torch.Tensor, norm: torch.Tensor, finite: torch.Tensor) -> Any:
            return judge(loss, norm + torch.ones(1), finite)

        stepper.spikes.judge = mixing  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="two (different )?devices"):
        issue("spikes, average, observed", spoil, META)


@pytest.mark.parametrize("read", [lambda x: x.item(), bool, lambda x: x.view(1).tolist(), torch.nonzero])
def test_a_step_that_reads_is_found(read: Callable[[torch.Tensor], object]) -> None:
    def spoil(stepper: Stepper) -> None:
        assert isinstance(stepper.spikes, SpikeGuard)
        judge = stepper.spikes.judge

        def reading(loss: torch.Tensor, norm: torch.Tensor, finite: torch.Tensor) -> Any:
            read(loss)
            return judge(loss, norm, finite)

        stepper.spikes.judge = reading  # type: ignore[method-assign]

    with pytest.raises(READS):
        issue("spikes, average, observed", spoil)
