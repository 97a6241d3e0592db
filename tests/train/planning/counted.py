"""What the processes of a training really send, counted as torch's dispatcher sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.load import load
from pipeline.data.loading.batch import StepData
from pipeline.train.loop import trainer
from pipeline.train.loop.step import Stepper, StepResult

Counts = dict[tuple[str, str], tuple[int, int]]
"""(axis, operation) -> (calls, bytes): what a gather gives, what others are given."""

# Of torch's functions the collective, and which argument has the bytes: the gather's output comes first, too.
_IN_PLACE = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
}
_FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
_SILENT = {"c10d::recv_", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
"""They send nothing."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives and sends by group, while it is entered."""

    def __init__(self, axes: dict[str, str], cp: str | None, ep: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = {}
        self._axes = {group: "dp_shard" if axis == "shards" else axis for group, axis in axes.items()}
        self._cp, self._ep = cp, ep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as operations on local tensors
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in _IN_PLACE:
            operation, place = _IN_PLACE[name]
            group = next(arg for arg in args if _is_group(arg))
            self._add(operation, args[place], dist.ProcessGroup.unbox(group).group_name)
        elif name in _FUNCTIONAL:
            operation = _FUNCTIONAL[name]
            self._add(operation, result if operation == "all_gather" else args[0], args[-1], functional=True)
        else:
            assert "c10d" not in name or name in _SILENT, f"{name} is not counted"
        return result

    def _add(self, operation: str, tensors: Any, group: str, *, functional: bool = False) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        # What all ranks agree on once a step; and nothing else is in this format.
        if tensors[0].dtype == torch.float64:
            return
        # The groups of cp and of the shards may be one; weights and gradients are sent in place.
        axis = "cp" if group == self._cp and functional else self._axes.get(group, group)
        if group == self._ep and operation == "all_to_all":  # the group may be that of another axis, too
            axis = "ep"
        key = axis, operation
        calls, size = self.counts.get(key, (0, 0))
        self.counts[key] = calls + 1, size + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def count(file: Path, values: list[str], step: int) -> Counts:
    """Train, and count what this rank sends in a step, counted from 1."""
    with _counted(step) as counters:
        trainer.train(load(file, values))
    (counter,) = counters
    return counter.counts


@contextmanager
def _counted(number: int) -> Iterator[list[Counter]]:
    before = Stepper.step
    counters: list[Counter] = []

    def step(self: Stepper, data: StepData, lr: float) -> StepResult:
        if data.step + 1 != number:
            return before(self, data, lr)
        devices = self._mesh.devices
        axes = {devices.get_group(name).group_name: name for name in devices.mesh_dim_names or ()}
        ep = None
        if (experts := self._mesh.experts) is not None:
            of_experts = {experts.get_group(name).group_name: name for name in experts.mesh_dim_names or ()}
            axes = {**of_experts, **axes}
            ep = experts.get_group("ep").group_name if "ep" in (experts.mesh_dim_names or ()) else None
        cp = self._mesh.role("cp").get_group().group_name if self._mesh.size("cp") > 1 else None
        counters.append(Counter(axes, cp, ep))
        with counters[-1]:
            return before(self, data, lr)

    Stepper.step = step  # type: ignore[method-assign]
    try:
        yield counters
    finally:
        Stepper.step = before  # type: ignore[method-assign]
