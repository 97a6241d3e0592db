"""Memory that a process uses, for the metrics of steps."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_used(device: torch.device) -> dict[str, int]:
    """Memory of this process in bytes; what cannot be measured is left out.

    Returns:
        `host`: resident memory, files that are mapped included. On a GPU also `allocated`, the most that tensors took
        at once since the process began or the peak was reset, and `reserved`, what torch's allocator holds now.
    """
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):  # Linux alone has it
        found["host"] = int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.memory_reserved(device)
    return found
