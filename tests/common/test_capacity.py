"""Free memory of a machine, as its kernel and the cgroups of the process limit it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.common.capacity import HostMemory, host_memory

KIB, GIB = 2**10, 2**30
MEMINFO = f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: {40 * GIB // KIB} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
V1 = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "prefix": "total_"}
V2 = {"limit": "memory.max", "usage": "memory.current", "prefix": ""}


def _machine(root: Path, cgroup: str, meminfo: str = MEMINFO) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(meminfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def _group(folder: Path, names: dict[str, str], limit: object, usage: int, cached: int) -> None:
    folder.mkdir(parents=True)
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["usage"]).write_text(f"{usage}\n")
    stat = {"anon": usage - cached, "active_file": cached // 2, "inactive_file": cached - cached // 2}
    (folder / "memory.stat").write_text("".join(f"{names['prefix']}{key} {value}\n" for key, value in stat.items()))


def test_a_machine_without_limits(tmp_path: Path) -> None:
    root = _machine(tmp_path, "0::/user\n")
    _group(root / "sys/fs/cgroup/user", V2, "max", 10 * GIB, 0)
    assert host_memory(root) == HostMemory(40 * GIB, 64 * GIB, limited=False)


def test_swap_counts_and_an_unknown_machine_is_not_judged(tmp_path: Path) -> None:
    swap = MEMINFO.replace("SwapTotal: 0", f"SwapTotal: {8 * GIB // KIB}")
    swap = swap.replace("SwapFree: 0", f"SwapFree: {2 * GIB // KIB}")
    assert host_memory(_machine(tmp_path / "a", "", swap)) == HostMemory(42 * GIB, 72 * GIB, limited=False)
    assert host_memory(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("cgroup", "mount", "names"),
    [("0::/job/step\n", "", V2), ("4:memory:/job/step\n0::/\n", "memory", V1), ("0::/job/step\n", "unified", V2)],
)
def test_the_tightest_cgroup_counts_and_cached_files_are_free(
    tmp_path: Path, cgroup: str, mount: str, names: dict[str, str]
) -> None:
    root = _machine(tmp_path, cgroup)
    base = root / "sys/fs/cgroup" / mount
    _group(base / "job", names, 16 * GIB, 10 * GIB, 4 * GIB)  # the job's limit is above that of the step
    no_limit = "max" if names is V2 else 2**63 - 4096
    _group(base / "job/step", names, no_limit, 1 * GIB, 0)
    assert host_memory(root) == HostMemory(10 * GIB, 16 * GIB, limited=True)


def test_a_container_that_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    root = _machine(tmp_path, "4:memory:/docker/0123\n")
    _group(root / "sys/fs/cgroup/memory", V1, 2 * GIB, 1 * GIB, 0)
    assert host_memory(root) == HostMemory(1 * GIB, 2 * GIB, limited=True)
