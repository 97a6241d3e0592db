"""Names of torch that are not public, of the agent that starts the ranks of a machine; see `core.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


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
