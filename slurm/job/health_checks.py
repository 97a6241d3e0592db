"""The site's health check on the nodes of a job; a node that fails it is not used for the next launch."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.common import links
from slurm.doctor.health import SECONDS, health_words, unhealthy
from slurm.job.allocation import Allocation
from slurm.job.srun_step import SrunStep
from slurm.record.submission import Submission

_LOG = "health.log"


class HealthChecks:
    """Runs the profile's `health_command`, if there is one, through srun.

    Args:
        submission: of the job.
        allocation: its nodes, which learns of unhealthy ones; None on a machine without a queue.
        say: tells a line in the log of the job.
    """

    def __init__(self, submission: Submission, allocation: Allocation | None, say: Callable[[str], None]) -> None:
        self._submission, self._allocation, self._say = submission, allocation, say
        self._command = submission.site.health_command
        minutes = submission.site.health_minutes
        self._every = None if minutes is None else 60 * minutes
        self._begun = time.monotonic()
        self._running: tuple[subprocess.Popen[bytes], Path] | None = None

    def check(self, logs: Path) -> None:
        """Check the nodes before a launch, and wait for the results."""
        self.stop()
        if self._allocation is not None and self._command:
            down = self._allocation.down()
            self._start([node for node in self._allocation.nodes if node not in down], logs)
            if self._running is not None and self._ends():
                self._read("is not used")

    def look(self, nodes: Sequence[str], logs: Path) -> None:
        """Start a check while processes run on nodes, or read the results of one, without waiting."""
        if self._running is not None:
            if self._running[0].poll() is not None:
                self._read("the next launch does not use it; the training continues")
        elif self._command and self._every is not None and time.monotonic() - self._begun >= self._every:
            self._start(nodes, logs)

    def stop(self) -> None:
        """End a check that runs."""
        if self._running is not None:
            self._running[0].kill()
            self._running[0].wait()
            self._running = None

    def _ends(self) -> bool:
        """Wait for the end of a check; a srun that hangs has a lost node, which the scheduler finds itself."""
        assert self._running is not None
        try:
            self._running[0].wait(timeout=2 * SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            self._say(
                f"warning: health_command did not end on all nodes within {2 * SECONDS:g} s; its result is not used"
            )
        return self._running is not None

    def _start(self, nodes: Sequence[str], logs: Path) -> None:
        self._begun = time.monotonic()
        if not nodes:
            return
        words = tuple(health_words(self._command))
        step = SrunStep(self._submission, words, tuple(nodes), 1, logs, {}, together=False, through_srun=True)
        file, quiet = logs / _LOG, subprocess.DEVNULL
        with links.create(file) as output:
            process = subprocess.Popen(
                step.command(outside=True), stdin=quiet, stdout=output, stderr=output, start_new_session=True
            )
        self._running = process, file

    def _read(self, follows: str) -> None:
        assert self._running is not None and self._allocation is not None
        _, file = self._running
        self._running = None
        for node, why in unhealthy(file.read_text(errors="replace").splitlines()).items():
            if why not in self._allocation.unhealthy.get(node, []):
                self._allocation.unhealthy.setdefault(node, []).append(why)
                self._say(f"{node} is unhealthy: {why}; {follows}")
