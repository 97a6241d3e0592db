"""Checks of an image from within a container: what it has, and what does not fit the machine that it runs on.

All but the imports of compiled packages is read from files, variables and the loader of libraries, so that each check
can be made without a container, too.
"""

from __future__ import annotations

import ctypes
import locale
import os
import platform
import pwd
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.common import storage
from slurm.doctor.node import existing
from slurm.doctor.report import UNKNOWN, NodeCheck, failed

_PATIENCE = 60.0
"""Seconds for the import of a package, which may load libraries of a GB from a shared disk."""
_COMPILED = {
    "flash-attn": "flash_attn_2_cuda",
    "flash_attn_3": "flash_attn_3._C",
    "transformer-engine": "transformer_engine.pytorch",
    "torchao": "torchao",
}
"""Optional packages by name, and what to import of each to load its compiled code."""
LONGEST = _PATIENCE * len(_COMPILED)
"""Seconds that all imports take at most."""
_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""By major version of CUDA: the oldest driver, from NVIDIA's page on the compatibility of minor versions."""
_INSIDE = ("overlay", "squashfs", "tmpfs", "ramfs")
"""File systems of the root of a container, besides those of FUSE, by which containers start without the rights of root.

What is written into it does not outlive the container, or cannot be. One of enroot is a folder of an ordinary disk,
which is not told from the root of a machine.
"""
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
_CLOCK = 5.0
"""Seconds."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    point: Path
    kind: str
    """Of the file system."""


def image_checks(folders: Mapping[str, Path]) -> list[NodeCheck]:
    """All checks of an image.

    Args:
        folders: that must be mounted, by the key that names them.
    """
    found = mounts()
    return [
        interpreter(os.environ, user_site=site.getusersitepackages() if site.ENABLE_USER_SITE else None),
        NodeCheck("glibc", True, " ".join(platform.libc_ver()).strip() or UNKNOWN),
        driver(_torch_cuda(), cuda_of_driver()),
        *(check for name, module in _COMPILED.items() if (check := compiled(name, module)) is not None),
        fabric(Path("/sys/class"), Path("/dev"), has_library),
        character_set(locale.getpreferredencoding(False)),
        home(Path(os.path.expanduser("~"))),  # which is "~" for a user without a home
        user(os.getuid()),
        *(mounted(name, path, found) for name, path in folders.items()),
        *(clock(name, path) for name, path in folders.items() if name == "run.dir"),
        commands(shutil.which),
        launcher(os.environ),
    ]


def interpreter(environment: Mapping[str, str], *, user_site: str | None) -> NodeCheck:
    """Python, and whether packages from outside of the image take the place of its own.

    Args:
        environment: variables.
        user_site: folder of the user's own packages; None where Python ignores it.
    """
    value = f"{platform.python_version()}, {sys.executable}"
    if "PYTHONHOME" in environment:
        text = f"python: PYTHONHOME is {environment['PYTHONHOME']}, which is for another Python; unset it"
        return NodeCheck("python", False, value, text, "warning")
    if user_site is not None and Path(user_site).is_dir():
        text = (
            f"python: packages in {user_site} take the place of those of the image; set PYTHONNOUSERSITE=1 in "
            f"`environment` of the profile"
        )
        return NodeCheck("python", False, value, text, "warning")
    return NodeCheck("python", True, value)


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def cuda_of_driver() -> tuple[int, int] | None:
    """Newest version of CUDA that the driver has; None without a driver that can be loaded."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def driver(built: str | None, offered: tuple[int, int] | None) -> NodeCheck:
    """Check that the driver of the machine runs what torch was built for.

    Args:
        built: version of CUDA of torch; None without.
        offered: newest version of CUDA that the driver has; None without a driver.
    """
    has = f"driver for CUDA {offered[0]}.{offered[1]}" if offered else "no driver"
    value = f"torch for CUDA {built}, {has}" if built else f"torch without CUDA, {has}"
    if built is None:
        if offered is None:
            return NodeCheck("CUDA", True, value)
        text = "CUDA: there is a driver, but this torch was built without CUDA; use an image with a CUDA build"
        return NodeCheck("CUDA", False, value, text, "warning")
    if offered is None:
        text = (
            f"CUDA: libcuda.so.1 cannot be loaded, so torch (CUDA {built}) sees no GPU. Start the container with GPUs: "
            f"`--nv` (Apptainer), `--gpus all` (Docker); enroot needs NVIDIA_VISIBLE_DEVICES"
        )
        return NodeCheck("CUDA", False, value, text, "warning")
    major, minor = (int(part) for part in built.split(".")[:2])
    if offered[0] < major:
        oldest = f" ({_DRIVERS[major]} or later)" if major in _DRIVERS else ""
        text = (
            f"CUDA: torch was built for CUDA {built}, the driver has {offered[0]}.{offered[1]}; use a newer "
            f"driver{oldest} or an image with a torch for CUDA {offered[0]}"
        )
        return failed("CUDA", value, text)
    if offered < (major, minor):
        text = (
            f"CUDA: torch was built for CUDA {built}, the driver has {offered[0]}.{offered[1]}. Most works, but code "
            f"that the driver compiles (PTX) does not; a newer driver has no such limit"
        )
        return NodeCheck("CUDA", False, value, text, "warning")
    return NodeCheck("CUDA", True, value)


