"""Every name of torch that is not public, with the versions it was checked on (2.11, 2.13).

Modules of their own, which are imported only where they are needed, have those of pipelines (`pipeline_stage.py`,
`micro_batch_stage.py`), checkpoint files (`checkpoint_files.py`), the compiler (`compiler.py`), the launcher
(`agent.py`) and the flight recorder (`flight_recorder.py`). The rest is here, with what importing DTensor costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

_collectives = torch.ops._c10d_functional
# From 2.14 on there is a public function, and 2.15 warns of the private one.
_set_group_timeout: Callable[[timedelta, dist.ProcessGroup], None] = (
    getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
)


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor` with the numbers of `local`, which becomes the local part if `tensor` is a DTensor.

    torch's public constructor would copy `local` to the device of the mesh. That of 2.11 and 2.13 takes it as it is.
    """
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; or of a weight that is sent in fp8 a plain one that shares its memory, without a gradient.

    Such weights are of a class of torchao's (`WeightWithDynamicFloat8CastTensor`, in 0.10 and 0.18 alike), which would
    go into files with the weights, and be wanted again by whoever reads them.
    """
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "fsdp_pre_all_gather"):
        return tensor
    return with_local(tensor.detach(), local._tensor.detach())


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a tensor, see `plain`; shares the memory."""
    tensor = plain(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(parameter: torch.Tensor, rows: slice | None = None) -> torch.Tensor:
    """This rank's part of a parameter within a forward pass, with a gradient.

    Args:
        parameter: Plain, or a DTensor.
        rows: Those that this rank uses of a parameter that all ranks have; its gradient is a sum over the ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local() if rows is None else parameter.to_local(grad_placements=[Partial()])[rows]


def with_parts_of_gradient(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks have as a DTensor; the gradient of each rank's is the part that it knows, not the sum."""
    if _TAKES_GRADIENT:
        return DTensor.from_local(x, mesh, [Replicate()], grad_placements=[Partial()])
    whole: DTensor = _PartOfGradient.apply(x, mesh)  # type: ignore[no-untyped-call]
    return whole


_TAKES_GRADIENT = "grad_placements" in inspect.signature(DTensor.from_local).parameters
"""`from_local` takes `grad_placements`: true in 2.13, false in 2.11."""


class _PartOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()])

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to_local(), None


def guard_optimizer_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Let the next step of a fused optimizer leave weights and states as they are where `found_inf` is 1.

    torch.amp's GradScaler hands the flag over by the same attribute. The decision is made on the device. Gradients that
    are multiplied by 0 would not do: 0 times NaN is NaN.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def all_gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Tensors of all ranks of a group, [ranks, ...].

    This and the next three are the operations beneath torch's functional collectives, the same in 2.11 and 2.13: a
    compiler can follow them, and selective recomputation knows them. There is no gradient.
    """
    gathered = _collectives.all_gather_into_tensor(own.contiguous(), group.size(), group.group_name)
    whole: torch.Tensor = _collectives.wait_tensor(gathered)
    return whole.view(group.size(), *own.shape)


def reduce_scatter(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of what they have for this one in `parts` [ranks, ...]."""
    flat = parts.contiguous().flatten(0, 1)
    own = _collectives.reduce_scatter_tensor(flat, "sum", group.size(), group.group_name)
    result: torch.Tensor = _collectives.wait_tensor(own)
    return result


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Tensors that each rank sends to this one, [ranks, ...], where this one sends `parts` to each."""
    sizes = [1] * group.size()
    exchanged = _collectives.all_to_all_single(parts.contiguous(), sizes, sizes, group.group_name)
    result: torch.Tensor = _collectives.wait_tensor(exchanged)
    return result


def all_to_all_rows(
    rows: torch.Tensor, come: list[int], go: list[int], group: dist.ProcessGroup, *, wait: bool = True
) -> torch.Tensor:
    """Rows from all ranks, in their order.

    Args:
        rows: Those that go to each rank, in their order.
        come: Numbers of rows that each rank sends to this one.
        go: Numbers of rows that this one sends to each.
        group: The ranks.
        wait: False: nobody may read the result before `wait_for`.
    """
    exchanged: torch.Tensor = _collectives.all_to_all_single(rows.contiguous(), come, go, group.group_name)
    return wait_for(exchanged) if wait else exchanged


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, when it is there."""
    waited: torch.Tensor = _collectives.wait_tensor(tensor)
    return waited


def all_reduce(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks of a group."""
    reduced: torch.Tensor = _collectives.wait_tensor(_collectives.all_reduce(own.contiguous(), "sum", group.group_name))
    return reduced


def unflatten_mesh(mesh: DeviceMesh, degrees: dict[str, int]) -> DeviceMesh:
    """A mesh of one axis as several axes, outermost first. Every process calls this."""
    return mesh._unflatten(0, tuple(degrees.values()), tuple(degrees))


def set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Set torch's time limit of collectives over the axes of a mesh, on the groups that there are.

    In 2.11 and 2.13 it makes them with a default of its own (10 minutes over NCCL, 30 over gloo), whatever the group of
    all ranks was made with.
    """
    for group in mesh.get_all_groups():
        if dist.get_backend(group) != FAKE_BACKEND:  # which waits for nothing
            _set_group_timeout(timeout, group)


def scale_tensors(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a scalar on their device, with few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


FAKE_BACKEND = "fake"
"""Backend of process groups that send nothing."""


def fake_store() -> Any:
    """A store for a process group of `FAKE_BACKEND`; the backend exists from then on.

    It stands for any number of ranks in one process, and its collectives do nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_shardings() -> None:
    """Empty torch's caches of how DTensors are cut, whose entries name process groups that may be gone.

    In 2.11 and 2.13 equal meshes share entries, whichever groups they were made with. 2.13 has a second cache, in C++.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


@contextmanager
def shardings_unseen() -> Iterator[None]:
    """Hide from dispatch modes how DTensor finds the shape of a result: by fake tensors of the size of the whole.

    A mode that counts memory would count them, in 2.11 those of a fused update.
    """
    find = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: ShardingPropagator, op_schema: Any) -> Any:
        with _disable_current_modes():
            return find(self, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = find  # type: ignore[method-assign]


@contextmanager
def recorded_by_autograd() -> Iterator[None]:
    """Let autograd record within the code of an operation of our own, where torch records nothing."""
    key = torch._C.DispatchKey.AutogradFunctionality
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def strided_shard(placement: Placement) -> tuple[int, int] | None:
    """FSDP's cut of what tp has cut already: the dimension, and the pieces that tp has made of it; None for other cuts.

    In 2.11 and 2.13 such a placement is of a class of its own, which is not a subclass of Shard.
    """
    if not isinstance(placement, _StridedShard):
        return None
    return placement.dim, int(placement.split_factor)


_ALLOCATIONS = 100_000
"""Allocations that are remembered, some KB each in a snapshot."""


def record_allocations() -> None:
    """Remember what is allocated on a GPU from now on, and by which lines of Python.

    The functions beneath this and the next two are those that torch's page about GPU memory names; read in 2.13.
    What ran on a GPU: docs/gpu-results.md.
    """
    torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS, stacks="python")


def write_allocations(path: Path) -> None:
    """Write present and past allocations, as a pickle that torch's viewer opens."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def end_allocations() -> None:
    """The reverse of `record_allocations`."""
    torch.cuda.memory._record_memory_history(enabled=None)
