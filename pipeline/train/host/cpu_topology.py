"""The cores of a machine as sysfs describes them, and their division: no physical core is cut, near ones stay together.

Nothing here needs torch, since batch processes of SLURM divide cores, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SYS = Path("/sys")


def cpu_set(
    mask: frozenset[int], rank: int, ranks: int, system: Path = SYS, nodes: Sequence[int] | None = None
) -> frozenset[int] | None:
    """The CPUs of `mask` that one of several ranks gets; those of all ranks are disjoint.

    Args:
        mask: What they have together.
        rank: Which one.
        ranks: How many.
        system: Where sysfs is.
        nodes: By rank, the NUMA node that it should be on; None: side by side over all of them. Cores of nodes that
            are not named are dealt to all ranks.

    Returns:
        None if there are fewer CPUs than ranks.
    """
    if len(mask) < ranks:
        return None
    place = numa_nodes(system)
    cores = sorted(physical_cores(mask, system), key=lambda core: (place.get(core[0], 0), core))
    if nodes is not None:
        peers = [peer for peer in range(ranks) if nodes[peer] == nodes[rank]]
        near = [core for core in cores if place.get(core[0]) == nodes[rank]]
        # Every rank decides alike: if one finds too little, all go side by side.
        counts = {node: sum(place.get(core[0]) == node for core in cores) for node in nodes}
        if all(counts[node] >= nodes.count(node) for node in nodes):
            rest = [core for core in cores if place.get(core[0]) not in counts]
            # Nodes whose numbers are close mostly share a socket.
            order = sorted(range(ranks), key=lambda peer: (nodes[peer], peer))
            return _slice(near, peers.index(rank), len(peers)) | _slice(rest, order.index(rank), ranks)
    if len(cores) < ranks:  # then threads of a core are divided
        cores = [(cpu,) for core in cores for cpu in core]
    return _slice(cores, rank, ranks)


def equal_sets(mask: frozenset[int], count: int, system: Path = SYS) -> list[frozenset[int]]:
    """Disjoint sets of CPUs with the same number of physical cores each, in the order of the machine.

    As many as possible are within a NUMA node, then within a socket. Cores that are left over are in no set.

    Args:
        mask: The CPUs to divide.
        count: Number of sets.
        system: Where sysfs is.

    Returns:
        The sets; none if there are fewer CPUs than sets. Where sysfs says nothing, they go by the numbers of the CPUs.
    """
    nodes, sockets = numa_nodes(system), {cpu: _socket(cpu, system) for cpu in mask}
    cores = physical_cores(mask, system)
    if len(cores) < count:  # then threads of a core are divided
        cores = {(cpu,) for cpu in mask}
    size = len(cores) // count
    if size == 0:
        return []

    def place(core: tuple[int, ...]) -> tuple[int, int]:
        return sockets[core[0]], nodes.get(core[0], 0)

    left = sorted(cores, key=lambda core: (place(core), core))
    found: list[list[tuple[int, ...]]] = []
    for depth in (2, 1, 0):  # within a NUMA node, within a socket, anywhere
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for core in left:
            groups.setdefault(place(core)[:depth], []).append(core)
        left = []
        for group in groups.values():
            taken = min(len(group) // size, count - len(found))
            found += [group[index * size : (index + 1) * size] for index in range(taken)]
            left += group[taken * size :]
    found.sort(key=lambda chosen: (place(chosen[0]), chosen[0]))
    return [frozenset(cpu for core in chosen for cpu in core) for chosen in found]


def _slice(cores: Sequence[tuple[int, ...]], index: int, count: int) -> frozenset[int]:
    begin, end = len(cores) * index // count, len(cores) * (index + 1) // count
    return frozenset(cpu for core in cores[begin:end] for cpu in core)


def _socket(cpu: int, system: Path) -> int:
    """The socket of a CPU; 0 if the machine does not tell."""
    try:
        return int((system / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id").read_text())
    except (OSError, ValueError):
        return 0


def physical_cores(mask: frozenset[int], system: Path) -> set[tuple[int, ...]]:
    """Physical cores, each with those of its CPUs that are in `mask`."""
    siblings = {cpu: listed(system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in mask}
    return {tuple(sorted(cpus & mask | {cpu})) for cpu, cpus in siblings.items()}


def numa_nodes(system: Path) -> dict[int, int]:
    """CPU -> NUMA node; empty if the machine does not tell."""
    folders = (system / "devices/system/node").glob("node[0-9]*")
    return {cpu: int(folder.name.removeprefix("node")) for folder in folders for cpu in listed(folder / "cpulist")}


def listed(file: Path) -> frozenset[int]:
    """The numbers of a list of the kernel's, like `0-3,8`; none if there is no such file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return frozenset()
    numbers: set[int] = set()
    for numbers_range in filter(None, text.split(",")):
        first, _, last = numbers_range.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
