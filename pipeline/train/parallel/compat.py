"""Every name of torch that is not public, in one place, with the versions it was checked on (2.11, 2.13)."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from pipeline.train.spans import span

_collectives = torch.ops._c10d_functional

_CHUNK = 4 << 20
"""Bytes that are written and hashed at once: the hash then finds them in the processor's cache."""
_AHEAD = 32 << 20
"""After so many bytes the kernel is told to begin with writing them to the disk, rather than at the end."""
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class _HashingStream(io.RawIOBase):
    """An append-only file that hashes the bytes as they are handed to the kernel."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_64()
        self._size = 0
        self._begun = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            try:
                self._file.write(chunk)
            except OSError as error:
                self.failure = error
                raise
            self._hash.update(chunk)
            self._size += len(chunk)
            if self._size - self._begun >= _AHEAD:
                self._begin()
        return len(view)

    def _begin(self) -> None:
        """Let the disk work while the rest is still being handed over."""
        if _sync_file_range is not None:
            # A hint, whose errors say nothing that the fsync at the end does not say.
            _sync_file_range(self._file.fileno(), self._begun, self._size - self._begun, _WRITE)
        self._begun = self._size

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Asked for by the fsync that follows the last write; what is buffered must be in the file by then.
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            super().close()

    def written(self) -> tuple[int, str]:
        """Bytes written and their xxh3."""
        return self._size, self._hash.hexdigest()


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        stream = _HashingStream(Path(path))
        try:
            yield stream
        except Exception as error:
            # torch's writer turns what goes wrong in a write into a RuntimeError of its own about positions.
            raise stream.failure or error from None
        finally:
            stream.close()
        self.files[Path(path).name] = stream.written()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """DCP's file writer, one fsynced file a rank, that knows size and xxh3 of each file as it was written.

    Args:
        folder: Where to.
        on_host: What will be written is in the memory of the host. torch would open a stream on the first GPU, for
            every rank.
    """

    def __init__(self, folder: Path, *, on_host: bool = False) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        if on_host:
            self.per_thread_copy_ahead = 0
        self.fs = _HashingFileSystem()

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """File name -> (bytes, xxh3) of what this rank wrote."""
        return cast(_HashingFileSystem, self.fs).files


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


def guard_optimizer_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Let the next step of a fused optimizer leave weights and states as they are where `found_inf` is 1.

    torch.amp's GradScaler hands the flag over by the same attribute. The decision is made on the device.
    """
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def all_gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What the ranks of a group have, [ranks, ...].

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
    """What each rank has for this one, [ranks, ...], of what this one has for each."""
    sizes = [1] * group.size()
    exchanged = _collectives.all_to_all_single(parts.contiguous(), sizes, sizes, group.group_name)
    result: torch.Tensor = _collectives.wait_tensor(exchanged)
    return result


def unflatten_mesh(mesh: DeviceMesh, degrees: dict[str, int]) -> DeviceMesh:
    """One axis as several, outermost first. Every process calls this."""
    return mesh._unflatten(0, tuple(degrees.values()), tuple(degrees))


def set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """How long torch lets a collective over one axis of a mesh wait, on the groups that there are.

    In 2.11 and 2.13 it makes them with a default of its own (10 minutes over NCCL, 30 over gloo), whatever the group of
    all ranks was made with.
    """
    for group in mesh.get_all_groups():
        if dist.get_backend(group) != FAKE_BACKEND:  # which waits for nothing
            _set_pg_timeout(timeout, group)


