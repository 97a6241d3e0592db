"""Checks of a node apart from its GPUs: disks that can be written, memory, a name, its software.

Nothing here needs torch but for its version, so a node on which that cannot be imported can still say so.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.objects.listing import look_at
from pipeline.common.objects.urls import ObjectUrl, is_url, parse_url
from pipeline.config.parsing.code_keys import REMOTE_KEYS, refuse_code_of_others
from pipeline.config.root import Config
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place
from pipeline.data.datasets.remote.opening import is_there
from slurm.doctor.report import UNKNOWN, NodeCheck, Severity, failed

_FREE_BYTES = 2**30
_FREE_INODES = 10_000
_FREE_MEMORY = 2**30
_SHARED_MEMORY = 2**30
_PROBE_BYTES = 2**20
_STORE_PATIENCE_S = 5.0
"""Seconds for which a look at object storage is tried again."""


@dataclass(frozen=True)
class NodeRank:
    """Rank of this node among those that are checked."""

    rank: int = 0
    size: int = 1
    address: str = ""
    """Address of rank 0."""
    port: int = 0
    serves: bool = True
    """This process opens the port; else a launcher has."""

    @classmethod
    def of_environment(cls) -> NodeRank:
        """By RANK and WORLD_SIZE, or by srun's variables where MASTER_ADDR is set; else this node is alone.

        Raises:
            UserError: they are not numbers, several processes of one node, or without MASTER_ADDR.
        """
        names = ("RANK", "WORLD_SIZE")
        # The step's number of tasks, not the job's: a batch script itself is not one task of several.
        if "WORLD_SIZE" not in os.environ and "MASTER_ADDR" in os.environ:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        rank, size = (os.environ.get(name, default) for name, default in zip(names, ("0", "1"), strict=True))
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        given = f"{names[0]}={rank}, {names[1]}={size}, MASTER_ADDR={address or 'none'}, MASTER_PORT={port or 'none'}"
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise UserError(f"the environment has {given}; the first two must be a rank from 0 and the number of ranks")
        if int(size) == 1:
            return cls()
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise UserError(
                "nodes are checked by one process each, but LOCAL_WORLD_SIZE is above 1; start one process per node"
            )
        if not address or not port.isdecimal():
            raise UserError(f"the environment has {given}; set MASTER_ADDR and MASTER_PORT to where rank 0 is")
        serves = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return cls(int(rank), int(size), address, int(port), serves)


def disks(run: Path | None, data: Path | None, *, data_needed: bool) -> list[NodeCheck]:
    """The folders that a run writes and reads.

    Args:
        run: run folder; need not exist yet.
        data: of the tokens that are trained on.
        data_needed: whether the data must be there, because training comes next.
    """
    checks = []
    if run is not None:
        checks += [space("run.dir", run), write(run)]
    if data is not None:
        checks.append(read(data, needed=data_needed))
    return [*checks, space("tmp", Path(tempfile.gettempdir()))]


def space(name: str, path: Path) -> NodeCheck:
    """Free bytes and inodes of the disk that a folder is on, or will be."""
    label = f"space of {name}"
    try:
        found = os.statvfs(existing(path))
    except OSError as error:
        text = f"{name} ({path}): the free space of its disk cannot be read ({error.strerror}); is it mounted?"
        return failed(label, UNKNOWN, text)
    free = found.f_bavail * found.f_frsize
    value = _gib(free)
    wanted = []
    # Some file systems have no such counts, and say 0 of 0.
    if found.f_blocks and free < _FREE_BYTES:
        wanted.append(f"{_gib(free)} are free, {_gib(_FREE_BYTES)} are needed")
    if found.f_files:
        value += f", {found.f_favail:,} inodes"
        if found.f_favail < _FREE_INODES:
            wanted.append(f"{found.f_favail:,} inodes (files) are free, {_FREE_INODES:,} are needed")
    if wanted:
        return failed(label, value, f"{name} ({path}): {' and '.join(wanted)}; remove what is not needed there")
    return NodeCheck(label, True, value)


def write(run: Path) -> NodeCheck:
    """Write a file to disk, read it back and remove it: quotas and broken mounts show only then."""
    label = "write in run.dir"
    probe = storage.temporary(existing(run) / "doctor")
    data = secrets.token_bytes(_PROBE_BYTES)
    start = time.perf_counter()
    try:
        with probe.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with probe.open("rb") as file:
            with suppress(OSError, AttributeError):  # from the disk, where the system can be told so
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            same = file.read() == data
    except OSError as error:
        return failed(
            label, "failed", f"run.dir ({run}): a file of 1 MiB cannot be written and read ({error.strerror})"
        )
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    if not same:
        return failed(
            label, "damaged", f"run.dir ({run}): what was written is read back differently; do not use this disk"
        )
    return NodeCheck(label, True, f"1 MiB in {(time.perf_counter() - start) * 1e3:.0f} ms")


def read(data: Path, *, needed: bool) -> NodeCheck:
    """Check that the data can be listed."""
    label = "data.dir"
    missing: Severity = "error" if needed else "warning"
    try:
        with os.scandir(data) as entries:
            found = next(entries, None) is not None
    except FileNotFoundError:
        text = (
            f"data.dir ({data}): there is no such folder; is its disk mounted, and has `pipeline preprocess` been run?"
        )
        return NodeCheck(label, False, "not there", text, missing)
    except OSError as error:
        return failed(label, "not readable", f"data.dir ({data}): it cannot be read ({error.strerror})")
    return NodeCheck(label, True, "readable" if found else "empty")


def objects(config: Config) -> list[NodeCheck]:
    """Check that objects of sources can be listed and read from here, with the credentials that there are here."""
    found = []
    access = replace(config.data.remote.access, patience_s=_STORE_PATIENCE_S)
    for place, source in config.data.inputs.items():
        dataset = dataset_place(config, source, TRAIN)
        if isinstance(dataset, ObjectUrl):
            found.append(_reading(config, f"dataset of {source.name}", place, partial(is_there, dataset, access)))
        else:
            for path in filter(is_url, source.paths):
                label, look = f"objects of {source.name}", partial(look_at, parse_url(path), access)
                found.append(_reading(config, label, f"{place}.paths", look))
    return found


def _reading(config: Config, label: str, key: str, look: Callable[[], bool]) -> NodeCheck:
    """A look at objects."""
    try:
        refuse_code_of_others(config, *REMOTE_KEYS)
        return NodeCheck(label, True, "readable" if look() else "nothing there")
    except UserError as error:
        return NodeCheck(label, False, "not readable", f"{key}: {error}", "warning")


def mirror(config: Config) -> list[NodeCheck]:
    """Check that mirrors of checkpoints can be written and read from here, with the credentials that there are here."""
    if config.train.checkpoint.mirror is None and config.resume.from_mirror is None:
        return []
    from pipeline.train.start.from_mirror import check_mirror

    label = "mirror of checkpoints"
    try:
        warnings = check_mirror(config)
    except UserError as error:
        return [NodeCheck(label, False, "not usable", str(error), "warning")]
    return [NodeCheck(label, not warnings, "writable", "; ".join(warnings), "warning")]


def memory() -> NodeCheck:
    """Memory that programs can get now."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        if free < _FREE_MEMORY:
            text = f"memory: {_gib(free)} are free, {_gib(_FREE_MEMORY)} are needed; what else runs there?"
            return failed("memory", _gib(free), text)
        return NodeCheck("memory", True, f"{_gib(free)} free")
    return NodeCheck("memory", True, "unknown")