def compiled(name: str, module: str) -> NodeCheck | None:
    """Import compiled code in a process of its own, where an abort does no harm; None where it is not installed.

    Args:
        name: of the distribution.
        module: what to import after torch.
    """
    try:
        has = version(name)
    except PackageNotFoundError:
        return None
    command = [sys.executable, "-c", f"import torch, importlib; importlib.import_module({module!r})"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"{name}: the import of {module} does not end within {_PATIENCE:g} s, so it was not checked"
        return NodeCheck(name, False, has, text, "warning")
    if done.returncode == 0:
        return NodeCheck(name, True, has)
    return failed(name, has, f"{name} {has}: {_why_not(name, done.returncode, done.stderr)}")


def _why_not(name: str, code: int, output: str) -> str:
    lines = output.strip().splitlines()
    last = lines[-1][:300] if lines else f"its import ended with code {code}"
    if "undefined symbol" in output:
        return f"it was built for another torch ({last}); build {name} again with this torch, or remove it"
    if "cannot open shared object" in output:
        return f"a library is missing ({last}); start the container with GPUs, or add it to the image"
    return f"it cannot be imported ({last}); install a version for this torch, or remove it"


def has_library(name: str) -> bool:
    """True if the loader finds a library by its full name, as NCCL asks for it."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def fabric(classes: Path, devices: Path, has: Callable[[str], bool]) -> NodeCheck:
    """Check that the devices of a fast network can be used from within: InfiniBand, RoCE, EFA.

    Args:
        classes: /sys/class.
        devices: /dev.
        has: whether there is a library.
    """
    name = "network devices"
    try:
        seen = sorted(each.name for each in (classes / "infiniband").iterdir())
    except OSError:
        seen = []
    efa = [each for each in seen if each.startswith(("efa", "rdmap"))]
    wanted = ["libibverbs.so.1"] + (["libfabric.so.1", "libnccl-net.so"] if efa else ["librdmacm.so.1"])
    missing = [library for library in wanted if not has(library)]
    value = ", ".join(seen) or "neither InfiniBand nor EFA"
    if not seen:
        return NodeCheck(name, True, value)
    if not any((devices / "infiniband").glob("uverbs*")):
        text = (
            f"network: the machine has {value}, but there is no device in /dev/infiniband, so NCCL uses TCP; bind "
            f"/dev/infiniband into the container"
        )
        return NodeCheck(name, False, value, text, "warning")
    if missing:
        extra = " and the plug-in of AWS for NCCL (aws-ofi-nccl)" if efa else " (libibverbs1, ibverbs-providers)"
        text = (
            f"network: the machine has {value}, but {', '.join(missing)} cannot be loaded, so NCCL may use TCP; add "
            f"{'libfabric' if efa else 'the libraries of rdma-core'}{extra} to the image, or bind them"
        )
        return NodeCheck(name, False, value, text, "warning")
    return NodeCheck(name, True, value)


def character_set(encoding: str) -> NodeCheck:
    """Check that names of files and text in any language can be written."""
    if encoding.lower().replace("-", "") == "utf8":
        return NodeCheck("locale", True, encoding)
    text = f"locale: the character set is {encoding}; set LANG=C.UTF-8 in `environment` of the profile"
    return NodeCheck("locale", False, encoding, text, "warning")


def home(folder: Path) -> NodeCheck:
    """Check that caches of torch, Triton and matplotlib have a place."""
    if folder.is_dir() and os.access(folder, os.W_OK):
        return NodeCheck("home", True, str(folder))
    text = (
        f"home: {folder} cannot be written, where torch, Triton and matplotlib keep caches; mount a folder there, or "
        f"set HOME in `environment` of the profile"
    )
    return NodeCheck("home", False, str(folder), text, "warning")


def user(number: int, mapping: Path = Path("/proc/self/uid_map")) -> NodeCheck:
    """Check that the user has a name inside; torch.compile asks for it.

    Args:
        number: of the user, inside.
        mapping: file of the kernel: ranges of users inside and outside.
    """
    outside = number
    with suppress(OSError, ValueError):
        for line in mapping.read_text().splitlines():
            first, begin, count = map(int, line.split())
            if first <= number < first + count:
                outside = begin + number - first
    value = str(number) if outside == number else f"{number} inside, {outside} outside"
    try:
        value = f"{pwd.getpwuid(number).pw_name} ({value})"
    except KeyError:
        if "USER" not in os.environ and "LOGNAME" not in os.environ:
            text = (
                f"user: {number} has no name in the container's /etc/passwd, which torch.compile asks for; set USER in "
                f"`environment` of the profile"
            )
            return NodeCheck("user", False, value, text, "warning")
    return NodeCheck("user", True, value)


def mounts(file: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """Mounts that this process sees; none where the system does not say."""
    try:
        lines = os.fsdecode(file.read_bytes()).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        if len(words := left.split()) > 4 and right:
            # The kernel writes blanks and the like as \040, and all other bytes as they are.
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
            found.append(Mount(Path(point), right.split()[0]))
    return found


def mounted(name: str, path: Path, table: Sequence[Mount]) -> NodeCheck:
    """Check that a folder comes from outside, and not from the container, which forgets it.

    Args:
        name: key that names it.
        path: absolute.
        table: all mounts, in their order.
    """
    label = f"mount of {name}"
    place = existing(path).resolve()
    under = [mount for mount in table if place.is_relative_to(mount.point)]
    if not under:
        return NodeCheck(label, True, UNKNOWN)
    mount = max(reversed(under), key=lambda each: len(each.point.parts))
    value = f"{mount.point} ({mount.kind})"
    if mount.point == Path("/") and (mount.kind in _INSIDE or mount.kind.startswith("fuse.")):
        text = (
            f"{name} ({path}): no disk of the machine is mounted there, so it is lost with the container; mount it "
            f"under the same path as outside (`--bind`, `--container-mounts`, `--volume`)"
        )
        return failed(label, value, text)
    return NodeCheck(label, True, value)


def clock(name: str, path: Path) -> NodeCheck:
    """Compare the clock with that of a file system's server, by the time of a file that is written."""
    label = f"clock of {name}"
    probe = storage.temporary(existing(path) / "clock")
    try:
        before = time.time()
        probe.touch()
        off = probe.stat().st_mtime - before
    except OSError:
        return NodeCheck(label, True, UNKNOWN)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    if abs(off) > _CLOCK:
        text = f"{name} ({path}): the clock of its disk is {off:+.0f} s off this machine's; check the time services"
        return NodeCheck(label, False, f"{off:+.0f} s", text, "warning")
    return NodeCheck(label, True, f"{abs(off):.1f} s off")


def commands(which: Callable[[str], str | None]) -> NodeCheck:
    """SLURM's commands, which belong outside: jobs are submitted there, and the batch process runs there."""
    found = [name for name in ("sbatch", "srun") if which(name)]
    value = ", ".join(found) or "not inside; submit from outside"
    return NodeCheck("SLURM's commands", True, value)


def launcher(environment: Mapping[str, str]) -> NodeCheck:
    """Variables of MPI: ranks are started by srun, without MPI."""
    found = [f"{name}={environment[name]}" for name in _LAUNCHERS if name in environment]
    value = ", ".join(found) or "none"
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        text = (
            f"MPI: mpirun has started several of these processes ({value}), whose variables the suite does not read; "
            f"start it with srun, torchrun or `launch.processes`"
        )
        return NodeCheck("MPI", False, value, text, "warning")
    return NodeCheck("MPI", True, value)
