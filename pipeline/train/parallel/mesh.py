"""The device mesh, and which of its axes each role uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import COLLECTIVE_TIMEOUT
from pipeline.train.torch_compat.core import set_timeout, unflatten_mesh

Role = Literal["pp", "tp", "cp", "params", "batch"]
MeshRole = Literal["pp", "tp", "cp", "params", "experts", "ep"]

_SHARDS = "shards"
"""Axis of the mesh over which parameters are sharded: dp_shard and cp as one."""
EXPERT_SHARDS = "expert_shards"
"""Axis over which the experts that a process has are sharded."""
_AXES: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "tp": ("tp",),
    # HSDP: sharded along the last axis, replicated along the one before.
    "params": ("dp_replicate", _SHARDS),
    "experts": ("dp_replicate", EXPERT_SHARDS),
    "ep": ("ep",),
}


@dataclass(frozen=True)
class Mesh:
    """A device mesh that is asked by role, so that an axis can be added without touching those who use the others.

    It has the axes pp, dp_replicate and tp where they are of more than one process, and that of the shards, even if
    that is one.
    """

    devices: DeviceMesh
    layout: Layout
    contexts: DeviceMesh | None
    """The axis of the shards once more, as dp_shard and cp; None without cp."""
    experts: DeviceMesh | None = None
    """All processes once more, where dp_shard, cp and tp are one axis, cut into that over which the weights of experts
    are sharded and ep; None for a model without experts."""

    def role(self, role: MeshRole) -> DeviceMesh:
        """The mesh over which parameters are sharded, or tensors, layers or sequences are cut.

        Those of `params`, and of `experts` for their parameters, have two axes where parameters are replicated too. The
        others exist only above degree 1.
        """
        if role == "cp":
            assert self.contexts is not None, "a cp axis of one process"
            return self.contexts["cp"]
        devices = self.devices if role not in ("experts", "ep") else self.experts
        assert devices is not None, "a model without experts"
        axes = tuple(axis for axis in _AXES[role] if axis in (devices.mesh_dim_names or ()))
        return devices[axes if len(axes) > 1 else axes[0]]

    def size(self, role: Role) -> int:
        """Number of processes on the role's mesh; of `batch` those that the samples of a step are dealt to."""
        layout = self.layout
        sizes = {
            "pp": layout.pp,
            "tp": layout.tp,
            "cp": layout.cp,
            "batch": layout.dp,
            "params": layout.dp * layout.cp,
        }
        return sizes[role]

    def rank(self, role: Role) -> int:
        """This process's place along the role's axes."""
        if role in ("cp", "batch"):
            place, piece = divmod(self._coordinate(_SHARDS), self.layout.cp)
            return piece if role == "cp" else self._coordinate("dp_replicate") * self.layout.dp_shard + place
        rank = 0
        for axis in self._axes(role):
            rank = rank * self.devices.size(self._names.index(axis)) + self._coordinate(axis)
        return rank

    @property
    def _names(self) -> tuple[str, ...]:
        return self.devices.mesh_dim_names or ()

    def _axes(self, role: Role) -> tuple[str, ...]:
        return tuple(axis for axis in _AXES[role] if axis in self._names)

    def _coordinate(self, axis: str) -> int:
        return self.devices.get_local_rank(axis) if axis in self._names else 0


def build_mesh(layout: Layout, device_type: str, *, experts: bool = False) -> Mesh:
    """The mesh of a layout over all processes, whose group exists already. Every process calls this.

    Args:
        layout: The degrees.
        device_type: Of the processes.
        experts: The model has some.
    """
    degrees = {axis: degree for axis, degree in layout.degrees.items() if degree > 1 or axis == "dp_shard"}
    cp = degrees.pop("cp", 1)
    # Parameters are sharded over cp too: its ranks have the same parameters, and gradients of different tokens.
    axes = {_SHARDS if axis == "dp_shard" else axis: degree for axis, degree in degrees.items()}
    axes[_SHARDS] *= cp
    devices = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    contexts = None
    if cp > 1:
        contexts = unflatten_mesh(devices[_SHARDS], {"dp_shard": layout.dp_shard, "cp": cp})
        set_timeout(contexts, COLLECTIVE_TIMEOUT)
    set_timeout(devices, COLLECTIVE_TIMEOUT)
    return Mesh(devices, layout, contexts, _expert_mesh(layout, device_type) if experts else None)


def _expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    outer = {"pp": layout.pp, "dp_replicate": layout.dp_replicate}
    axes = {axis: degree for axis, degree in outer.items() if degree > 1}
    axes[EXPERT_SHARDS] = layout.expert_shards
    if layout.ep > 1:
        axes["ep"] = layout.ep
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    set_timeout(mesh, COLLECTIVE_TIMEOUT)
    return mesh
