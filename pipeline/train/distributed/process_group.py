"""The processes of a run as a group: joining it, telling one another small things, leaving it."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from pipeline.common.console import flush
from pipeline.common.errors import AGREED_CODES, EXIT_OTHER, MachineError, RankFailed, UserError, exit_code
from pipeline.config.run import TimeLimitsConfig
from pipeline.train.distributed.peers import Peers, is_watched, watch
from pipeline.train.distributed.rank import STORE, Processes, of_environment, record_error
from pipeline.train.torch_compat.flight_recorder import record_collectives
from pipeline.train.torch_compat.gloo import give_gloo_one_thread

__all__ = [
    "Processes",
    "background_group",
    "barrier",
    "broadcast_from_rank0",
    "cpu_group",
    "gather",
    "init_process_group",
    "joined",
    "leave",
    "of_environment",
    "record_error",
    "shared_store",
    "start_is_over",
    "wait_for_all",
]

T = TypeVar("T")

_LEAVING = timedelta(seconds=60)
"""Time for which those who leave wait for one another: for a rank that still closes its files or trackers."""
COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Time for which torch lets a collective wait. A hang is found by the watchdog, and one of what runs beside training
where the loop waits for it. torch counts time in which a run is suspended, too, which may be long and is none."""
_LOOPBACK, _LOOPBACK_DEVICE = "127.0.0.1", "/sys/class/net/lo"


class _Joined:
    """State that `init_process_group` made. torch has one process group in a process, and so it is one here."""

    store: Any = None
    peers: Peers | None = None
    cpu_group: dist.ProcessGroup | None = None
    background_group: dist.ProcessGroup | None = None
    backend = ""
    waits = 0
    """Calls of `wait_for_all` so far."""


