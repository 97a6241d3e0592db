"""Which cores each of several ranks gets, on machines that are described in a folder like /sys."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.load import load
from pipeline.train.distributed import cpu_affinity
from pipeline.train.distributed.cpu_affinity import available, bind, cpu_ranges, far_from_gpu
from pipeline.train.distributed.process_group import Processes
from pipeline.train.host.cpu_topology import cpu_set
from pipeline.train.start import setup
from tests import tiny
from tests.train.distributed import ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LAUNCHED = {"PIPELINE_LAUNCHER": "1"}


def machine(folder: Path, nodes: int, cores: int, gpus: dict[int, int] | None = None) -> Path:
    """So many NUMA nodes with so many cores each; thread 2 of core c is CPU c + all cores. GPUs: bus -> node."""
    every = nodes * cores
    for cpu in range(2 * every):
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % every},{cpu % every + every}\n")
    (folder / "devices/system/cpu/online").write_text(f"0-{2 * every - 1}\n")
    for node in range(nodes):
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        first = node * cores
        (place / "cpulist").write_text(f"{first}-{first + cores - 1},{first + every}-{first + every + cores - 1}\n")
    for bus, node in (gpus or {}).items():
        device = folder / f"bus/pci/devices/0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return folder


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A process whose cores are a variable; those of its parent are the same, if they are not set."""
    state = SimpleNamespace(mask=frozenset(range(32)), parent=None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set((process and state.parent) or state.mask))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: setattr(state, "mask", frozenset(mask)))
    monkeypatch.setattr(cpu_affinity, "_mask_before_bind", [])
    yield state


def rank_of(local: int, count: int) -> Processes:
    return Processes(rank=local, world_size=count, local_rank=local, local_world_size=count)


def test_cores_are_whole_and_nodes_stay_together(tmp_path: Path) -> None:
    system = machine(tmp_path, nodes=2, cores=8)  # CPUs 0-31
    every = frozenset(range(32))
    assert [cpu_ranges(cpu_set(every, rank, 2, system) or frozenset()) for rank in range(2)] == [
        "0-7,16-23",
        "8-15,24-31",
    ]
    four = [cpu_set(every, rank, 4, system) or frozenset() for rank in range(4)]
    assert [cpu_ranges(part) for part in four] == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    # Of a mask only what is in it, and what cannot be divided evenly is divided all the same.
    odd = frozenset([1, 2, 3, 9, 17, 25])
    parts = [cpu_set(odd, rank, 3, system) for rank in range(3)]
    assert parts == [{1, 17}, {2}, {3, 9, 25}]
    # More ranks than cores have a thread each; more ranks than CPUs have none.
    assert [cpu_set(frozenset([0, 16]), rank, 2, system) for rank in range(2)] == [{0}, {16}]
    assert cpu_set(frozenset([0, 16]), 0, 3, system) is None


def test_without_a_topology_cpus_are_counted(tmp_path: Path) -> None:
    assert [cpu_set(frozenset(range(6)), rank, 3, tmp_path) for rank in range(3)] == [{0, 1}, {2, 3}, {4, 5}]


def test_ranks_are_near_their_gpus(tmp_path: Path) -> None:
    system = machine(tmp_path, nodes=2, cores=8)
    every = frozenset(range(32))
    nodes = [1, 0, 1, 0]
    parts = [cpu_ranges(cpu_set(every, rank, 4, system, nodes) or frozenset()) for rank in range(4)]
    assert parts == ["8-11,24-27", "0-3,16-19", "12-15,28-31", "4-7,20-23"]
    # Where the job has no cores on a GPU's node, all ranks share what it has.
    first = frozenset(range(8))
    assert [cpu_set(first, rank, 4, system, nodes) for rank in range(4)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_cores_of_nodes_without_a_gpu_are_dealt_to_all(tmp_path: Path) -> None:
    system = machine(tmp_path, nodes=4, cores=4)  # 16 cores; node 0 is 0-3, node 3 is 12-15
    every = frozenset(range(32))
    parts = [cpu_ranges(cpu_set(every, rank, 4, system, [3, 3, 1, 1]) or frozenset()) for rank in range(4)]
    assert parts == ["8-9,12-13,24-25,28-29", "10-11,14-15,26-27,30-31", "0-1,4-5,16-17,20-21", "2-3,6-7,18-19,22-23"]


def test_a_gpu_is_found_by_its_address(
    tmp_path: Path, process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    buses = [0x9D, 0x1B]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[index], pci_device_id=0),
    )
    system = machine(tmp_path / "one", nodes=2, cores=8, gpus={0x9D: 1, 0x1B: 0})
    line = bind(rank_of(0, 2), CUDA, LAUNCHED, system)
    assert line == "rank 0 runs on 16 of 32 CPUs: 8-15,24-31, near its GPU (NUMA node 1)"
    assert cpu_ranges(process.mask) == "8-15,24-31"
    # What it got elsewhere is told.
    cpu_affinity._mask_before_bind.clear()
    process.mask = frozenset(range(8))
    line = bind(rank_of(0, 2), CUDA, LAUNCHED, system)
    assert line == "rank 0 runs on 4 of 8 CPUs: 0-3, 0 of them near its GPU (NUMA node 1)"
    # A machine with one node says -1.
    cpu_affinity._mask_before_bind.clear()
    process.mask = frozenset(range(32))
    unknown = machine(tmp_path / "two", nodes=2, cores=8, gpus={0x9D: -1, 0x1B: -1})
    assert bind(rank_of(0, 2), CUDA, LAUNCHED, unknown) == "rank 0 runs on 16 of 32 CPUs: 0-7,16-23"


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA has no such class")
def test_torch_tells_the_address_of_a_gpu() -> None:
    """Under these names, which the tests above take from torch."""
    properties = torch._C._CudaDeviceProperties
    assert all(hasattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))


