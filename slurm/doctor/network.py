"""The all-reduce of the check: one process of each node meets the others at rank 0's, and those that come measure it.

Rank 0 says who takes part and over what, so that one that is missing or has lost its GPUs does not hang the rest.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist

from slurm.doctor.gpu import synchronize
from slurm.doctor.node import NodeRank
from slurm.doctor.report import Network, NetworkState

RENDEZVOUS_SECONDS = 60.0
_GATHER_SECONDS = 20.0
"""For those that took part to be through, after this node is."""
_ELEMENTS = 2**20
_WARM_UP, _TIMED = 1, 5
_POLL = 0.05
_STORE_TIMEOUT = timedelta(seconds=10)
"""For rank 0 to answer once it listens."""


class RendezvousFailed(Exception):
    """This node does not take part.

    Args:
        state: how far it came.
        rank: of this node.
        message: what went wrong.
    """

    def __init__(self, state: NetworkState, rank: int, message: str) -> None:
        super().__init__(message)
        self.network = Network(state, rank=rank, nodes=0, message=message)


class Rendezvous:
    """The nodes that came; `rendezvous` makes one."""

    def __init__(self, node: NodeRank, store: Any, ranks: list[int], backend: str) -> None:
        self._node = node
        self._store = store
        self._ranks = ranks
        self._backend = backend

    def all_reduce(self) -> Network:
        """Add up a few MiB over all nodes several times, and look at the result and the clock."""
        missing = tuple(rank for rank in range(self._node.size) if rank not in self._ranks)
        size = len(self._ranks)
        common: dict[str, Any] = {"rank": self._node.rank, "nodes": size, "missing": missing, "backend": self._backend}
        if size == 1:
            return Network("ok", **common)
        try:
            seconds, wrong, clock = self._measure()
        except RuntimeError as error:
            text = (
                f"network: the all-reduce of {size} nodes over {self._backend} failed ({_first_line(error)}); where "
                "nodes have several networks, name the right one as network_interface in the site's profile"
            )
            return Network("failed", message=text, **common)
        if wrong:
            return Network("failed", message=f"network: the all-reduce over {self._backend} gave wrong sums", **common)
        return Network("ok", seconds=seconds, size=4 * _ELEMENTS, clock=clock, **common)

    def gather(self, report: bytes) -> list[bytes]:
        """The reports of all that have come, at rank 0; [] elsewhere. Rank 0 must not leave before this."""
        try:
            self._store.set(f"report {self._node.rank}", report)
            if self._node.rank:
                return []
            until = time.monotonic() + _GATHER_SECONDS
            waiting = set(self._ranks)
            while waiting and time.monotonic() < until:
                waiting -= {rank for rank in waiting if self._store.check([f"report {rank}"])}
                time.sleep(_POLL)
            return [self._store.get(f"report {rank}") for rank in self._ranks if rank not in waiting]
        except RuntimeError:  # rank 0 has ended
            return [] if self._node.rank else [report]

    def _measure(self) -> tuple[float, bool, float]:
        """Median seconds of an all-reduce, whether a sum was wrong, and this node's clock at one instant for all."""
        gpu = self._backend == "nccl"
        if gpu:
            torch.cuda.set_device(0)
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a time-out is an error, not the end
        size, mine = len(self._ranks), self._ranks.index(self._node.rank)
        store = dist.PrefixStore("group", self._store)  # type: ignore[attr-defined]
        wait = timedelta(seconds=RENDEZVOUS_SECONDS / 2)
        dist.init_process_group(self._backend, store=store, rank=mine, world_size=size, timeout=wait)
        values = torch.empty(_ELEMENTS, device="cuda" if gpu else "cpu")
        found, wrong = [], False
        for turn in range(_WARM_UP + _TIMED):
            values.fill_(mine + 1)
            synchronize(values.device)
            start = time.perf_counter()
            dist.all_reduce(values)
            synchronize(values.device)
            if turn >= _WARM_UP:
                found.append(time.perf_counter() - start)
            wrong = wrong or not bool((values == size * (size + 1) / 2).all())
        dist.barrier()
        synchronize(values.device)
        return statistics.median(found), wrong, time.time()


def rendezvous(node: NodeRank, *, gpus: int, seconds: float = RENDEZVOUS_SECONDS) -> Rendezvous:
    """Wait for the other nodes.

    Args:
        node: of this one.
        gpus: that this node has; without any on one node all use gloo.
        seconds: to wait.

    Raises:
        RendezvousFailed: this node takes no part.
    """
    until = time.monotonic() + seconds
    if not node.serves:
        _wait_for_port(node, until, seconds)
    try:
        tcp = dist.TCPStore(  # type: ignore[attr-defined]
            node.address,
            node.port,
            None,
            is_master=node.serves,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
        )
        store = dist.PrefixStore("doctor", tcp)  # type: ignore[attr-defined]
        store.set(f"here {node.rank}", str(gpus))
        if node.rank == 0:
            _choose_participants(node, store, until)
        # Rank 0 may have begun to wait as late as this one has come.
        elif not _appears(store, "who", time.monotonic() + seconds + _GATHER_SECONDS):
            raise RendezvousFailed("unreached", node.rank, f"network: {node.address} did not send the list of nodes")
        chosen = orjson.loads(store.get("who"))
    except (RuntimeError, ValueError) as error:
        if node.serves and "EADDRINUSE" in str(error):
            text = f"network: port {node.port} is in use here by another program, so the all-reduce was skipped"
            raise RendezvousFailed("closed", node.rank, text) from None
        text = f"network: the connection to {node.address}:{node.port} failed ({_first_line(error)})"
        raise RendezvousFailed("unreached", node.rank, text) from None
    if node.rank not in chosen["ranks"]:
        text = f"network: it joined the others more than {seconds:.0f} s after {node.address}; it is slow to start"
        raise RendezvousFailed("late", node.rank, text)
    return Rendezvous(node, store, chosen["ranks"], chosen["backend"])


def _choose_participants(node: NodeRank, store: Any, until: float) -> None:
    """Rank 0: wait for all, then say who takes part."""
    waiting = set(range(node.size))
    while waiting:
        waiting -= {rank for rank in waiting if store.check([f"here {rank}"])}
        if not waiting or time.monotonic() > until:
            break
        time.sleep(_POLL)
    ranks = [rank for rank in range(node.size) if rank not in waiting]
    gpus = [int(store.get(f"here {rank}")) for rank in ranks]
    nccl = min(gpus) > 0 and dist.is_nccl_available()
    store.set("who", orjson.dumps({"ranks": ranks, "backend": "nccl" if nccl else "gloo"}))


def _appears(store: Any, key: str, until: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _wait_for_port(node: NodeRank, until: float, seconds: float) -> None:
    """Until rank 0 listens. torch waits, too, but up to twice as long as it is told, and says much meanwhile."""
    while True:
        try:
            socket.create_connection((node.address, node.port), timeout=max(1.0, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                text = (
                    f"network: {node.address}:{node.port}, where the first node is, could not be reached for "
                    f"{seconds:.0f} s ({error.strerror or error})"
                )
                raise RendezvousFailed("unreached", node.rank, text) from None
        time.sleep(_POLL)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:200]