def shared_memory() -> NodeCheck:
    """/dev/shm, through which NCCL and workers of one node talk."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return NodeCheck("/dev/shm", False, "none", f"/dev/shm: it cannot be used ({error.strerror})", "warning")
    size = found.f_blocks * found.f_frsize
    if size < _SHARED_MEMORY:
        text = f"/dev/shm: it has {_gib(size)}, NCCL may need {_gib(_SHARED_MEMORY)}; a container has an option for it"
        return NodeCheck("/dev/shm", False, _gib(size), text, "warning")
    return NodeCheck("/dev/shm", True, _gib(size))


def host_name() -> NodeCheck:
    """Check that the node knows its own address, by which gloo offers itself to the others."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        text = f"host name: {name} does not resolve ({error.strerror}); set network_interface in the site's profile"
        return NodeCheck("host name", False, name, text, "warning")
    return NodeCheck("host name", True, f"{name} ({address})")


def software(driver: str) -> dict[str, str]:
    """Versions that must be the same on all nodes."""
    import torch

    from pipeline import __version__
    from pipeline.common.versions import code_hash

    # Nodes that see an old copy of the code have the same version, but other files.
    found = {
        "pipeline": f"{__version__} (code {code_hash()[:8]})",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        **({"hip": torch.version.hip} if torch.version.hip else {}),
        "driver": driver or "none",
    }
    if (torch.version.cuda or torch.version.hip) and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
