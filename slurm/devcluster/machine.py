"""Requirements of a development cluster: SLURM's programs, and names that resolve."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.common.errors import MachineError, UserError
from pipeline.common.file_lock import acquire

PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server")
_PROGRAMS = (
    *("munged", "mariadbd", "mariadb-install-db", "mariadb-admin", "slurmdbd", "slurmctld", "slurmd"),
    *("sbatch", "srun", "sacct", "sacctmgr", "scancel", "scontrol", "sinfo", "squeue"),
)
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Daemons live in folders that the PATH of a plain user may lack."""
_HOSTS = Path("/etc/hosts")


def program(name: str) -> str:
    """The path of a program that `check_programs` has seen."""
    path = shutil.which(name, path=_PATH)
    assert path is not None, name
    return path


def missing_programs() -> list[str]:
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


def check_programs() -> None:
    """Refuse to start without SLURM.

    Raises:
        MachineError: programs are missing.
    """
    missing = missing_programs()
    if missing:
        raise MachineError(
            f"this machine lacks {', '.join(missing)}. Run this as root on Debian or Ubuntu, or give `up` --install:\n"
            f"    apt-get update && apt-get install -y {' '.join(PACKAGES)}"
        )


def install() -> None:
    """Install SLURM, munge and MariaDB with apt.

    Raises:
        UserError: this is not root, or there is no apt.
        MachineError: apt failed.
    """
    command = f"apt-get update && apt-get install -y {' '.join(PACKAGES)}"
    if os.geteuid() != 0:
        raise UserError(f"--install needs root. Run this:\n    sudo sh -c '{command}'")
    if shutil.which("apt-get") is None:
        raise UserError(
            "--install needs apt-get, which Debian and Ubuntu have; elsewhere install SLURM (with slurmdbd), munge "
            "and MariaDB yourself"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-q"], ["apt-get", "install", "-q", "-y", *PACKAGES]):
        done = subprocess.run(step, env=environment, check=False)
        if done.returncode != 0:
            raise MachineError(f"`{' '.join(step)}` exited with {done.returncode}; its output is above")


def check_ports(ports: Iterable[int]) -> None:
    """Refuse ports that are taken.

    Raises:
        MachineError: something listens on one of them.
    """
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise MachineError(
                    f"port {port} of 127.0.0.1 is taken ({error.strerror}). `ss -ltnp` shows by which program; choose "
                    "another first port with --port"
                ) from error


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def add_hosts(cluster: str, names: Sequence[str]) -> None:
    """Make names stand for this machine: ranks meet at the name of their first node.

    Raises:
        MachineError: they do not resolve, and the file of names cannot be written.
    """
    try:
        _edit_hosts(cluster, [f"127.0.0.1 {name}" for name in names])
    except PermissionError as error:
        unknown = [name for name in names if not _resolves(name)]
        if unknown:
            raise MachineError(
                f"{_HOSTS} cannot be written by this user, and the names of the nodes must resolve. Add this line as "
                f"root:\n    127.0.0.1 {' '.join(unknown)}"
            ) from error


def remove_hosts(cluster: str) -> None:
    """Take the names out again, where this user could have put them there."""
    if os.access(_HOSTS, os.W_OK):
        _edit_hosts(cluster, [])


def _edit_hosts(cluster: str, lines: Sequence[str]) -> None:
    """Replace the cluster's own lines. In place: containers mount this file, and it cannot be renamed over."""
    first, last = f"# begin {cluster}", f"# end {cluster}"
    with _HOSTS.open("r+") as file:
        acquire(file.fileno(), _HOSTS)
        old = file.read().splitlines()
        kept = old
        if first in old and last in old:
            kept = old[: old.index(first)] + old[old.index(last) + 1 :]
        new = [*kept, first, *lines, last] if lines else kept
        if new != old:
            file.seek(0)
            file.write("\n".join(new) + "\n")
            file.truncate()


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
