"""The device mesh, and which of its axes each role uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.train.distributed.axes import EXPERT_PLACES, AxisName, axis_names
from pipeline.train.distributed.layout import Layout
from pipeline.train.distributed.process_group import COLLECTIVE_TIMEOUT
from pipeline.train.torch_compat.core import set_timeout, unflatten_mesh

Role = Literal["pp", "tp", "cp", "params", "batch"]
MeshRole = Literal["pp", "tp", "cp", "params", "experts", "ep"]

_SHARDS = "shards"
"""Dimension of the mesh over which parameters are sharded: dp_shard and cp as one."""
EXPERT_SHARDS = "expert_shards"
"""Dimension over which the experts that a process has are sharded."""
_SHARDED = axis_names(lambda axis: axis.weights == "shards")
_COPIED = axis_names(lambda axis: axis.weights == "copies")
_DIMENSIONS: dict[str, tuple[str, ...]] = {
    # HSDP: `fully_shard` takes the last dimension of a mesh to shard over, and the one before to replicate over.
    "params": (*_COPIED, _SHARDS),
    "experts": (*_COPIED, EXPERT_SHARDS),
}
"""Role -> dimensions of a mesh; of the others one with their name."""
_RANKS: dict[str, tuple[AxisName, ...]] = {
    "batch": axis_names(lambda axis: axis.data == "samples"),
    "params": axis_names(lambda axis: axis.weights in ("copies", "shards")),
}
"""Role -> axes; of the others one with their name."""
_SAME_LOSSES = axis_names(lambda axis: axis.same_losses)
_SAME_SAMPLES = axis_names(lambda axis: axis.data != "samples")


@dataclass(frozen=True)
class Mesh:
    """A device mesh that is asked by role, so that an axis can be added without touching those who use the others.

    It has the axes pp, dp_replicate and tp where they are of more than one process, and that of the shards, even if
    that is one.
    """

    devices: DeviceMesh
    layout: Layout
    contexts: DeviceMesh | None
    """The dimension of the shards once more, as dp_shard and cp; None without cp."""
    experts: DeviceMesh | None = None
    """All processes once more, where dp_shard, cp and tp are one axis, cut into that over which the weights of experts
    are sharded and ep; None for a model without experts."""

    def role(self, role: MeshRole) -> DeviceMesh:
        """The mesh over which parameters are sharded, or tensors, layers or sequences are cut.

        Those of `params`, and of `experts` for their parameters, have two axes where parameters are replicated too. The
        others exist only above degree 1.
        """
        devices = {"cp": self.contexts, "ep": self.experts, "experts": self.experts}.get(role, self.devices)
        assert devices is not None, f"{role} over one process, or without experts"
        dimensions = tuple(each for each in _DIMENSIONS.get(role, (role,)) if each in (devices.mesh_dim_names or ()))
        return devices[dimensions if len(dimensions) > 1 else dimensions[0]]

    def size(self, role: Role) -> int:
        """Number of processes on the role's mesh; of `batch` those that the samples of a step are dealt to."""
        return self.layout.product(_axes(role))

    def rank(self, role: Role) -> int:
        """This process's place along the role's axes."""
        return self._place(_axes(role))

    @property
    def counts_losses(self) -> bool:
        """True on one of the processes that compute the same losses: it adds them to sums over all processes."""
        return self._place(_SAME_LOSSES) == 0

    @property
    def counts_samples(self) -> bool:
        """True on one of the processes that have the same samples."""
        return self._place(_SAME_SAMPLES) == 0

    def _place(self, axes: tuple[AxisName, ...]) -> int:
        return self.layout.place(self.devices.get_rank(), axes)


def _axes(role: Role) -> tuple[AxisName, ...]:
    return _RANKS.get(role) or (cast(AxisName, role),)


def build_mesh(layout: Layout, device_type: str, *, experts: bool = False) -> Mesh:
    """The mesh of a layout over all processes, whose group exists already. Every process calls this.

    Args:
        layout: The degrees.
        device_type: Of the processes.
        experts: The model has some.
    """
    # Every process makes every mesh, in the same order, also where its own groups have one member: torch makes process
    # groups in collectives of all ranks.
    axes: dict[str, int] = {}
    for axis, degree in layout.degrees.items():
        # Parameters are sharded over cp too: its ranks have the same parameters, and gradients of different tokens.
        # Axes that shard them are next to each other in the table, so that they can be one dimension.
        dimension = _SHARDS if axis in _SHARDED else axis
        axes[dimension] = axes.get(dimension, 1) * degree
    axes = {dimension: size for dimension, size in axes.items() if size > 1 or dimension == _SHARDS}
    devices = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    contexts = None
    if layout.cp > 1:
        contexts = unflatten_mesh(devices[_SHARDS], {axis: layout.degrees[axis] for axis in _SHARDED})
        set_timeout(contexts, COLLECTIVE_TIMEOUT)
    set_timeout(devices, COLLECTIVE_TIMEOUT)
    return Mesh(devices, layout, contexts, _expert_mesh(layout, device_type) if experts else None)


def with_experts(mesh: Mesh, device_type: str) -> Mesh:
    """The mesh with that of experts, for a model beside one that has none. Every process calls this."""
    return mesh if mesh.experts is not None else replace(mesh, experts=_expert_mesh(mesh.layout, device_type))


def _expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    axes = {axis: degree for axis, degree in layout.degrees.items() if degree > 1 and axis not in EXPERT_PLACES}
    axes[EXPERT_SHARDS] = layout.expert_shards
    if layout.ep > 1:
        axes["ep"] = layout.ep
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    set_timeout(mesh, COLLECTIVE_TIMEOUT)
    return mesh
