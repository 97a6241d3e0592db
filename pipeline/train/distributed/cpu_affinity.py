"""The cores that a process runs on: those of the machine are divided among its ranks, near the GPU of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.common.format import spans
from pipeline.common.process_identity import node_name
from pipeline.train.distributed.process_group import Processes
from pipeline.train.distributed.rank import LAUNCHER
from pipeline.train.host.cpu_topology import SYS, cpu_set, listed, numa_nodes

_THREAD_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With any of these, OpenMP has chosen cores for its threads from those that the process began with."""

_mask_before_bind: list[frozenset[int]] = []
"""CPUs that this process could use before `bind`, if that has bound it."""


def available() -> frozenset[int]:
    """CPUs that this process may use, together with other ranks of the machine if `bind` divided them."""
    return _mask_before_bind[0] if _mask_before_bind else frozenset(os.sched_getaffinity(0))


def bind(ranks: Processes, device: torch.device, environment: Mapping[str, str], system: Path = SYS) -> str | None:
    """Give this rank cores of its own, of those that its process may use; threads that start later have the same.

    It comes before the first operation of torch, whose threads keep the cores that they began with.

    Args:
        ranks: The place of this process; the others of the machine call this too.
        device: Of this rank; on CUDA the one with its local number.
        environment: To see who started the ranks, and who has bound them.
        system: Where sysfs is.

    Returns:
        What was done, in words; None: nothing, as there is nothing to divide, or somebody else did.
    """
    if _mask_before_bind or ranks.local_world_size == 1 or any(name in environment for name in _THREAD_BINDING):
        return None
    mask = frozenset(os.sched_getaffinity(0))
    if not _is_shared(mask, environment, system):
        return None
    nodes = _gpu_nodes(ranks.local_world_size, system) if device.type == "cuda" else None
    own = cpu_set(mask, ranks.local_rank, ranks.local_world_size, system, nodes)
    if own is None or own == mask:
        return None
    os.sched_setaffinity(0, own)
    _mask_before_bind.append(mask)
    line = f"rank {ranks.rank} runs on {len(own)} of {len(mask)} CPUs: {cpu_ranges(own)}"
    if nodes is None:
        return line
    node, place = nodes[ranks.local_rank], numa_nodes(system)
    near = sum(place.get(cpu) == node for cpu in own)
    count = "" if near == len(own) else f"{near} of them "
    return f"{line}, {count}near its GPU (NUMA node {node})"


def far_from_gpu(ranks: Processes, device: torch.device, system: Path = SYS) -> str | None:
    """A warning if this rank has no core on the NUMA node of its GPU; None: it has, or that is not known.

    Args:
        ranks: The place of this process.
        device: Of this rank.
        system: Where sysfs is.
    """
    if device.type != "cuda":
        return None
    index = device.index or 0
    gpu, mask, place = _gpu_node(index, system), frozenset(os.sched_getaffinity(0)), numa_nodes(system)
    nodes = {place[cpu] for cpu in mask if cpu in place}
    if gpu is None or not nodes or gpu in nodes:
        return None
    return (
        f"rank {ranks.rank} on node {node_name()} runs on CPUs {cpu_ranges(mask)} (NUMA node "
        f"{cpu_ranges(frozenset(nodes))}), but its GPU {index} ({_gpu_address(index)}) is on NUMA node {gpu}: copies "
        "to it are slow. In the profile of the site set cpu_bind (like none, which leaves it to launch.bind: auto, or "
        "map_ldom:...), distribution, or options with gres-flags: enforce-binding, so that it gets cores there"
    )


def _is_shared(mask: frozenset[int], environment: Mapping[str, str], system: Path) -> bool:
    """True if the other ranks of the machine may use the same cores: their launcher has bound none of them.

    Processes that torchrun or our own launcher starts have its mask, unless they are bound one by one. Otherwise,
    whoever was given less than all CPUs of the job on this machine was bound.
    """
    if LAUNCHER in environment or "TORCHELASTIC_RUN_ID" in environment:
        try:
            return mask >= os.sched_getaffinity(os.getppid())
        except OSError:  # it has ended, or is not to be seen from here
            return True
    job = environment.get("SLURM_CPUS_ON_NODE", "")
    return len(mask) >= (int(job) if job.isdecimal() else len(listed(system / "devices/system/cpu/online")))


def _gpu_nodes(count: int, system: Path) -> list[int] | None:
    """The NUMA nodes of the first GPUs; None if the machine does not tell."""
    nodes = [node for node in (_gpu_node(index, system) for index in range(count)) if node is not None]
    return nodes if len(nodes) == count else None


def _gpu_node(index: int, system: Path) -> int | None:
    """The NUMA node of a GPU; None if the machine does not tell, or has but one (-1)."""
    try:
        node = int((system / "bus/pci/devices" / _gpu_address(index) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _gpu_address(index: int) -> str:
    """Address of a GPU on the PCI bus, as sysfs has it."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def cpu_ranges(numbers: frozenset[int]) -> str:
    """`0-3,8`, as the kernel writes it."""
    return spans(sorted(numbers)).replace(" ", "")
