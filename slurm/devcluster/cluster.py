"""A real SLURM on one machine: a controller, accounting and several nodes, for tests and for first tries."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.common import slurm_commands
from pipeline.common.errors import MachineError, UserError
from slurm.devcluster import machine, processes
from slurm.devcluster.settings import DEFAULT_PORT, Settings

_RECORD = "cluster.json"
_START = 60.0
"""Seconds that a daemon may take until it answers."""
_END = 15.0
"""Seconds that a daemon may take to save its state."""
_TAKES_JOBS = re.compile(r"(IDLE|MIXED|ALLOCATED)(\+COMPLETING)?$")
"""States of a node, as `scontrol show node` writes them. A `*` behind one says that it does not answer."""


class DevCluster:
    """A cluster in a folder of its own: nothing of the machine's own munge, database or SLURM is touched.

    Several may live beside one another, each with its own folder and port.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @classmethod
    def up(
        cls,
        folder: Path,
        *,
        nodes: int = 3,
        port: int = DEFAULT_PORT,
        split_hosts: bool = False,
        private_jobs: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> DevCluster:
        """Start a cluster, or what is missing of one that has been started before, and wait until its nodes are idle.

        Args:
            folder: of the cluster; its accounts and its queue are kept from one `up` to the next.
            nodes: number of nodes, which all are this machine.
            port: of the controller; the nodes have the next ones. It also gives the cluster and its nodes their names.
            split_hosts: each node has its own host name and boot id; needs root.
            private_jobs: users see no jobs but their own.
            report: is given a line for every step.

        Raises:
            UserError: there is a cluster with another port or number of nodes, or a value is out of range.
            MachineError: programs are missing, a port is taken, or a daemon does not start.
        """
        settings = Settings(folder.absolute(), port, nodes, split_hosts, private_jobs)
        settings.check()
        machine.check_programs()
        record = settings.folder / _RECORD
        if record.exists() and (old := json.loads(record.read_text())) != settings.record():
            modes = "" if (old["port"], old["nodes"]) != (port, nodes) else " (in another mode)"
            raise UserError(
                f"{folder} has a cluster with port {old['port']} and {old['nodes']} nodes{modes}, not {port} and "
                f"{nodes}. Name those, or another folder, or remove this one with `down --purge`"
            )
        cluster = cls(settings)
        cluster._start(report)
        return cluster

    @classmethod
    def at(cls, folder: Path) -> DevCluster:
        """The cluster that was started in this folder.

        Raises:
            UserError: there is none.
        """
        try:
            values = json.loads((folder / _RECORD).read_text())
        except FileNotFoundError:
            raise UserError(f"{folder} has no cluster; start one with `up --dir {folder}`") from None
        return cls(Settings.of_record(folder.absolute(), values))

    @property
    def nodes(self) -> list[str]:
        return self._settings.nodes

    @property
    def environment(self) -> dict[str, str]:
        """Environment with which SLURM's commands find this cluster."""
        return {"SLURM_CONF": str(self._settings.slurm_conf)}

    @property
    def is_up(self) -> bool:
        """True if every daemon but those of killed nodes runs, and the controller answers."""
        services = ("munged", "mariadbd", "slurmdbd", "slurmctld")
        return all(map(self._pid, services)) and self._controller_answers()

    def usable(self) -> bool:
        """True if it is up and all its nodes take jobs."""
        return self.is_up and all(_TAKES_JOBS.match(state) for state in self.node_states().values())

    def node_states(self) -> dict[str, str]:
        """State of each node by the controller.

        Raises:
            MachineError: the controller does not answer.
        """
        lines = self._slurm("scontrol", "-o", "show", "nodes").splitlines()
        return {_field(line, "NodeName"): _field(line, "State") for line in lines if line}

    def daemons(self) -> dict[str, int | None]:
        """The pid of each daemon, None of those that do not run."""
        names = ("munged", "mariadbd", "slurmdbd", "slurmctld", *map(_slurmd, self.nodes))
        return {name: self._pid(name) for name in names}

    def processes_of_jobs(self) -> list[int]:
        """The pids of all processes that jobs of this cluster have started and that still run."""
        return processes.of_jobs(self._settings.slurm_conf, self._settings.cluster)

    def kill_node(self, name: str) -> None:
        """Kill a node with all that runs on it, as a loss of power would. The controller is not told.

        Raises:
            UserError: there is no such node.
            MachineError: a process of it does not die.
        """
        self._check_node(name)
        until = time.monotonic() + _END
        while found := self._processes_of_node(name):
            # At one moment for all: none may act on the death of another, as srun has one do that cancels its step.
            processes.send(found, signal.SIGSTOP)
            processes.kill_stopped(self._processes_of_node(name))
            if time.monotonic() > until:
                raise MachineError(f"processes {sorted(found)} of node {name} cannot be killed")
            time.sleep(0.05)

    def start_node(self, name: str) -> None:
        """Start a node again after `kill_node` and wait until it takes jobs.

        Jobs that ran on it are requeued, or failed, at once if the controller has not yet noticed its loss: a machine
        takes longer to boot than that, a daemon does not.

        Raises:
            UserError: there is no such node.
            MachineError: it does not start.
        """
        self._check_node(name)
        if self._pid(_slurmd(name)) is None:
            self._slurm("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=killed")
            self._start_slurmd(name)
        self._wait_for_nodes([name])

    def restart(self) -> None:
        """Start the daemons that have ended."""
        self._start(lambda _: None)

    def down(self, *, purge: bool = False) -> None:
        """End all jobs and daemons. The folder stays, with the logs and the accounting, unless it is to be purged.

        Raises:
            MachineError: a process does not die.
        """
        if self._pid("slurmctld") and self._controller_answers():
            # Whatever is left in the queue would start again with the next `up`.
            self._slurm("scancel", "--user", getpass.getuser(), "--quiet")
        for name in self.nodes:
            self.kill_node(name)
        for daemon in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            pid = self._pid(daemon)
            if pid is not None:
                processes.end(pid, _END)
            self._settings.pid_file(daemon).unlink(missing_ok=True)
        machine.remove_hosts(self._settings.cluster)
        if purge:
            shutil.rmtree(self._settings.folder)

    def _start(self, report: Callable[[str], None]) -> None:
        settings = self._settings
        if self.is_up and all(self.daemons().values()):
            report("it is up already")
        else:
            if not any(self.daemons().values()):
                machine.check_ports(settings.ports)
                settings.write()
                (settings.folder / _RECORD).write_text(json.dumps(settings.record()) + "\n")
            machine.add_hosts(settings.cluster, self.nodes)
            self._start_munged()
            report("munged runs")
            self._start_database()
            report("the database runs")
            self._start_slurmdbd()
            report("slurmdbd runs, with its cluster, accounts and QOS")
            self._ensure("slurmctld", [machine.program("slurmctld"), "-D"], self._controller_answers)
            report("slurmctld runs")
            for name in self.nodes:
                if self._pid(_slurmd(name)) is None:
                    self._start_slurmd(name)
        self._wait_for_nodes(self.nodes)
        report(f"nodes {', '.join(self.nodes)} take jobs")

    def _start_munged(self) -> None:
        settings, log = self._settings, self._settings.folder / "munge"
        command = [
            *(machine.program("munged"), "--foreground", "--force"),  # force: over the socket of one that was killed
            *(f"--socket={settings.munge_socket}", f"--key-file={settings.munge_key}"),
            *(f"--log-file={log}/munged.log", f"--pid-file={log}/pid", f"--seed-file={log}/seed"),
        ]
        self._ensure("munged", command, settings.munge_socket.is_socket)

    def _start_database(self) -> None:
        settings = self._settings
        user = getpass.getuser()
        common = [
            *("--no-defaults", f"--user={user}", f"--tmpdir={settings.database_temporary}"),
            *("--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M"),
        ]
        if not settings.database.exists():
            new = settings.database.with_suffix(".new")  # of one that was killed at this, if it exists
            shutil.rmtree(new, ignore_errors=True)
            self._call(
                [
                    *(machine.program("mariadb-install-db"), *common, f"--datadir={new}", "--skip-test-db"),
                    *("--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}"),
                ]
            )
            new.rename(settings.database)
            settings.database.chmod(0o700)
        command = [
            *(machine.program("mariadbd"), *common, f"--datadir={settings.database}"),
            *(f"--socket={settings.database_socket}", f"--pid-file={settings.folder}/run/mariadbd.own"),
            *("--skip-networking", "--skip-log-bin", "--performance-schema=off", "--innodb-lock-wait-timeout=900"),
            "--innodb-flush-log-at-trx-commit=0",  # a second of accounting may be lost with the machine
        ]
        ping = [machine.program("mariadb-admin"), "--no-defaults", f"--socket={settings.database_socket}", "ping"]
        self._ensure("mariadbd", command, lambda: _succeeds(ping, self._environment()))

    def _start_slurmdbd(self) -> None:
        settings = self._settings
        # Its configuration has no key for a socket; the client library of the database reads this one.
        extra = {"MYSQL_UNIX_PORT": str(settings.database_socket), "SLURM_CONF": str(settings.slurmdbd_conf)}
        command = [machine.program("slurmdbd"), "-D"]
        self._ensure("slurmdbd", command, lambda: machine.listens(settings.slurmdbd_port), extra)
        self._add_accounts()

    def _add_accounts(self) -> None:
        cluster, user = self._settings.cluster, getpass.getuser()
        if self._sacctmgr("-n", "-P", "list", "user", user, "format=DefaultAccount").strip() == "dev":
            return
        self._sacctmgr("add", "cluster", cluster)
        self._sacctmgr("add", "qos", "tiny", "Flags=DenyOnLimit", "MaxSubmitJobsPerUser=1", "MaxTRESPerUser=cpu=2")
        self._sacctmgr("add", "account", "dev,other", f"Cluster={cluster}", "Description=none", "Organization=none")
        self._sacctmgr("add", "user", user, "Account=dev", f"Cluster={cluster}", "AdminLevel=Admin")
        self._sacctmgr("modify", "cluster", cluster, "set", "QOS=normal,tiny", "DefaultQOS=normal")
        # The last, as it is what is looked at above: an `up` that was killed in between does all of it again.
        self._sacctmgr("modify", "user", user, "set", "DefaultAccount=dev")

    def _start_slurmd(self, name: str) -> None:
        daemon = _slurmd(name)
        environment = self._environment()
        settings = self._settings
        # -b: the node tells that it was booted, so that jobs it was running are known to be lost with it.
        command = settings.on_node(name, [machine.program("slurmd"), "-D", "-b", "-N", name])
        processes.start(command, environment, settings.output(daemon), settings.pid_file(daemon))

    def _wait_for_nodes(self, names: Sequence[str]) -> None:
        """Wait until nodes have told the controller of themselves since they were started, and take jobs."""
        until = time.monotonic() + _START
        while waiting := [name for name in names if not self._takes_jobs(name)]:
            for name in waiting:
                if self._pid(_slurmd(name)) is None:
                    logs = [self._settings.log(_slurmd(name)), self._settings.output(_slurmd(name))]
                    raise MachineError(f"slurmd of node {name} ended while it started.{processes.tail(logs)}")
            if time.monotonic() > until:
                states = ", ".join(f"{name} {self.node_states()[name]}" for name in waiting)
                log = processes.tail([self._settings.log("slurmctld")])
                raise MachineError(f"nodes do not take jobs after {_START:.0f} s: {states}.{log}")
            time.sleep(0.2)

    def _takes_jobs(self, name: str) -> bool:
        line = self._slurm("scontrol", "-o", "show", "node", name)
        started = self._settings.pid_file(_slurmd(name)).stat().st_mtime
        registered = _field(line, "SlurmdStartTime")
        if registered in ("", "None") or time.mktime(time.strptime(registered, "%Y-%m-%dT%H:%M:%S")) < int(started):
            return False
        state = _field(line, "State")
        if "DOWN" in state or "DRAIN" in state:
            self._slurm("scontrol", "update", f"NodeName={name}", "State=RESUME")
        return _TAKES_JOBS.match(state) is not None

    def _processes_of_node(self, name: str) -> set[int]:
        settings = self._settings
        slurmd = self._pid(_slurmd(name))
        steps = processes.with_open([settings.log(_slurmd(name))], "slurmstepd")
        tasks = processes.of_jobs(settings.slurm_conf, settings.cluster, name)
        return processes.with_descendants([*([slurmd] if slurmd else []), *steps, *tasks]) - {os.getpid()}

    def _ensure(
        self, daemon: str, command: Sequence[str], ready: Callable[[], bool], extra: dict[str, str] | None = None
    ) -> None:
        """Start a daemon unless it runs, and wait until it answers."""
        settings = self._settings
        pid = self._pid(daemon)
        if pid is None:
            environment = {**self._environment(), **(extra or {})}
            pid = processes.start(command, environment, settings.output(daemon), settings.pid_file(daemon))
        processes.wait(ready, daemon, pid, _START, [settings.log(daemon), settings.output(daemon)])

    def _pid(self, daemon: str) -> int | None:
        return processes.running(self._settings.pid_file(daemon))

    def _controller_answers(self) -> bool:
        with suppress(MachineError):
            return self._settings.slurm_conf.exists() and bool(self._slurm("scontrol", "ping"))
        return False

    def _check_node(self, name: str) -> None:
        if name not in self.nodes:
            raise UserError(f"the cluster has no node {name}; its nodes are {', '.join(self.nodes)}")

    def _environment(self) -> dict[str, str]:
        """Environment of daemons and commands: nothing of a job or cluster that this process may itself belong to."""
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR", "TZ") if key in os.environ}
        return {"PATH": os.defpath, **kept, **self.environment}

    def _sacctmgr(self, *arguments: str) -> str:
        try:
            return self._slurm("sacctmgr", "-i", *arguments)
        except MachineError as error:
            if re.search("Nothing new added|already exists", str(error)):  # by an `up` that did not get to its end
                return ""
            raise

    def _slurm(self, name: str, *arguments: str) -> str:
        command = [machine.program(name), *arguments]
        return slurm_commands.ask(command, seconds=_START, variables=self._environment())

    def _call(self, command: Sequence[str]) -> str:
        """Output of a command.

        Raises:
            MachineError: it failed.
        """
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise MachineError(f"`{' '.join(command)}` exited with {done.returncode}: {output}")
        return done.stdout


def _slurmd(node: str) -> str:
    return f"slurmd-{node}"


def _field(line: str, key: str) -> str:
    """The value of `Key=value` in a line of scontrol."""
    match = re.search(rf"(?:^|\s){key}=(\S*)", line)
    return match.group(1) if match else ""


def _succeeds(command: Sequence[str], environment: dict[str, str]) -> bool:
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