def test_a_process_is_bound_once(tmp_path: Path, process: SimpleNamespace) -> None:
    system = machine(tmp_path, nodes=2, cores=8)
    assert bind(rank_of(1, 2), CPU, LAUNCHED, system) is not None
    assert bind(rank_of(1, 2), CPU, LAUNCHED, system) is None
    assert cpu_ranges(process.mask) == "8-15,24-31"
    assert available() == frozenset(range(32))


@pytest.mark.parametrize(
    ("mask", "environment", "count", "bound"),
    [
        (32, LAUNCHED, 1, False),
        (32, LAUNCHED, 64, False),  # fewer CPUs than ranks
        (16, {"TORCHELASTIC_RUN_ID": "x"}, 2, True),  # the launcher's own share, of which each takes a part
        (32, {"SLURM_CPUS_ON_NODE": "32"}, 2, True),  # a task that SLURM has not bound
        (16, {"SLURM_CPUS_ON_NODE": "16"}, 2, True),  # of a job with half the machine
        (16, {"SLURM_CPUS_ON_NODE": "32"}, 2, False),
        (8, {"SLURM_CPUS_ON_NODE": "32"}, 2, False),
        (16, {}, 2, False),  # bound by whoever has started it
        (32, {}, 2, True),
        (32, {**LAUNCHED, "OMP_PROC_BIND": "close"}, 2, False),
        (32, {**LAUNCHED, "GOMP_CPU_AFFINITY": "0-3"}, 2, False),
    ],
)
def test_what_others_have_bound_stays(
    tmp_path: Path, process: SimpleNamespace, mask: int, environment: dict[str, str], count: int, bound: bool
) -> None:
    system = machine(tmp_path, nodes=2, cores=8)
    process.mask = before = frozenset(range(mask))
    line = bind(rank_of(0, count), CPU, environment, system)
    assert (line is not None) == bound == (process.mask != before)
    assert process.mask <= before


@pytest.mark.parametrize("launcher", [LAUNCHED, {"TORCHELASTIC_RUN_ID": "x"}])
def test_what_a_wrapper_of_each_rank_has_bound_stays(
    tmp_path: Path, process: SimpleNamespace, launcher: dict[str, str]
) -> None:
    system = machine(tmp_path, nodes=2, cores=8)
    process.mask, process.parent = frozenset(range(8)), frozenset(range(32))
    assert bind(rank_of(0, 2), CPU, launcher, system) is None
    process.parent = frozenset(range(8))
    assert bind(rank_of(0, 2), CPU, launcher, system) == "rank 0 runs on 4 of 8 CPUs: 0-3"


def _bound() -> tuple[str | None, list[int], int]:
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    line = bind(rank_of(int(os.environ["LOCAL_RANK"]), count), CPU, LAUNCHED)
    torch.set_num_threads(2)
    x = torch.ones(512, 512)
    assert torch.equal(x @ x, torch.full((512, 512), 512.0))  # threads of torch exist now
    tasks = [frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
    return line, sorted(os.sched_getaffinity(0)), sum(mask <= os.sched_getaffinity(0) for mask in tasks)


@pytest.mark.parallel
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_two_processes_have_cores_of_their_own() -> None:
    (line, first, own), (_, second, _) = ranks.run(2, _bound, connect=False)
    assert line is not None and first and second and not set(first) & set(second)
    assert set(first) | set(second) == os.sched_getaffinity(0)
    assert own >= 2, "the thread that bound the process, and one of torch's"


def test_a_rank_far_from_its_gpu_says_so(
    tmp_path: Path, process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the path of a training, where others have bound its process: nothing of that is changed."""
    config = load(tiny.write_run(tmp_path))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9D, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(setup, "choose_device", lambda wanted, ranks: torch.device("cuda", 1))
    monkeypatch.setattr(setup.process_group, "init_process_group", lambda *given: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "32")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    system = machine(tmp_path / "sys", nodes=2, cores=8, gpus={0x9D: 1})
    monkeypatch.setattr(setup, "far_from_gpu", functools.partial(far_from_gpu, system=system))

    def told(*mask: int) -> list[str]:
        process.mask = frozenset(mask)
        setup.init_rank(config, Processes(rank=5, world_size=8, local_rank=1, local_world_size=4))
        assert process.mask == frozenset(mask)
        return capsys.readouterr().err.splitlines()

    first = (*range(4), *range(16, 20))
    (line,) = told(*first)
    for words in ("rank 5 on node n7 ", "CPUs 0-3,16-19 (NUMA node 0)", "GPU 1 (0000:9d:00.0) is on NUMA node 1"):
        assert words in line
    assert line.startswith("warning: ") and "cpu_bind" in line and "distribution" in line
    assert told(7, 8) == told(*range(8, 16)) == []
    (system / "bus/pci/devices/0000:9d:00.0/numa_node").write_text("-1\n")  # a machine of one node
    assert told(*first) == []
