"""Batches on their way to a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipeline.data.loading.batch import Batch, StepData
from pipeline.data.loading.prefetch import copied


def batch(seed: int = 0, size: int = 4, length: int = 512) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (size, length + 1), generator=generator)
    starts = torch.tensor([0, 5, *range(length, size * length, length)], dtype=torch.int32)
    weight = torch.rand(size, length, generator=generator)
    extras = {"asked": torch.arange(3)}
    return Batch(tokens[:, :-1], tokens[:, 1:], weight, starts, torch.zeros(size, dtype=torch.int64), extras)


def step_of(seed: int, pinned: bool = False) -> StepData:
    data = StepData(seed, [batch(seed), batch(seed + 1000)], 9, {"a": 9}, 1, 2)
    return data.pin() if pinned else data


def test_document_starts_stay_on_the_host() -> None:
    moved = batch().to(torch.device("meta"))
    assert moved.starts.device.type == "cpu"
    assert moved.starts.tolist() == [0, 5, 512, 1024, 1536]
    for tensor in (moved.tokens, moved.targets, moved.weight, moved.sources, moved.extras["asked"]):
        assert tensor.device.type == "meta"
    assert moved.bounds.device.type == moved.positions.device.type == "meta"
    assert moved.bounds.shape == moved.tokens.shape


def test_a_cpu_gets_the_steps_as_they_are() -> None:
    steps = [step_of(seed) for seed in range(3)]
    given = list(copied(steps, torch.device("cpu")))
    assert all(one is other for one, other in zip(given, steps, strict=True))


@pytest.mark.gpu
def test_a_gpu_gets_the_same_numbers_while_it_computes() -> None:
    """Each step is asked for while the device still works on the one before, whose memory is free for reuse."""
    device = torch.device("cuda")
    busy = torch.rand(4096, 4096, device=device)

    def steps() -> Iterator[StepData]:
        for seed in range(20):
            yield step_of(seed, pinned=True)

    sums = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for data in copied(steps(), device):
            for _ in range(10):
                busy = torch.mm(busy, busy).clamp(0, 1e-3)
            parts = [x.double().sum() for b in data.micro_batches for x in (b.tokens, b.targets, b.weight, b.bounds)]
            sums.append(torch.stack(parts))
            del data
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed, found in enumerate(sums):
        wanted = [
            x.double().sum().item()
            for b in step_of(seed).micro_batches
            for x in (b.tokens, b.targets, b.weight, b.bounds)
        ]
        assert found.tolist() == pytest.approx(wanted, rel=1e-12)
