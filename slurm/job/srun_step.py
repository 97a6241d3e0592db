"""The processes of a stage: a step of srun on nodes of the job, or on this machine alone."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common import links
from pipeline.common.console import VERBOSE
from pipeline.config.parsing.code_keys import vouch_for
from slurm.job.srun_task import LOGS
from slurm.record.rank_logs import log_file, srun_log
from slurm.record.submission import Submission

_POLL = 0.2
"""Seconds between looks at whether the processes have ended."""
_STRAGGLE = 300
"""Seconds that srun gives the other processes when the first one has left well: one may still have much to close."""
_PORTS = range(10_000, 30_000)
"""Below those that systems give to outgoing connections."""


@dataclass(frozen=True)
class SrunStep:
    """A step: processes and their nodes; `nodes` is empty for this machine alone."""

    submission: Submission
    words: tuple[str, ...]
    """After the interpreter."""
    nodes: tuple[str, ...]
    per_node: int
    logs: Path
    """An existing folder for the output of the processes."""
    environment: Mapping[str, str]
    """In addition to this process's."""
    together: bool = True
    """All processes end when one of them fails."""
    through_srun: bool = False
    """The output of the processes, a few lines, is in srun's own output, and not in a log for each node."""
    name: str | None = None
    """Name of the step, by which the scheduler is asked for it; None: the name that srun chooses."""

    @property
    def srun_output(self) -> Path:
        """Output of srun itself about its tasks."""
        return srun_log(self.logs)

    def command(self, *, outside: bool = False) -> list[str]:
        """The whole command line; `outside` of a container, with the interpreter of this process."""
        site = self.submission.site
        python = [*shlex.split(site.container_prefix), site.python or sys.executable, *self.words]
        if outside:
            python = [sys.executable, *self.words]
        if not self.nodes:
            return python
        number = len(self.nodes)
        cpus = self.submission.resources.cpus_per_task
        return [
            "srun",
            f"--nodes={number}",
            f"--nodelist={','.join(self.nodes)}",
            f"--ntasks={number * self.per_node}",
            f"--ntasks-per-node={self.per_node}",
            # Since 22.05 srun does not take it from the job.
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            f"--kill-on-bad-exit={int(self.together)}",
            # What an earlier step had may still count as taken: one with a lost node never ends for the controller.
            "--overlap",
            f"--wait={_STRAGGLE}",
            *self._output,
            # A job of `sbatch --export=NONE` has SLURM_EXPORT_ENV=NONE, with which ranks would get no variable.
            "--export=ALL",
            *([] if outside or not self.together else self._binding()),
            *site.srun_options,
            *([f"--job-name={self.name}"] if self.name is not None else []),
            *python,
        ]

    @property
    def _output(self) -> list[str]:
        """Each node writes its own file, so that nothing passes through srun."""
        if self.through_srun:
            return ["--label"]
        if self.per_node == 1:
            return ["--unbuffered", f"--output={self.logs}/rank-%4t.log"]
        # Whole lines, each after its rank; see `slurm.record.rank_logs`.
        return ["--label", f"--output={self.logs}/node-%4n.log"]

    def _binding(self) -> list[str]:
        """Options for the placement of a training's processes, from the profile."""
        site = self.submission.site
        if self.submission.stage != "train":
            return []
        # Named even where it is the default: SLURM_DISTRIBUTION and some versions with a topology plugin have others.
        options = {"--distribution": site.distribution or "block", "--cpu-bind": site.cpu_bind}
        return [f"{name}={value}" for name, value in options.items() if value is not None]

    def run(self, on_poll: Callable[[], None], on_start: Callable[[subprocess.Popen[bytes]], None]) -> int:
        """Start it and wait for its end; returns the exit code of srun, or of the process.

        Args:
            on_poll: called again and again while it runs.
            on_start: is given the process.
        """
        # What it executes was checked when the job was sent, and is what was sent.
        with vouch_for(self.submission.config()):
            inherited = dict(os.environ)
        environment = {**inherited, **self.environment, LOGS: str(self.logs), VERBOSE: "1", "PYTHONUNBUFFERED": "1"}
        output = self.srun_output if self.nodes else log_file(self.logs, 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(links.open_to_write(output, flags), "ab") as file:
            # Its own session: what ends this process by its group must not end the ranks, which save first.
            process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            on_start(process)
            try:
                while process.poll() is None:
                    on_poll()
                    time.sleep(_POLL)
            finally:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return process.returncode


def rendezvous_env(submission: Submission, nodes: Sequence[str]) -> dict[str, str]:
    """Environment for the rendezvous of several nodes: the first node, at a port that nobody can tell beforehand.

    torch's store serves whoever connects. The port is in the environment of the processes alone, which other users
    cannot read; who is on the network may still find it by trying.
    """
    if not nodes:
        return {}
    place = {"MASTER_ADDR": nodes[0], "MASTER_PORT": str(secrets.choice(_PORTS))}
    if interface := submission.site.network_interface:
        place |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return place
