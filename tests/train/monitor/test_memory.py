"""Memory of a process, against tensors of a known size."""

from __future__ import annotations

import mmap

import pytest
import torch

from pipeline.train.monitor.memory import memory_used

SIZE = 2**26


def test_memory_on_the_host_grows_by_what_is_written() -> None:
    # Pages of its own: an allocator may have some left that are resident already.
    pages = mmap.mmap(-1, SIZE)
    before = memory_used(torch.device("cpu"))
    kept = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    after = memory_used(torch.device("cpu"))
    assert before.keys() == after.keys() == {"host"} and kept[-1] == 1
    assert SIZE / 2 < after["host"] - before["host"] < 2 * SIZE


@pytest.mark.gpu
def test_memory_of_a_gpu_is_the_peak_and_what_is_held() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = memory_used(device)
    kept = torch.ones(SIZE, dtype=torch.uint8, device=device)
    del kept
    after = memory_used(device)
    assert after["allocated"] - before["allocated"] == SIZE
    assert after["reserved"] - before["reserved"] >= SIZE
