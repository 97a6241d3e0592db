"""The memory of tensors while code runs on fake tensors, by kind, which follows from how long they live."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.train.planning.stage_memory import MemoryKind
from pipeline.train.torch_compat.core import local_shard

# What FSDP's collectives fill and read; tensor parallelism has functional ones.
_GATHERS = ("c10d::_allgather_base_", "c10d::all_gather_into_tensor")
_SCATTERS = ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor")


_PLAIN = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.t.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.select.int,
        torch.ops.aten.alias.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.as_strided.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.silu.default,
    }
)
"""Most of the operations of a step; each makes one tensor on the device of its arguments."""


@dataclass(eq=False)
class _Storage:
    """A storage, for as long as it lives."""

    born: int
    size: int
    at_start: bool
    start: int = 0
    is_buffer: bool = False
    elastic: bool = False
    died: int | None = None


@dataclass(frozen=True)
class Mark:
    """Something begins here."""

    time: int
    label: str
    others: int
    """Micro-batches whose activations are kept besides those of the one at work."""


@dataclass
class Passes:
    """The passes of a step, by the number of operations before."""

    starts: list[int] = field(default_factory=list)
    """Forward passes began."""
    ends: list[int] = field(default_factory=list)
    """Forward passes ended; tensors that are there then and are nothing else are kept for backward."""
    turns: list[int] = field(default_factory=list)
    """Backward passes began."""
    until: int = 0
    """All of them had ended, and gradients were reduced."""


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books each storage that is made or given back while it is on, above a `FakeTensorMode`.

    Only local tensors are looked at: a DTensor says it had the memory of the whole.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._time = 0
        self._alive: dict[int, tuple[weakref.ref[Any], _Storage]] = {}
        self._events: list[tuple[int, _Storage, int]] = []
        self._elastic: list[tuple[weakref.ref[Any], _Storage]] = []
        self._all: list[_Storage] = []
        self.marks: list[Mark] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with local tensors
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most of all operations ask for it, and the mode below takes long to say so
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # the pipeline asks whether all ranks agree
        self._time += 1
        self._update_elastic()
        result = _shortened(func, args) if func in _PLAIN and not kwargs else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._book(tensor)
        if func.namespace == "c10d":
            self._note_buffers(func.name(), args)
        return result

    def begin(self) -> None:
        """Forget what was, and count from here; what is alive is from before."""
        self._events, self._all, self.marks = [], [], []
        for reference, memory in self._alive.values():
            storage = reference()
            assert storage is not None
            memory.at_start, memory.size = True, storage.nbytes()
            memory.start = memory.size
            memory.elastic = memory.size == 0  # FSDP takes the memory away and gives it back
            if memory.elastic:
                self._elastic.append((reference, memory))
            self._all.append(memory)

    @property
    def time(self) -> int:
        """Operations so far."""
        return self._time

    def mark(self, label: str, others: int = 0) -> None:
        """Call the part of the step from here on `label`."""
        self.marks.append(Mark(self._time + 1, label, others))

    def find(self, tensors: Iterable[Tensor]) -> set[_Storage]:
        """The memory of tensors, of DTensors their local ones."""
        entries = [self._alive.get(local_shard(tensor).untyped_storage()._cdata) for tensor in tensors]
        return {memory for _, memory in filter(None, entries)}

    def _book(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        memory = _Storage(self._time, storage.nbytes(), at_start=False)
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), memory
        self._all.append(memory)
        self._events.append((self._time, memory, memory.size))

    def _forget(self, key: int) -> None:
        _, memory = self._alive.pop(key)
        memory.died = self._time + 1
        self._events.append((self._time + 1, memory, -memory.size))

    def _update_elastic(self) -> None:
        for reference, memory in self._elastic:
            storage = reference()
            if storage is not None and (size := storage.nbytes()) != memory.size:
                self._events.append((self._time, memory, size - memory.size))
                memory.size = size

    def _note_buffers(self, name: str, args: tuple[Any, ...]) -> None:
        name = name.split(".", maxsplit=1)[0]
        if name in _GATHERS or name in _SCATTERS:
            tensors = tree_leaves(args[0] if name in _GATHERS else args[1])
            for memory in self.find(leaf for leaf in tensors if isinstance(leaf, Tensor)):
                memory.is_buffer = not memory.at_start

    def levels(
        self, known: Mapping[MemoryKind, set[_Storage]], passes: Passes, sizes: set[int]
    ) -> Iterator[tuple[int, Mapping[MemoryKind, int]]]:
        """Bytes by kind after each operation since `begin`.

        Args:
            known: Storages whose kind is known.
            passes: When the forward and backward passes were.
            sizes: Bytes of whole and sharded gradients of parameters.
        """
        kinds = {memory: kind for kind, memories in known.items() for memory in memories}
        kinds |= {memory: _kind(memory, passes, sizes) for memory in self._all if memory not in kinds}
        now: dict[MemoryKind, int] = defaultdict(int)
        for memory in self._all:
            now[kinds[memory]] += memory.start
        at = 0
        for time, memory, delta in self._events:
            if time > at:
                yield at, dict(now)
                at = time
            now[kinds[memory]] += delta
        yield at, dict(now)


def _shortened(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an operation of `_PLAIN` on fake tensors, without what `FakeTensorMode` does for all others."""
    fake = [each for each in args if isinstance(each, FakeTensor)]
    if len(fake) != sum(isinstance(each, Tensor) for each in args) or len({each.fake_device for each in fake}) != 1:
        return func(*args)
    with in_kernel_invocation_manager(fake[0].fake_mode):
        made = func(*args)
    return FakeTensor(fake[0].fake_mode, made, fake[0].fake_device)


def _kind(memory: _Storage, passes: Passes, sizes: set[int]) -> MemoryKind:
    if memory.elastic or memory.is_buffer:
        return "unsharded"
    if memory.at_start:
        return "working"
    if memory.born < passes.starts[0]:
        return "batches"
    died = passes.until + 1 if memory.died is None else memory.died
    in_forward = any(start <= memory.born <= end for start, end in zip(passes.starts, passes.ends, strict=True))
    if not in_forward:
        turns = [*passes.starts, *passes.turns]
        adds_up = memory.size in sizes and any(memory.born < turn < died for turn in turns)
        if adds_up or died > passes.until:
            return "gradients"
    return "activations" if any(memory.born <= end < died for end in passes.ends) else "working"
