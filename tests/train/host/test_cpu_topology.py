"""Equal parts of the cores of a machine, which is described in a folder like /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.train.distributed.cpu_affinity import cpu_ranges
from pipeline.train.host.cpu_topology import equal_sets
from tests.train.host.test_cpu_affinity import machine


def parts(system: Path, mask: frozenset[int], count: int) -> list[str]:
    return [cpu_ranges(part) for part in equal_sets(mask, count, system)]


def in_sockets(system: Path, nodes: int, cores: int, nodes_of_socket: int) -> Path:
    """A machine whose neighbouring NUMA nodes share sockets."""
    machine(system, nodes, cores)
    for cpu in range(2 * nodes * cores):
        package = cpu % (nodes * cores) // cores // nodes_of_socket
        (system / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id").write_text(f"{package}\n")
    return system


def test_no_core_is_cut_and_no_part_spans_nodes_if_it_fits_in_one(tmp_path: Path) -> None:
    system = machine(tmp_path, nodes=2, cores=4)  # core c has CPUs c and c + 8
    every = frozenset(range(16))
    assert parts(system, every, 2) == ["0-3,8-11", "4-7,12-15"]
    assert parts(system, every, 3) == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]
    assert parts(system, every, 8)[:2] == ["0,8", "1,9"]
    # Cores of a mask, with those of their threads that are in it. Two nodes have one and a half parts each.
    assert parts(system, frozenset([0, 1, 8, 5, 6, 7, 13]), 2) == ["0-1,8", "5-6,13"]
    assert parts(system, frozenset([1, 2, 3, 5, 6, 7]), 3) == ["1-2", "3,7", "5-6"]


def test_parts_larger_than_a_node_stay_in_a_socket(tmp_path: Path) -> None:
    system = in_sockets(tmp_path, nodes=4, cores=4, nodes_of_socket=2)
    assert parts(system, frozenset(range(16)), 2) == ["0-7", "8-15"]
    assert parts(system, frozenset(range(2, 16)), 2) == ["2-7,15", "8-14"], "14 cores: 6 and 8 of a socket"


@pytest.mark.parametrize(
    ("mask", "count", "expected"), [(range(7), 3, ["0-1", "2-3", "4-5"]), ([4, 6], 2, ["4", "6"]), ([0, 1], 3, [])]
)
def test_without_a_topology_cpus_are_counted(tmp_path: Path, mask: range, count: int, expected: list[str]) -> None:
    assert parts(tmp_path, frozenset(mask), count) == expected


def test_threads_are_divided_where_there_are_fewer_cores_than_parts(tmp_path: Path) -> None:
    assert parts(machine(tmp_path, nodes=1, cores=2), frozenset(range(4)), 4) == ["0", "1", "2", "3"]
