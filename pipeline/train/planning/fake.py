"""A process that stands for one rank of a layout: the code of training runs in it, and nothing is sent or computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pipeline.train.distributed.layout import Layout
from pipeline.train.parallel.mesh import Mesh, build_mesh
from pipeline.train.torch_compat.core import FAKE_BACKEND, fake_store, forget_shardings, shardings_unseen


@contextmanager
def fake_mesh(layout: Layout, rank: int, *, experts: bool = False) -> Iterator[Mesh]:
    """The mesh of a layout as one of its ranks has it, in this process alone.

    Collectives return at once and leave in their outputs what was there. On leaving, no process group exists again.

    Args:
        layout: Of any size: 16,384 ranks take less than a tenth of a second.
        rank: That this process stands for, from 0 on.
        experts: The model has some.

    Raises:
        RuntimeError: This process has a process group already, which would be lost.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group; plan in a process that is not a rank of a run")
    forget_shardings()
    dist.init_process_group(FAKE_BACKEND, store=fake_store(), rank=rank, world_size=layout.world_size)
    try:
        with shardings_unseen():
            yield build_mesh(layout, "cpu", experts=experts)
    finally:
        dist.destroy_process_group()
        forget_shardings()
