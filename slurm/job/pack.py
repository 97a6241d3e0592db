"""Several runs of a sweep in one job on one node: a batch process for each, with cores and devices of its own.

A run that fails or is done does not disturb the others. What a single run would ask of the queue, the job asks once,
when the last of its runs has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pipeline.common.console import on_stop
from pipeline.common.errors import EXIT_OK, EXIT_OTHER, EXIT_STOPPED
from pipeline.common.signals import ignore, stop_signals
from pipeline.train.host.cpu_topology import equal_sets
from slurm import jobs
from slurm.job.allocation import Allocation
from slurm.record.launch_log import launches
from slurm.record.submission import Submission, read_submission

T = TypeVar("T")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_ROCR = "ROCR_VISIBLE_DEVICES"
_WITHIN_ROCR = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables that on ROCm count the devices that `_ROCR` leaves, and not those of the node; the first one counts."""
_OF_THE_JOB = ("SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
"""Variables with numbers of the whole job, which a run would take for its own."""


class Pack:
    """The runs of one job.

    Args:
        submission: of the job, with those of its runs in `beside`.
        chain_job: number within the chain, from 1.
        say: for what the user should know.
    """

    def __init__(self, submission: Submission, chain_job: int, say: Callable[[str], None]) -> None:
        self._submission, self._chain_job, self._say = submission, chain_job, say
        self._job, _ = jobs.this_job("slurm")
        self._allocation = Allocation.of_environment(self._job, say)
        self._signals: list[int] = []
        """Signals that came, in their order."""
        self._running: dict[Path, _Running] = {}

    def run(self) -> int:
        """Run all to their ends; returns the exit code of the job."""
        files = [Path(name) for name in self._submission.beside]
        codes: dict[Path, int] = {}
        with self._listening():
            for place, file in enumerate(files):
                if is_done(file):
                    self._say(f"{read_submission(file).run.name}: done")
                elif self._signals:
                    self._say(f"{read_submission(file).run.name}: not started, since the job was told to stop")
                    codes[file] = EXIT_STOPPED
                else:
                    self._running[file] = _Running(self._start(file, place))
            while self._running:
                for file, running in list(self._running.items()):
                    running.hand_on(self._signals)
                    code = running.process.poll()
                    if code is not None:
                        # One that did not listen yet is ended by what was handed on to it.
                        codes[file] = EXIT_STOPPED if -code in self._signals else code
                        del self._running[file]
                time.sleep(0.2)
            return self._leave(list(codes.values()))

    def _start(self, file: Path, place: int) -> subprocess.Popen[bytes]:
        """Start the batch process of a run, on its part of the node."""
        environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_JOB}
        environment |= self._devices(place)
        if self._allocation.end is not None:
            environment["SLURM_JOB_END_TIME"] = str(int(self._allocation.end))
        words = [str(self._chain_job), str(file), self._submission.sha256[str(file)]]
        # Its own session: the scheduler's signals come to this process, which hands them on once.
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "slurm.job.batch_entry", *words], env=environment, start_new_session=True
        )
        if cores := equal_sets(frozenset(os.sched_getaffinity(0)), len(self._submission.beside)):
            with suppress(OSError):  # it has ended already
                os.sched_setaffinity(process.pid, cores[place])
        return process

    def _devices(self, place: int) -> dict[str, str]:
        """Variables that show a run its devices alone."""
        number = len(self._submission.beside)
        given = {name: os.environ[name] for name in _DEVICES if os.environ.get(name)}
        if not given and self._submission.site.gpus_per_node:
            devices = range(number * self._submission.site.gpus_per_node)
            given = {_DEVICES[0]: ",".join(map(str, devices))}
        return device_variables(given, place, number, rocm=has_rocm())

    def _leave(self, codes: Sequence[int]) -> int:
        """Do what follows; returns the exit code of the job."""
        if EXIT_STOPPED in codes and self._submission.chain == "requeue":
            if signal.SIGTERM in self._signals and not self._allocation.is_over_time():
                return EXIT_OK  # the scheduler ends the job, and decides whether it starts again
            self._say("the job goes back into the queue, for the runs that were stopped")
            if refused := self._allocation.requeue():
                self._say(f"error: the requeue was refused: {refused}")
                return EXIT_OTHER
        failed = [code for code in codes if code not in (EXIT_OK, EXIT_STOPPED)]
        return (failed[0] if failed[0] > 0 else EXIT_OTHER) if failed and EXIT_STOPPED not in codes else EXIT_OK

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Note signals to stop. `run` hands them on: one may come while a process is started that is not known yet."""

        def note(number: int, frame: FrameType | None) -> None:
            on_stop(number)
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (*stop_signals(), signal.SIGINT)}
        try:
            yield
        finally:
            for running in self._running.values():
                running.process.kill()
            ignore(*before)


@dataclass
class _Running:
    """The batch process of a run."""

    process: subprocess.Popen[bytes]
    handed_on: int = 0
    """Number of the signals that it was sent."""

    def hand_on(self, signals: Sequence[int]) -> None:
        """Send those of the job's signals that it was not sent yet."""
        for number in signals[self.handed_on :]:
            self.handed_on += 1
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


def device_variables(given: Mapping[str, str], place: int, number: int, *, rocm: bool) -> dict[str, str]:
    """The variables that show a run its part of the devices of a job.

    Args:
        given: Those of the job, by name.
        place: Number of the run, from 0.
        number: Runs of the job.
        rocm: The devices are AMD's. ROCR_VISIBLE_DEVICES then hides devices from all that is above it, and the others
            count what it leaves. SLURM may set all of them on a node of NVIDIA's, too, where only CUDA's counts.
    """
    lists = {name: value.split(",") for name, value in given.items()}
    if not rocm or _ROCR not in lists:
        return {name: ",".join(part_of(devices, place, number)) for name, devices in lists.items()}
    below = lists[_ROCR]
    within = next((lists[name] for name in _WITHIN_ROCR if name in lists), [])
    # One that does not fit into what is left was not written for that: SLURM sets both to the numbers on the node.
    if within and all(each.isdecimal() and int(each) < len(below) for each in within):
        below = [below[int(each)] for each in within]
    own = part_of(below, place, number)
    count = ",".join(map(str, range(len(own))))
    return {_ROCR: ",".join(own)} | {name: count for name in _WITHIN_ROCR if name in lists}


def has_rocm(root: Path = Path("/")) -> bool:
    """True if the devices of this machine are driven by ROCm. A processor's own graphics have its driver as well."""
    return (root / "dev/kfd").exists() and not (root / "dev/nvidiactl").exists()


def part_of(things: Sequence[T], place: int, number: int) -> list[T]:
    """An equal part of devices; none where there are fewer than parts."""
    size = len(things) // number
    return list(things[place * size : (place + 1) * size])


def is_done(file: Path) -> bool:
    """True if all stages of a submission have ended well since it was written."""
    submission, since = read_submission(file), file.stat().st_mtime
    stages = [submission.stage, *(read_submission(Path(each)).stage for each in submission.then)]
    last = [each for stage in stages for each in launches(submission.run, stage)[-1:]]
    done = [each for each in last if each.end and each.end.next == "done" and each.end.time > since]
    return len(done) == len(stages)
