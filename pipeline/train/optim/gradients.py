"""Global norm and scaling of gradients that are cut and copied over processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import ParallelModel
from pipeline.train.parallel.tied_tables import TiedTables
from pipeline.train.torch_compat.core import scale_tensors


class Gradients:
    """The gradients that this process has of the model, after the backward passes of a step."""

    def __init__(self, model: ParallelModel, mesh: Mesh) -> None:
        self._tied = None
        if len(model.stages) > 1:
            self._tied = TiedTables(model.spec, model.stages, model.parts, mesh.role("pp"))
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        # Of equal copies on several processes one counts for the norm.
        elsewhere = set() if self._tied is None else set(map(id, self._tied.counted_elsewhere))
        self._counted = {name: p for name, p in model.named_parameters() if _owns(p) and id(p) not in elsewhere}

    def sum_tied(self) -> None:
        """Add up the gradients of tables that several stages have copies of; comes before norm and clipping."""
        if self._tied is not None:
            self._tied.sum_gradients()

    def sum_of_squares(self) -> Tensor:
        """This process's share of the squared L2 norm of the whole gradient, fp64 scalar."""
        if not self._counted:
            return torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        return _square(self._local(self._counted.values()))

    def squares_by(self, group: Callable[[str], str]) -> dict[str, Tensor]:
        """Sums of squares by what `group` makes of the names of parameters; groups without any here are missing."""
        groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self._counted.items():
            groups[group(name)].append(parameter)
        return {name: _square(self._local(parameters)) for name, parameters in groups.items()}

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar on the device."""
        scale_tensors(self._local(self._parameters), factor)

    def _local(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        # Local tensors, since one operation cannot take DTensors of several meshes: experts have a mesh of their own.
        local = []
        for parameter in parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            # `fully_shard` has carried out sums over tp. One that is left would be scaled wrongly (2.11), and is no
            # gradient of which a norm can be taken.
            assert not any(isinstance(placement, Partial) for placement in gradient.placements)
            local.append(gradient.to_local())
        return local


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared L2 norm of some tensors together, fp64 scalar."""
    return nn.utils.get_total_norm(tensors, foreach=True).double().square()


def _owns(parameter: nn.Parameter) -> bool:
    """True if this process counts its shard of a parameter: it is the first along each axis of copies."""
    assert isinstance(parameter, DTensor)
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    return not any(
        isinstance(placement, Replicate) and coordinate > 0
        for placement, coordinate in zip(parameter.placements, coordinates, strict=True)
    )