def visible_gpus() -> int:
    """GPUs that torch sees, of NVIDIA or, where it was built for ROCm, of AMD."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def init_process_group(processes: Processes, device: torch.device, limits: TimeLimitsConfig) -> None:
    """Make the process group, over NCCL between GPUs and over gloo between CPUs; once in a process.

    A process of its own needs no port, and may train on a GPU after it has trained on the CPU. Several find one another
    through the store of our launcher, a file, or else at MASTER_ADDR and MASTER_PORT. Where all are on this machine,
    nothing of it can be reached from another one: neither gloo nor torch's store asks who connects.

    Raises:
        UserError: the ranks do not agree on how many they are, or two have the same number.
        MachineError: the port is taken, rank 0 cannot be reached, or some rank does not come in time.
    """
    if device.type == "cuda":
        # Before the group: NCCL takes the current device, which is the first GPU in every process until it is set.
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        if processes.world_size > 1 or _Joined.backend in ("", backend):
            return
        destroy()  # gloo takes what is on a GPU, too, and would wait for it
    if processes.is_one_machine and Path(_LOOPBACK_DEVICE).exists():
        # Whatever the host's name resolves to, and also where a site's setup names another one.
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if processes.world_size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store = _rendezvous(processes, limits.init_seconds)
    # Our own watchdog knows the phases. It comes first, so that a hang is told with the stacks of all ranks.
    store.set_timeout(timedelta(seconds=max(limits.model_dump().values()) + 120))
    record_collectives()
    give_gloo_one_thread()
    try:
        dist.init_process_group(
            backend, store=store, rank=processes.rank, world_size=processes.world_size, timeout=COLLECTIVE_TIMEOUT
        )
    except RuntimeError as error:
        raise MachineError(
            f"rank {processes.rank} could not connect to the other ranks over {backend} ({_first_line(error)}); where "
            "the machine has several networks, name the right one in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error
    _Joined.background_group = None  # one of an earlier group is gone with it
    _Joined.store, _Joined.backend = store, backend
    # A collective: every rank makes each group, in the same order.
    _Joined.cpu_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if device.type == "cuda" else None


def _rendezvous(processes: Processes, init_seconds: float) -> Any:
    """A store that all ranks are connected to, and that has seen each of them once."""
    # Less than the watchdog waits, which would not know who is missing.
    wait = timedelta(seconds=0.8 * init_seconds)
    longer = f"raise launch.time_limits.init_seconds ({init_seconds:g}) if that takes longer"
    if file := os.environ.get(STORE):
        found, where = dist.FileStore(file, processes.world_size), "the store of their launcher"  # type: ignore[attr-defined]
    else:
        found, where = _tcp_store(processes, wait, longer)
    # Starts over where torchrun starts all ranks again.
    store = dist.PrefixStore(f"pipeline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)  # type: ignore[attr-defined]
    for name, value in (("WORLD_SIZE", processes.world_size), ("LOCAL_WORLD_SIZE", processes.local_world_size)):
        others = int(store.compare_set(name, "", str(value)))
        if others != value:
            raise UserError(
                f"rank {processes.rank} on {socket.gethostname()} has {name}={value}, but another rank has {others}; "
                "start the same number of processes on every node, all with the same values"
            )
    if store.add(f"rank {processes.rank}", 1) > 1:
        raise UserError(
            f"two processes have RANK={processes.rank}, the second one is on {socket.gethostname()}; give each "
            "process its own rank (torchrun: another --node-rank on each node)"
        )
    if not is_watched(os.environ):
        _Joined.peers = watch(processes, store, where.rpartition(":")[0])
    missing = [f"rank {rank}" for rank in range(processes.world_size)]
    try:
        store.wait(missing, wait)
    except RuntimeError:
        try:
            missing = [name for name in missing if not store.check([name])]
        except RuntimeError:
            raise RankFailed(f"rank 0 at {where} has ended; its message says why", EXIT_OTHER) from None
        raise MachineError(
            f"only {processes.world_size - len(missing)} of {processes.world_size} ranks reached {where} within "
            f"{wait.total_seconds():.0f} s; missing: {', '.join(missing[:20])}. Look at their logs; "
            f"{longer}"
        ) from None
    return store


def _tcp_store(processes: Processes, wait: timedelta, longer: str) -> tuple[Any, str]:
    """A store of torch at rank 0 or its launcher, and its address."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"WORLD_SIZE is {processes.world_size}, so MASTER_ADDR and MASTER_PORT must name the address of rank 0, "
            f"but they are {address or 'not set'} and {port or 'not set'}; start the processes with torchrun or "
            "launch.processes"
        )
    # torchrun may have a store of its own at this address; then rank 0 does not open one.
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = processes.rank == 0 and not theirs
    if processes.is_one_machine and not theirs:
        address = _LOOPBACK
    where = f"{address}:{port}"
    try:
        # By itself torch would listen on all interfaces, whatever the address.
        listening = _listen(int(port)) if server and address == _LOOPBACK else None
        tcp = dist.TCPStore(  # type: ignore[attr-defined]
            *(address, int(port), None, server, wait),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
        )
    except (OSError, RuntimeError, ValueError) as error:
        if server and (os.strerror(errno.EADDRINUSE) in str(error) or "EADDRINUSE" in str(error)):
            raise MachineError(
                f"rank 0 cannot listen at {where}: another program uses that port, perhaps an earlier run that has not "
                "ended; set MASTER_PORT (--master-port) to a free port"
            ) from error
        raise MachineError(
            f"rank {processes.rank} on {socket.gethostname()} could not reach rank 0 at {where} within "
            f"{wait.total_seconds():.0f} s ({_first_line(error)}); is it running there, and may these machines connect "
            f"to that port? {longer}"
        ) from error
    return tcp, where


def _listen(port: int) -> int:
    """A socket on the loopback, for torch to take over."""
    return socket.create_server((_LOOPBACK, port), backlog=2048).detach()


def cpu_group() -> dist.ProcessGroup:
    """The group of all ranks over gloo, also where tensors go over NCCL."""
    group = _Joined.cpu_group or dist.group.WORLD
    assert group is not None, "join() comes first"
    return group


def background_group() -> dist.ProcessGroup:
    """The group of all ranks over gloo for one thread beside the one that trains. Every rank calls this.

    Collectives must be issued in the same order on all ranks, which two threads that share a group cannot promise.
    """
    if _Joined.background_group is None:
        _Joined.background_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return _Joined.background_group


