"""Checks of an image, each with what a container may have."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurm.doctor import image
from slurm.doctor.image import (
    Mount,
    character_set,
    clock,
    compiled,
    driver,
    fabric,
    home,
    interpreter,
    launcher,
    mounted,
    mounts,
    user,
)
from tests.clock import set_time


def test_the_driver_must_have_the_major_version_of_cuda_that_torch_was_built_for() -> None:
    assert driver("13.0", (13, 0)).ok and driver("13.0", (13, 1)).ok and driver("12.8", (13, 0)).ok
    assert driver(None, None).ok
    old = driver("13.0", (12, 8))
    assert not old.ok and old.severity == "error" and "580 or later" in old.message
    # Within a major version older drivers run newer code, but for PTX.
    for check in (driver("13.1", (13, 0)), driver("13.0", None), driver(None, (13, 0))):
        assert not check.ok and check.severity == "warning"


def test_the_driver_says_its_version_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        @staticmethod
        def cuDriverGetVersion(number: object) -> int:
            number._obj.value = 12080  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(image.ctypes, "CDLL", Library)
    assert image.cuda_of_driver() == (12, 8)


def test_devices_of_a_network_need_files_and_libraries(tmp_path: Path) -> None:
    (tmp_path / "dev" / "infiniband").mkdir(parents=True)
    assert fabric(tmp_path / "class", tmp_path / "dev", lambda _: False).ok
    (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    unbound = fabric(tmp_path / "class", tmp_path / "dev", lambda _: True)
    assert not unbound.ok and "bind /dev/infiniband" in unbound.message
    (tmp_path / "dev" / "infiniband" / "uverbs0").touch()
    assert fabric(tmp_path / "class", tmp_path / "dev", lambda _: True).ok
    without = fabric(tmp_path / "class", tmp_path / "dev", lambda name: name != "librdmacm.so.1")
    assert not without.ok and "librdmacm.so.1 cannot" in without.message and "rdma-core" in without.message
    (tmp_path / "class" / "infiniband" / "rdmap0s6").mkdir()
    amazon = fabric(tmp_path / "class", tmp_path / "dev", lambda name: name == "libibverbs.so.1")
    assert "libfabric.so.1, libnccl-net.so" in amazon.message and amazon.severity == "warning"


def test_a_folder_of_the_container_itself_is_not_mounted(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(
        "22 1 0:30 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a\n"
        "23 22 8:1 /scratch /scratch\\040of\\040us rw master:1 - lustre a@tcp:/b rw\n"
        "24 22 8:1 / /scr rw - ext4 /dev/sda rw\n"
        "25 22 8:1 / /größe\\134测试 rw - ext4 /dev/sdb rw\n"
        "line that the kernel does not write\n"
    )
    table = mounts(file)
    assert table == [
        Mount(Path("/"), "overlay"),
        Mount(Path("/scratch of us"), "lustre"),
        Mount(Path("/scr"), "ext4"),
        Mount(Path("/größe\\测试"), "ext4"),
    ]
    assert mounted("run.dir", Path("/scratch of us/run"), table).value in ("/scratch of us (lustre)", "/ (overlay)")
    (tmp_path / "run").mkdir()
    inside = mounted("run.dir", tmp_path / "run" / "new", table)
    assert not inside.ok and inside.severity == "error" and "--container-mounts" in inside.message
    assert not mounted("run.dir", tmp_path, [Mount(Path("/"), "fuse.squashfuse_ll")]).ok, "Apptainer without root"
    outside = mounted("run.dir", tmp_path / "run", [*table, Mount(tmp_path, "lustre")])
    assert outside.ok and outside.value == f"{tmp_path} (lustre)"
    assert mounted("run.dir", tmp_path, [Mount(Path("/"), "ext4")]).ok, "no container"
    assert mounted("run.dir", tmp_path, []).ok and mounts(tmp_path / "none") == []


def test_a_user_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "uid_map"
    file.write_text("         0       4711          1\n         1     100000      65536\n")
    assert user(0, file).value == "root (0 inside, 4711 outside)"
    assert user(0, tmp_path / "none").value == "root (0)"
    for name in ("USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    nameless = user(54321, file)
    assert not nameless.ok and nameless.value == "54321 inside, 154320 outside" and "set USER" in nameless.message
    monkeypatch.setenv("USER", "somebody")
    assert user(54321, file).ok


def test_what_comes_from_outside_of_the_image(tmp_path: Path) -> None:
    assert interpreter({}, user_site=None).ok and interpreter({}, user_site=str(tmp_path / "none")).ok
    leaking = interpreter({}, user_site=str(tmp_path))
    assert not leaking.ok and "PYTHONNOUSERSITE=1" in leaking.message
    assert "PYTHONHOME" in interpreter({"PYTHONHOME": "/usr"}, user_site=None).message
    assert launcher({}).ok and launcher({"PMIX_RANK": "0"}).value == "PMIX_RANK=0"
    assert not launcher({"OMPI_COMM_WORLD_SIZE": "8"}).ok
    assert character_set("UTF-8").ok and "LANG=C.UTF-8" in character_set("ANSI_X3.4-1968").message
    assert home(tmp_path).ok and not home(tmp_path / "none").ok


def test_the_clock_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock("run.dir", tmp_path / "run").ok and not list(tmp_path.iterdir())
    now = image.time.time
    set_time(monkeypatch, time=lambda: now() - 100)
    late = clock("run.dir", tmp_path)
    assert not late.ok and "+100 s" in late.message


@pytest.mark.guard
def test_packages_with_compiled_code_are_imported_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "python"
    for line, words in {
        "exit 0": "",
        "echo 'ImportError: a.so: undefined symbol: _ZN3c105' >&2; exit 1": "built for another torch",
        "echo 'ImportError: libcuda.so.1: cannot open shared object file' >&2; exit 1": "a library is missing",
        "kill -ABRT $$": "its import ended with code -6",
    }.items():
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        check = compiled("torch", "torch._C")
        assert check is not None and check.ok == (not words) and words in check.message, check
    assert compiled("no-such-distribution", "none") is None


@pytest.mark.guard
def test_all_checks_where_there_is_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_COMPILED", {})
    found = {check.name: check for check in image.image_checks({"run.dir": tmp_path / "run"})}
    assert {"python", "CUDA", "network devices", "mount of run.dir", "clock of run.dir", "user"} <= set(found)
    assert all(check.message for check in found.values() if not check.ok)
    assert os.listdir(tmp_path) == []
