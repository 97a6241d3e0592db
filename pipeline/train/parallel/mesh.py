"""The process group, the device mesh, and which of its axes each role uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.errors import UserError

Role = Literal["params", "batch", "loss", "clip"]

_AXES: dict[Role, str] = {"params": "dp_shard", "batch": "dp_shard", "loss": "dp_shard", "clip": "dp_shard"}


@dataclass(frozen=True)
class Mesh:
    """A device mesh that is asked by role, so that an axis can be added without touching those who use the others."""

    devices: DeviceMesh

    def role(self, role: Role) -> DeviceMesh:
        """The (sub-)mesh over which parameters are sharded, the batch is split, or a sum is taken."""
        return self.devices[_AXES[role]]

    def rank(self, role: Role) -> int:
        """This process's coordinate on the role's mesh."""
        return self.role(role).get_local_rank()

    def size(self, role: Role) -> int:
        """Number of processes on the role's mesh."""
        return self.role(role).size()


def choose_device(wanted: str) -> torch.device:
    """The device of `launch.device`."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("launch.device is cuda, but torch sees no CUDA device here; use launch.device=cpu or auto")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", 0)
    return torch.device("cpu")


def build_mesh(device: torch.device) -> Mesh:
    """The mesh of this run; one process, whose group needs no port (an in-memory store)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != 1:
        raise UserError(f"WORLD_SIZE is {world}, but this version trains with one process; unset it")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return Mesh(init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",)))
