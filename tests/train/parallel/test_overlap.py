"""What is sent beside computation: how often gradients are added up and in which format, and which products are cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.fx_passes import post_grad
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.fsdp import FSDPModule

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.model import InitConfig, ModelConfig
from pipeline.config.parallel import OverlapConfig, ParallelConfig
from pipeline.data.loading.batch import Batch
from pipeline.train.model.context import Context
from pipeline.train.model.init import init_weights
from pipeline.train.parallel.overlap import check_async_tp
from pipeline.train.parallel.parallelize import ParallelModel, parallelize
from pipeline.train.parallel.runner import build_runner
from pipeline.train.parallel.setup import set_up
from tests.train.distributed import ranks
from tests.train.one_process import config_of

pytestmark = pytest.mark.parallel

CPU = torch.device("cpu")
LENGTH, VOCABULARY = 16, 128
MODEL = ModelConfig(layers=2, dim=64, heads=4, ffn_dim=128)


def _config(parallel: ParallelConfig, **train: Any) -> Config:
    return config_of(MODEL, parallel=parallel, sequence_length=LENGTH, **train)


def _built(config: Config) -> ParallelModel:
    model = parallelize(config, set_up(config, VOCABULARY, CPU))
    init_weights(model.whole, model.spec, InitConfig(std=0.1), seed=1)
    return model


def _gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]


def _batches(count: int, samples: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    size = (samples, LENGTH)
    tokens = [torch.randint(VOCABULARY, size, generator=generator) for _ in range(count)]
    zeros = torch.zeros(samples, dtype=torch.int32)
    return [Batch(each, each, torch.ones(size), zeros, zeros.long(), {}) for each in tokens]


def _objective(logits: Any, batch: Batch) -> torch.Tensor:
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return losses / 100


def _accumulated(reduce: str) -> dict[str, torch.Tensor]:
    """Gradients of 8 micro-batches in bf16."""
    parallel = ParallelConfig(dp_shard=2, overlap=OverlapConfig.model_validate({"reduce": reduce}))
    config = _config(parallel, precision={"compute": "bf16"})
    model = _built(config)
    runner = build_runner(config, set_up(config, VOCABULARY, CPU), model)
    batches = _batches(8, 1)
    runner.train(batches, [Context() for _ in batches], _objective)
    return _gradients(model)


@pytest.mark.slow
def test_gradients_in_bf16_add_up_in_fp32() -> None:
    """Each micro-batch's are bf16 in both; their sum is fp32 in both, and would be off by 2^-9 and more otherwise."""
    each, _ = ranks.run(2, _accumulated, "each")
    last, _ = ranks.run(2, _accumulated, "last")
    for name, gradient in each.items():
        error = (gradient - last[name]).abs().max() / gradient.abs().max()
        assert error < 1e-6, (name, error)


def _ahead() -> dict[str, list[str]]:
    """By module, what it gathers ahead."""
    overlap = OverlapConfig(forward_prefetch=2, backward_prefetch=2)
    model = _built(_config(ParallelConfig(dp_shard=2, overlap=overlap), precision={"compute": "fp32"})).whole
    names = {module: name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    states = {module._get_fsdp_state(): name for module, name in names.items()}
    found = {}
    for state, name in states.items():
        found[f"forward {name}"] = [states[each] for each in state._states_to_forward_prefetch]
        found[f"backward {name}"] = [states[each] for each in state._states_to_backward_prefetch]
    return found


@pytest.mark.guard
def test_layers_gather_those_after_them() -> None:
    found, _ = ranks.run(2, _ahead)
    assert found == {
        "forward ": ["layers.0", "layers.1"],
        "forward layers.0": ["layers.1"],
        "forward layers.1": [],
        "backward ": ["layers.1", "layers.0"],
        "backward layers.1": ["layers.0"],
        "backward layers.0": [],
    }


@contextmanager
def _on_cpu(seen: list[tuple[int, int, int, int]]) -> Iterator[None]:
    """inductor cuts products as on a GPU, and operations of GPUs are those that torch describes them by.

    Of each graph is noted: fused gathers, fused sums, gathers and sums that are left.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    fuse, has_nccl = post_grad.micro_pipeline_tp_pass, dist.is_nccl_available

    def watched(graph: torch.fx.Graph) -> None:
        fuse(graph)
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        kinds = ("fused_all_gather", "fused_matmul_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        seen.append(tuple(sum(kind in target for target in targets) for kind in kinds))  # type: ignore[arg-type]

    post_grad.micro_pipeline_tp_pass = watched
    dist.is_nccl_available = lambda: True
    try:
        with inductor.patch(force_disable_caches=True):
            yield
    finally:
        post_grad.micro_pipeline_tp_pass, dist.is_nccl_available = fuse, has_nccl


def _cut(samples: int) -> tuple[list[tuple[int, int, int, int]], float]:
    """What inductor made of the layers of two ranks, and the largest error of a gradient."""
    gradients = []
    seen: list[tuple[int, int, int, int]] = []
    for cut in (False, True):
        parallel = ParallelConfig(tp=2, overlap=OverlapConfig(async_tp=cut))
        config = _config(parallel, compile=cut, precision={"compute": "fp32"})
        with _on_cpu(seen):
            model = _built(config)
            model.train()
            (batch,) = _batches(1, samples)
            logits = model.whole(batch.tokens, Context())
            weights = torch.linspace(-1, 1, logits.shape[-1])
            (logits.float() * weights).square().sum().backward()
        gradients.append(_gradients(model))
    errors = [(one - gradients[1][name]).abs().max() / one.abs().max() for name, one in gradients[0].items()]
    return seen, max(errors).item()


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2])
def test_products_beside_collectives_are_cut(samples: int) -> None:
    """All but the sums of gradients of inputs, which are sums of several products."""
    for seen, error in ranks.run(2, _cut, samples, timeout=300):
        assert seen == [(2, 2, 0, 0), (2, 0, 0, 2)]
        assert error < 1e-5


def _refused() -> None:
    parallel = ParallelConfig(tp=2, overlap=OverlapConfig(async_tp=True))
    config = _config(parallel, compile=True)
    check_async_tp(config, set_up(config, VOCABULARY, CPU))


def _apart() -> str:
    """What the check says where ranks 2 and 3, a group of tp, are on two machines."""
    parallel = ParallelConfig(dp_shard=2, tp=2, overlap=OverlapConfig(async_tp=True))
    config = _config(parallel, compile=True)
    setup = replace(set_up(config, VOCABULARY, CPU), device=torch.device("cuda"))
    name, socket.gethostname = socket.gethostname, lambda: "two" if dist.get_rank() == 3 else "one"
    try:
        check_async_tp(config, setup)
    except UserError as error:
        return str(error)
    finally:
        socket.gethostname = name
    return ""


@pytest.mark.guard
def test_machines_of_one_group_end_all_processes() -> None:
    said = ranks.run(4, _apart)
    assert len(set(said)) == 1
    assert "parallel.tp=2 over the machines one, two: the processes of tp must be in one" in said[0]


def test_a_cpu_sends_nothing_to_gpus() -> None:
    with pytest.raises(ranks.RankFailed, match=r"set parallel.overlap.async_tp=false") as failure:
        ranks.run(2, _refused)
    assert UserError.__name__ in str(failure.value)
