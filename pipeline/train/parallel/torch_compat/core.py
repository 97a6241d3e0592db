"""Every name of torch that is not public, with the versions it was checked on (2.11, 2.13).

Those of checkpoint files are in `checkpoint_files.py`, those of pipeline stages in `pipeline_stage.py`, the rest here.
"""

from __future__ import annotations

import os
import pickle
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

_collectives = torch.ops._c10d_functional
# From 2.14 on there is a public function, and 2.15 warns of the private one.
_set_group_timeout: Callable[[timedelta, dist.ProcessGroup], None] = (
    getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
)


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`tensor` with other numbers: `local` as it is, or as the local part of a DTensor of the same mesh and placements.

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


def guard_optimizer_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Let the next step of a fused optimizer leave weights and states as they are where `found_inf` is 1.

    torch.amp's GradScaler hands the flag over by the same attribute. The decision is made on the device.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def all_gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Tensors of all ranks of a group, [ranks, ...].

    This and the next two are the operations beneath torch's functional collectives, the same in 2.11 and 2.13: a
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


def unflatten_mesh(mesh: DeviceMesh, degrees: dict[str, int]) -> DeviceMesh:
    """One axis as several, outermost first. Every process calls this."""
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


def prepare_compiler(budget: float) -> None:
    """Settings of torch.compile for what is compiled from now on; they are of the process, and read when it compiles.

    Args:
        budget: Share of the memory of activations that compiled code may keep for backward, 1 for all of it.
    """
    import torch._functorch.config

    lift_recompile_limits()
    keep_compiled_code_private()
    torch._functorch.config.activation_memory_budget = budget


def lift_recompile_limits() -> None:
    """Let torch.compile make code for any number of shapes.

    One code for each kind of layer and shape of a micro-batch is meant, however many a batch ramp has. Beyond the
    limits a run would end, or go on without the compiler where that is allowed. The same in 2.11 and 2.13.
    """
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2**20


def keep_compiled_code_private() -> None:
    """Let compiled code be kept in, and run from, a folder that no other user has made or may write to.

    By default torch takes `/tmp/torchinductor_USER`, whoever made it, and runs what it finds there. It names that
    folder in the environment when it is imported. Read in 2.13.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(_COMPILED, default_cache_dir()) != default_cache_dir():
        return  # the user's own choice
    folder = os.path.join(tempfile.gettempdir(), f"pipeline-compiled-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        folder = tempfile.mkdtemp(prefix="pipeline-compiled-")
    os.environ[_COMPILED] = folder


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def prepare_async_tp(group: dist.ProcessGroup) -> None:
    """Let code that is compiled from now on send pieces over a group while it computes others.

    The pass of inductor and its setting are private in 2.11 and 2.13. `enable_symm_mem_for_group` says in 2.13 that it
    is not needed any more, but the pass still leaves alone what it was not called for.
    """
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    class _FlattenGathers(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            flatten_gathers(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_pre_pass = _FlattenGathers()


def flatten_gathers(graph: torch.fx.Graph) -> None:
    """Gather [1, S, D] as [S, D], in place.

    With one sample torch's gather along the sequence is a view, and not the pieces put together again that inductor's
    pass knows. Of two dimensions it knows it. The same in 2.11 and 2.13.
    """
    reshape = torch.ops.aten.reshape.default
    for gather in graph.find_nodes(op="call_function", target=_collectives.all_gather_into_tensor.default):
        (wait,), shard = tuple(gather.users), gather.args[0]
        size = shard.meta["val"].shape
        if len(size) != 3 or size[0] != 1 or any(user.target != reshape for user in wait.users):
            continue
        with graph.inserting_before(gather):
            flat = graph.call_function(reshape, (shard, list(size[1:])))
        flat.meta["val"] = shard.meta["val"].reshape(size[1:])
        gather.replace_input_with(shard, flat)
        for node in (gather, wait):
            node.meta["val"] = node.meta["val"].reshape(-1, size[2])
        for user in list(wait.users):
            for view in (user, *user.users):
                if view.target == reshape and view.meta["val"].shape == wait.meta["val"].shape:
                    view.replace_all_uses_with(wait)
    graph.eliminate_dead_code()


def vary_length(x: torch.Tensor) -> None:
    """Let compiled code take a tensor, which it is given from outside, with any length from 2 on.

    `mark_dynamic` is in torch's documentation, if not under a public name; the same in 2.11 and 2.13. Where nothing is
    compiled it is not imported, which would take a second or two.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.mark_dynamic(x, 0)


