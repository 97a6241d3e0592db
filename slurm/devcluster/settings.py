"""Names, ports, files and the configuration of a development cluster: all that follows from its folder and port."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError

DEFAULT_PORT = 17000
MAX_NODES = 64
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
CPUS = 16
"""Processors that a node claims, whatever the machine has: many small jobs fit, and nothing is bound to a core."""
_MEMORY_MIB = 64_000
_SLURMDBD_PORT = 90
"""Above the cluster's port; the nodes have the ports between."""
_LONGEST_FOLDER = 70
"""Characters: the sockets inside must stay below the 107 that the kernel allows."""
_NAMESPACES = ("--uts", "--mount", "--propagation", "slave")
"""Namespaces of a node. Later mounts of the host appear in them if they are made below a shared mount."""


def can_split_hosts() -> bool:
    """Tell whether nodes can have host names and boot ids of their own on this machine."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return subprocess.run([unshare, *_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Settings:
    """Settings of a cluster, which tell it from others on the same machine."""

    folder: Path
    port: int
    count: int
    split_hosts: bool = False
    """Each node has its own host name and boot id, as on a real cluster."""
    private_jobs: bool = False
    """Users see no jobs but their own (`PrivateData=jobs`)."""

    @classmethod
    def of_record(cls, folder: Path, values: Mapping[str, Any]) -> Settings:
        """The settings of a cluster that was started before."""
        known = {key: values.get(key, False) for key in ("split_hosts", "private_jobs")}
        return cls(folder, values["port"], values["nodes"], **known)

    def record(self) -> dict[str, Any]:
        """Values of the file that is kept in the cluster's folder."""
        values = {"split_hosts": self.split_hosts, "private_jobs": self.private_jobs}
        return {"port": self.port, "nodes": self.count, **{key: True for key, value in values.items() if value}}

    def check(self) -> None:
        """Refuse what no cluster can be made of.

        Raises:
            UserError: the folder's path is too long, or the port or number of nodes is out of range.
        """
        if len(str(self.folder)) > _LONGEST_FOLDER:
            raise UserError(
                f"the cluster's folder {self.folder} has a path of {len(str(self.folder))} characters; its sockets "
                f"allow {_LONGEST_FOLDER}. Choose a shorter one with --dir"
            )
        if not 1 <= self.count <= MAX_NODES:
            raise UserError(f"--nodes is {self.count}; a cluster has 1 to {MAX_NODES} nodes")
        if not 1024 <= self.port <= 65535 - _SLURMDBD_PORT:
            raise UserError(f"--port is {self.port}; choose one from 1024 to {65535 - _SLURMDBD_PORT}")
        if self.split_hosts and not can_split_hosts():
            raise UserError(
                "--split-hosts: each node gets namespaces of its own, which needs root, `unshare` of util-linux and, "
                "in a container, the capability SYS_ADMIN"
            )

    @property
    def cluster(self) -> str:
        return f"dev{self.port}"

    @property
    def nodes(self) -> list[str]:
        prefix = "n" if self.port == DEFAULT_PORT else f"c{self.port}n"
        return [f"{prefix}{number}" for number in range(1, self.count + 1)]

    @property
    def slurmdbd_port(self) -> int:
        return self.port + _SLURMDBD_PORT

    @property
    def ports(self) -> list[int]:
        """Ports of the controller, the nodes and the accounting daemon."""
        return [*range(self.port, self.port + self.count + 1), self.slurmdbd_port]

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.folder / "etc" / "slurmdbd.conf"

    @property
    def munge_key(self) -> Path:
        return self.folder / "etc" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def database(self) -> Path:
        return self.folder / "mysql"

    @property
    def database_temporary(self) -> Path:
        """Its own: a server that starts clears others' tables from a folder for temporary files that it shares."""
        return self.folder / "tmp"

    @property
    def database_socket(self) -> Path:
        return self.folder / "mysql" / "socket"

    def log(self, daemon: str) -> Path:
        return self.folder / "log" / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """Output of a daemon before it has opened its log."""
        return self.folder / "log" / f"{daemon}.out"

    def pid_file(self, daemon: str) -> Path:
        return self.folder / "run" / f"{daemon}.pid"

    def on_node(self, name: str, command: Sequence[str]) -> list[str]:
        """A command on a node, which has just been booted: with split hosts in namespaces that say so."""
        if not self.split_hosts:
            return list(command)
        boot_id = self.folder / "run" / f"boot-id-{name}"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        named = f"hostname {shlex.quote(name)} && mount --bind {shlex.quote(str(boot_id))} {_BOOT_ID}"
        shell = f"{named} && exec {shlex.join(command)}"
        return [str(shutil.which("unshare")), *_NAMESPACES, "/bin/sh", "-c", shell]

    def write(self) -> None:
        """Make the folders and write the configuration files."""
        for name in ("etc", "log", "run", "state", "tmp", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        # munged and slurmd refuse folders that others may write to, whatever the umask was.
        for path in (self.folder, *(self.folder / name for name in ("etc", "log", "run", "state", "spool"))):
            path.chmod(0o755)
        self.munge_socket.parent.mkdir(exist_ok=True)
        self.munge_socket.parent.chmod(0o755)
        _write(self.slurm_conf, self._slurm_conf(), 0o644)
        _write(self.slurmdbd_conf, self._slurmdbd_conf(), 0o600)  # it refuses one that others can read
        if not self.munge_key.exists():
            _write(self.munge_key, os.urandom(128), 0o400)

    def _slurm_conf(self) -> str:
        host, user, nodes = socket.gethostname().partition(".")[0], getpass.getuser(), ",".join(self.nodes)
        node_lines = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={self.port + number} "
            f"CPUs={CPUS} RealMemory={_MEMORY_MIB} State=UNKNOWN"
            for number, name in enumerate(self.nodes, start=1)
        )
        return f"""\
ClusterName={self.cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self.port}
# The ports at which processes meet follow from the job's number, and clusters share this machine.
FirstJobId={1 + (self.port - DEFAULT_PORT) % 20_000}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
# The time of life of a credential is also the wait before a requeued job may start: two minutes by default.
AuthInfo=cred_expire=5,socket={self.munge_socket}

StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/run/slurmctld.own
SlurmdPidFile={self.folder}/run/slurmd-%n.own
SlurmctldLogFile={self.log("slurmctld")}
SlurmdLogFile={self.folder}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info

# More processors than the machine has, and nothing that needs control groups.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5

SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

ReturnToService=2
JobRequeue=1
KillWait=10
SlurmdTimeout=10
MessageTimeout=10
InactiveLimit=0
OverTimeLimit=0
MinJobAge=300
MaxArraySize=101
PrivateData={"jobs" if self.private_jobs else "none"}
EnforcePartLimits=ALL

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={self.slurmdbd_port}
# For accounting with munge this is the place of its socket; AuthInfo alone is not enough.
AccountingStoragePass={self.munge_socket}
AccountingStorageEnforce=associations,limits,qos

{node_lines}
PartitionName=DEFAULT Nodes={nodes} State=UP MaxTime=1-00:00:00 DefaultTime=01:00:00 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=train Default=YES
PartitionName=grace GraceTime=10
PartitionName=cancel PreemptMode=CANCEL
PartitionName=short MaxTime=00:05:00 DefaultTime=00:05:00
PartitionName=eval PreemptMode=OFF
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""

    def _slurmdbd_conf(self) -> str:
        user = getpass.getuser()
        return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self.slurmdbd_port}
CommunicationParameters=NoInAddrAny
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={self.munge_socket}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
CommitDelay=1
PidFile={self.folder}/run/slurmdbd.own
LogFile={self.log("slurmdbd")}
DebugLevel=info
"""


def _write(path: Path, content: str | bytes, mode: int) -> None:
    """Write a file that nobody but its owner could read at any time before `mode` allows it."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
