"""The device mesh, and which of its axes each role uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.train.parallel.compat import flatten_mesh, set_timeout
from pipeline.train.parallel.layout import Layout
from pipeline.train.parallel.processes import COLLECTIVE_TIMEOUT

Role = Literal["pp", "tp", "params", "batch"]

_AXES: dict[Role, tuple[str, ...]] = {
    "pp": ("pp",),
    "tp": ("tp",),
    # HSDP: sharded along the last axis, replicated along the one before.
    "params": ("dp_replicate", "dp_shard"),
    "batch": ("dp_replicate", "dp_shard"),
}


@dataclass(frozen=True)
class Mesh:
    """A device mesh that is asked by role, so that an axis can be added without touching those who use the others.

    It has the axes of more than one process and `dp_shard`, over which parameters are sharded even if that is one.
    """

    devices: DeviceMesh
    layout: Layout

    def role(self, role: Role) -> DeviceMesh:
        """The mesh over which parameters are sharded, a batch is split, or tensors or layers are cut.

        That of `params` has two axes where parameters are replicated too. "pp" and "tp" exist only above degree 1.
        """
        axes = self._axes(role)
        mesh = self.devices[axes if len(axes) > 1 else axes[0]]
        return _flat(mesh, role) if role == "batch" and len(axes) > 1 else mesh

    def size(self, role: Role) -> int:
        """Number of processes on the role's mesh."""
        return self.role(role).size() if self._axes(role) else 1

    def rank(self, role: Role) -> int:
        """This process's coordinate on the role's mesh."""
        if not self._axes(role):
            return 0
        mesh = self.role(role)
        return mesh.get_local_rank() if mesh.ndim == 1 else _flat(mesh, role).get_local_rank()

    def _axes(self, role: Role) -> tuple[str, ...]:
        names = self.devices.mesh_dim_names or ()
        return tuple(axis for axis in _AXES[role] if axis in names)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of a layout over all processes, whose group exists already. Every process calls this."""
    degrees = {axis: degree for axis, degree in layout.degrees.items() if degree > 1 or axis == "dp_shard"}
    devices = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    set_timeout(devices, COLLECTIVE_TIMEOUT)
    return Mesh(devices, layout)


def _flat(mesh: DeviceMesh, role: Role) -> DeviceMesh:
    """The axes of a role as one."""
    flat = flatten_mesh(mesh, role)
    set_timeout(flat, COLLECTIVE_TIMEOUT)
    return flat