def scale_tensors(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a scalar on their device, with few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


FAKE_BACKEND = "fake"
"""Of process groups that send nothing."""


def fake_store() -> Any:
    """What a process group of `FAKE_BACKEND` is made with; the backend exists from then on.

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


def schedule_actions(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int
) -> list[list[tuple[int, str, int]]]:
    """What each pp rank does in a step, in order, by torch's own schedule classes: (stage, kind, micro-batch).

    Kinds: F forward, B backward, I and W its two halves, the gradients of inputs and of weights. Forward and backward
    that a schedule lets overlap come one after the other, as torch runs them. In 2.11 and 2.13 the schedules are made
    by a helper of torch's visualizer, without processes.

    Args:
        schedule: Name that torch knows the schedule by.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    result: list[list[tuple[int, str, int]]] = []
    for actions in get_schedule_ops(schedule, pp, micro_batches, stages_per_rank):
        # Further kinds of actions are about communication and have no micro-batch.
        single = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
        mine: list[tuple[int, str, int]] = [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in single
            if action.microbatch_index is not None and action.computation_type.value in ("F", "B", "I", "W")
        ]
        if schedule == "1F1B":
            # What runs is right, but this description of it counts the last rank's forward passes from 1.
            forward = min((number for _, kind, number in mine if kind == "F"), default=0)
            mine = [(stage, kind, number - (forward if kind == "F" else 0)) for stage, kind, number in mine]
        result.append(mine)
    return result


class MicroBatchStage(PipelineStage):
    """A pipeline stage that computes by the number of the micro-batch, and holds buffers only while they are used.

    torch's own keeps a buffer for every micro-batch's input and gradient, for the whole run. What is overridden is the
    same in 2.11 and 2.13, except where a version is named.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        example_input: torch.Tensor,
        example_output: torch.Tensor,
        reduction: str,
        tokens: Callable[[int], torch.Tensor],
        compute: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        """A stage with known shapes.

        Args:
            module: Whose parameters the stage trains, sharded by `fully_shard`.
            index: Of the stage, in the pipeline.
            stages: Of the pipeline.
            device: Where received tensors are put.
            group: Of the pipeline's ranks.
            example_input: Shape and dtype, on the meta device, of what comes in.
            example_output: The same of what goes out.
            reduction: When gradients are added up over shards: `each`, `last`, or `after` as torch does; see `overlap`.
            tokens: Micro-batch -> input of the first stage.
            compute: Micro-batch and input -> output; the loss in the last stage.
        """
        super().__init__(
            module, index, stages, device, input_args=(example_input,), output_args=(example_output,), group=group
        )
        self._reduction = reduction
        self._tokens = tokens
        self._compute = compute
        self._micro_batch = -1

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor:
        self._micro_batch = fwd_chunk_id
        inputs = (self._tokens(fwd_chunk_id),) if self.is_first else ()
        if not self.is_first:
            self._inputs(fwd_chunk_id).buffer.requires_grad_(True)  # 2.11 did so with the buffer that it allocated
        try:
            with span("forward"):
                return cast(torch.Tensor, super().forward_one_chunk(fwd_chunk_id, inputs, {}, False))
        except RuntimeError as error:
            # Wrapped by torch in an error that lists tensors; what went wrong may be a user's to read.
            raise error.__cause__ or error from None
        finally:
            if not self.is_first:
                self._release(self._inputs(fwd_chunk_id))

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._compute(self._micro_batch, *args)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        module = self.submod
        adds_up = self._reduction == "each" or (self._reduction == "last" and last_backward)
        if not adds_up or not isinstance(module, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "a schedule whose backward passes have two halves"
        module.set_is_last_backward(False)  # what is under way is waited for when the stage's step is over
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(last_backward)
        keys = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[key] for key in keys)), None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with span("backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._release(self._gradients(bwd_chunk_id))

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with span("backward of weights"):
            super().backward_weight_one_chunk(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self._inputs(fwd_chunk_id))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self._allocate(self._gradients(bwd_chunk_id))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: 2.11 would compare strides, and tokens may be a view."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred; 2.13 would drop the gradients of earlier micro-batches here."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """None: 2.11 would send to its own rank in V-shaped schedules, which gloo never receives."""
        return []

    @contextmanager
    def _on_meta(self) -> Generator[None, None, None]:
        """Buffers that are made inside have no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _inputs(self, micro_batch: int) -> Any:
        (info,) = self.args_recv_info[micro_batch]
        return info

    def _gradients(self, micro_batch: int) -> Any:
        (info,) = self.grad_recv_info[micro_batch]
        return info

    def _allocate(self, info: Any) -> None:
        info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=False)

    def _release(self, info: Any) -> None:
        info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)


def prepare_compiler(budget: float) -> None:
    """Settings of torch.compile for what is compiled from now on; they are of the process, and read when it compiles.

    Args:
        budget: Share of the memory of activations that compiled code may keep for backward, 1 for all of it.
    """
    import torch._functorch.config

    lift_recompile_limits()
    torch._functorch.config.activation_memory_budget = budget


def lift_recompile_limits() -> None:
    """Let torch.compile make code for any number of shapes.

    One code for each kind of layer and shape of a micro-batch is meant, however many a batch ramp has. Beyond the
    limits a run would end, or go on without the compiler where that is allowed. The same in 2.11 and 2.13.
    """
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2**20


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

    In 2.11 and 2.13 such a placement is of a class of its own, which is no subclass of Shard.
    """
    if not isinstance(placement, _StridedShard):
        return None
    return placement.dim, int(placement.split_factor)


TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
"""Where torch's own code is."""
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
    """What the flight recorder remembers, by backend, oldest first; called from any thread.

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
    """Whether a thread is in a collective, or the device has one to end, told from the thread's innermost frame.

    With gloo the thread itself waits, in a function of torch.distributed. With NCCL it waits for the device.
    """
    if frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED_FOLDER):
        return True
    return any(not entry["retired"] for entry in last_collectives().get("nccl", []))


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

    The functions beneath this and the next two are those that torch's page about GPU memory names; read in 2.13 and
    not run on a GPU yet.
    """
    torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS, stacks="python")


def write_allocations(path: Path) -> None:
    """What is allocated and what has been, as a pickle that torch's viewer opens."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def end_allocations() -> None:
    """The reverse of `record_allocations`."""
    torch.cuda.memory._record_memory_history(enabled=None)