def broadcast_from_rank0(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `make` on rank 0 and give its value to all; every rank calls this.

    Args:
        make: Returns what JSON can hold. Tuples come back as lists, also on rank 0.
        group: Of all ranks, connected by gloo; by default the one of the thread that trains.

    Raises:
        RankFailed: on the other ranks, where it raised on rank 0; with the exit code of that error.
    """
    if _world() == 1:
        return make()
    if dist.get_rank() != 0:
        code, text = _broadcast(None, group)
        if code:
            raise RankFailed("rank 0 has failed; its message says why", code)
        return json.loads(text)  # type: ignore[no-any-return]
    try:
        text = json.dumps(make())
    except BaseException as error:
        with suppress(RuntimeError):  # a rank that has gone cannot be told, and that is not what went wrong here
            _broadcast((exit_code(error) or 1, ""), group)
        raise
    _broadcast((0, text), group)
    return json.loads(text)  # type: ignore[no-any-return]


def _broadcast(what: tuple[int, str] | None, group: dist.ProcessGroup | None) -> tuple[int, str]:
    """A number and a text of rank 0, which the others pass None for."""
    group = group or cpu_group()
    data = bytearray(what[1].encode()) if what else bytearray()
    head = torch.tensor([what[0] if what else 0, len(data)])
    dist.broadcast(head, 0, group)
    code, size = head.tolist()
    body = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(body, 0, group)
    return code, body.numpy().tobytes().decode()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """The values of all ranks by rank, on rank 0; None on the others. Every rank calls this.

    Args:
        value: What JSON can hold.
        group: Of all ranks, connected by gloo; by default the one of the thread that trains.
    """
    if _world() == 1:
        return [value]
    group, rank, world = group or cpu_group(), dist.get_rank(), _world()
    data = bytearray(json.dumps(value).encode())  # never empty
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group)
    longest = max(int(size) for size in sizes)
    body = torch.zeros(longest, dtype=torch.uint8)
    body[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)] if rank == 0 else None
    dist.gather(body, found, 0, group)
    if found is None:
        return None
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(found, sizes, strict=True)]


def barrier() -> None:
    """Wait until every rank has come here."""
    if _world() > 1:
        # Not dist.barrier(), which goes over the GPUs where there are some.
        dist.all_reduce(torch.zeros(1), group=cpu_group())


def wait_for_all() -> None:
    """Wait for all ranks, as `barrier`, where one may take hours: the limits of the process group do not count."""
    if _world() == 1:
        return
    if _Joined.store is None:  # the group was made elsewhere
        barrier()
        return
    _Joined.waits += 1
    key = f"wait {_Joined.waits}"
    _Joined.store.add(key, 1)
    pause = 0.01
    # Asked again and again: a wait on a store has a limit, and complains when it is reached.
    while _Joined.store.add(key, 0) < _world():
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def shared_store() -> Any:
    """The store that all ranks are connected to; its `set`, `get`, `check` and `add` may be called by any thread."""
    return _Joined.store or dist.distributed_c10d._get_default_store()


def start_is_over() -> None:
    """The first step is made: from now on a rank that dies is noticed by the collectives, and others may leave."""
    if _Joined.peers is not None:
        _Joined.peers.over()
        _Joined.peers = None


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def joined() -> bool:
    """True if this process is one of several that are connected; it then ends through `leave`."""
    return _world() > 1


def destroy() -> None:
    """End the process group, if there is one, of a process alone: torch warns of NCCL's that is left to the exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # The next group may be made elsewhere.
    _Joined.store = _Joined.cpu_group = _Joined.background_group = None
    _Joined.backend = ""


def leave(code: int) -> NoReturn:
    """End this process, which has joined the others, with an exit code.

    An end that all have agreed on is waited for, within limits: launchers kill the other ranks as soon as one has left
    with a code that is not 0, and rank 0 has more to close than the others.
    """
    if code in AGREED_CODES:
        start_is_over()
    if code in AGREED_CODES and _Joined.store is not None and _world() > 1:
        with suppress(Exception):  # those who are gone need not be waited for
            _Joined.store.set(f"left {dist.get_rank()}", "")
            _Joined.store.wait([f"left {rank}" for rank in range(_world())], _LEAVING)
    flush()
    # The ordinary way joins the threads of gloo and NCCL, which now and then aborts or hangs.
    os._exit(code)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:300]
