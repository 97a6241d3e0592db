"""Advice where a device runs out of memory: which key of the run file makes the model or a step smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeline.common.errors import MachineError


def weights_advice() -> str:
    """Advice for a model that does not fit before the first step."""
    where = f" (rank {dist.get_rank()})" if dist.get_world_size() > 1 else ""
    return (
        f"building or loading the model{where}, whose weights and moments alone are too large for the device: raise "
        "parallel.dp_shard, tp or pp, so that each process has less of them; `pipeline train RUN.yaml --check` shows "
        "how much"
    )


def step_advice(step: int, micro_batch_size: int, *, experts: bool = False) -> str:
    """Advice for a step, counted from 1, that does not fit.

    Args:
        step: Its number.
        micro_batch_size: In windows.
        experts: Layers have experts, whose rows no layout bounds.
    """
    rows = ""
    if experts:
        rows = (
            ". The rows that the experts of a rank get depend on the routers: `rows_max_over_mean` below `experts` in "
            "metrics.jsonl shows how uneven they are, and a higher train.balance.loss or bias_rate makes them even"
        )
    where = f"rank {dist.get_rank()} in " if dist.get_world_size() > 1 else ""
    return (
        f"{where}step {step}: lower train.micro_batch_size, or that of the phase ({micro_batch_size} now); "
        f"the result is the same{rows}"
    )


@contextmanager
def out_of_memory_means(advice: Callable[[], str]) -> Iterator[None]:
    """A device that runs out of memory inside is a `MachineError` with `advice`, which is asked for then."""
    try:
        yield
    except RuntimeError as error:
        # On a CPU the kernel mostly ends the process; where there is a limit, torch says so in words alone.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise MachineError(f"out of memory: {advice()} ({_reason(error)})") from error


def _reason(error: RuntimeError) -> str:
    """Torch's words for what it tried to allocate, without its prefix and its advice on allocators."""
    return str(error).partition("DefaultCPUAllocator: ")[2] or str(error).partition(". ")[0]