def strided_shard(placement: Placement) -> tuple[int, int] | None:
    """(dimension, pieces that were cut along it before) of FSDP's cut of what tensor parallelism cut already, or None.

    In 2.11 and 2.13 such a placement is of a class of its own, which is not a subclass of Shard.
    """
    if not isinstance(placement, _StridedShard):
        return None
    return placement.dim, int(placement.split_factor)


TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
"""Folder of torch's own code."""
_DISTRIBUTED_FOLDER = os.path.dirname(dist.__file__) + os.sep
_RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
_RECORDED = 1000
"""Collectives that each process remembers, of all its groups together."""
_FRAMES = 6
"""Lines of our own code that are told of each, the innermost ones."""


def record_collectives() -> None:
    """Let torch's flight recorder remember the last collectives; comes before the first process group.

    What that costs is lost in the noise of a collective of gloo (25 us). The size is read once, when the first group is
    made; who has set it keeps it.
    """
    os.environ.setdefault(_RECORDER_SIZE, str(_RECORDED))


def last_collectives() -> dict[str, list[dict[str, Any]]]:
    """Entries of the flight recorder, by backend, oldest first; called from any thread.

    "frames" is where our own code issued it, "retired" whether it has ended. gloo's point-to-point messages are not
    recorded. The two functions are in 2.13, the one for gloo not in every older version.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for backend, name in (("gloo", "_dump_fr_trace"), ("nccl", "_dump_nccl_trace")):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            # Bytes that torch has made in this process just now, and no file.
            entries = pickle.loads(dump(includeStackTraces=True)).get("entries", [])
            found[backend] = [{**entry, "frames": _own_frames(entry.get("frames", []))} for entry in entries]
    return found


def _own_frames(frames: list[dict[str, Any]]) -> list[str]:
    own = [frame for frame in frames if not frame["filename"].startswith(TORCH_FOLDER)]
    return [f"{frame['filename']}:{frame['line']} ({frame['name']})" for frame in own[:_FRAMES]]


def waits_for_ranks(frame: FrameType | None) -> bool:
    """True if a thread is in a collective, by its innermost frame, or the device has one to end.

    With gloo the thread itself waits, in a function of torch.distributed. With NCCL it waits for the device.
    """
    if frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED_FOLDER):
        return True
    return any(not entry["retired"] for entry in last_collectives().get("nccl", []))


class OneNode(RendezvousHandler):
    """Rendezvous of a single agent, in its own memory.

    That of torch (`c10d`) listens on all interfaces, asks for no password, and unpickles what it finds in its store:
    whoever reaches the port runs code as this user.
    """

    def get_backend(self) -> str:
        return "one-node"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.HashStore()  # type: ignore[attr-defined]
        # The agent wants an address for the ranks, which have a store of their own.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(os.getpid())

    def shutdown(self) -> bool:
        return True


class WatchedAgent(LocalElasticAgent):
    """torch's agent of one machine, that leaves to us when the other ranks of a failed one end.

    In 2.11 and 2.13 it sends them SIGTERM at once, which asks our ranks to save and stop, and kills them after 30 s,
    in 2.13 also where a shorter time was asked for.

    Args:
        spec: What to run.
        logs_specs: Where its output goes.
        started: Is told the process ids by local rank.
        ended: Whether all ranks have; asked ten times a second or so, and no rank is reaped before.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        started: Callable[[dict[int, int]], None],
        ended: Callable[[], bool],
    ) -> None:
        super().__init__(spec, logs_specs)
        self._started = started
        self._all_ended = ended

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._started(pids)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._all_ended():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


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
