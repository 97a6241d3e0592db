"""A step reads nothing of what the device computes: whoever reads waits for it, and the device for what comes next.

The step is issued on fake tensors, which have shapes and no values: reading one is an error, and so is an operation
whose output's shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from pipeline.config.model import ModelConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.train import TrainConfig
from pipeline.data.batch import Batch
from pipeline.train.model.config import decoder_spec
from pipeline.train.optim import Optimizers
from pipeline.train.parallel.layout import Layout
from pipeline.train.parallel.parallelize import parallelize
from pipeline.train.parallel.processes import part
from pipeline.train.planning.fake import fake_mesh
from pipeline.train.spikes import SpikeGuard
from pipeline.train.step import Stepper, StepResult

CPU = torch.device("cpu")
SAMPLES, LENGTH = 2, 16
READS = (DataDependentOutputException, DynamicOutputShapeException)

MODEL: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_multiple": 8}
TRAIN: dict[str, Any] = {"duration": "10 steps", "sequence_length": LENGTH}
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
    "recomputed": ({}, {"recompute": {"mode": "full"}}, Layout()),
    "fsdp2": ({}, {}, Layout(dp_shard=2)),
    "hsdp, documents": ({"document_attention": True}, {}, Layout(dp_replicate=2, dp_shard=2)),
    "tp2": ({}, {"metrics": {"layers_every_steps": 1}}, Layout(tp=2)),
    "cp2": ({}, {}, Layout(cp=2)),
}


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Tests of a whole run may have come before."""
    part()


def issue(case: str, change: Callable[[Stepper], None] = lambda stepper: None) -> StepResult:
    """Two steps of two micro-batches, and the result of the second."""
    model_changes, train_changes, layout = CASES[case]
    config = ModelConfig.model_validate({**MODEL, **model_changes})
    train = TrainConfig.model_validate({**TRAIN, "micro_batch_size": SAMPLES, **train_changes})
    parallel = ParallelConfig().model_copy(update=layout.degrees)
    spec = decoder_spec(config, 61, LENGTH)
    # On the host, where everybody may read them.
    starts = torch.tensor([0, 5, LENGTH, LENGTH + 3], dtype=torch.int32)
    with fake_mesh(layout, 0) as mesh:
        model = parallelize(spec, mesh, parallel, train.precision, torch.device("meta"), LENGTH, train)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.whole.to_empty(device=CPU)
            optimizers = Optimizers(model, config.init, train.optimizer)
            attends = config.document_attention
            stepper = Stepper(
                model, optimizers, mesh, CPU, train=train, parallel=parallel, sources=2, document_attention=attends
            )
            change(stepper)
            for step in (1, 2):
                ids, size = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64), (SAMPLES, LENGTH)
                sources = torch.zeros(SAMPLES, dtype=torch.int64)
                batches = [Batch(ids, ids, torch.ones(size), starts, sources, {}) for _ in range(2)]
                if stepper.spikes is not None:
                    stepper.spikes.compare_within("some")
                result = stepper.step(batches, 2 * SAMPLES * LENGTH, 1e-3, step=step)
                result.to_host()
    return result


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_issued_without_a_value_of_the_device(case: str) -> None:
    result = issue(case)
    for read in (result.grad_norm.item, result.data_hash, result.wish):
        with pytest.raises(READS):
            read()


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
