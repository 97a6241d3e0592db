"""Names of torch that are not public, of process groups over gloo; see `core.py`."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


def give_gloo_one_thread() -> None:
    """Let groups over gloo that are made from now on have one thread that runs collectives; again it does nothing.

    Torch gives a group two, in 2.11 and 2.13. When a collective has ended, its thread writes the collective's name into
    one string of the group, without a lock: two that end together free the same memory twice, and the process dies
    sooner or later (`ProcessGroupGloo::runLoop`). Two are under way wherever one is not waited for at once, also on
    different axes of a mesh, which share a group where they have the same ranks. With one thread a group's collectives
    run in the order of their issue, which is the same on all ranks. There is no public option.
    """
    backend: Any = dist.ProcessGroupGloo
    if getattr(backend, "_has_one_thread", False):
        return
    make = backend.__init__

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = backend._Options()
        options._threads, options._timeout = 1, timeout
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        make(self, store, rank, size, options)

    backend.__init__, backend._has_one_thread = init, True


@cache
def _devices(interfaces: str) -> list[Any]:
    """Devices of gloo, one per interface; all groups share them, as each has a thread that always wakes up."""
    backend: Any = dist.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return [backend.create_device(interface=name) for name in names] or [backend.create_default_device()]
