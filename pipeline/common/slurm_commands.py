"""SLURM's programs, run in an environment that changes neither their output nor what they select; and job states.

No other module runs them: `slurm.scheduler` has a function for each command. Only the steps of a job are started
elsewhere (`slurm.job.srun_step`). Whether a job runs has three answers: it does, it has ended, or that is unknown.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pipeline.common.errors import MachineError

SECONDS = 30.0
"""A command that takes longer is given up."""
GONE = ("Invalid job id",)
"""Words of the commands about a job that the controller does not know, or does not show to this user."""
_NOT_CONFIGURED = ("DNS SRV", "configuration source")
"""Words of the commands where there is no slurm.conf."""
_NO_ANSWER = "no answer for"
_AWAY = (
    *(_NO_ANSWER, "Unable to contact slurm controller", "timed out", "Zero Bytes were transmitted"),
    *("in standby mode", "connect failure", "Connection refused", "Communication connection"),
)
"""Words of the commands where the controller does not answer; it may be restarting."""
_WHY_AWAY = "check that the controller is up, and that SLURM_CONF names the right file"
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS")
"""Variables by which the programs find the controller, and show it who they are."""
_PROGRAMS = (
    *(
        "salloc",
        "sattach",
        "sbatch",
        "sbcast",
        "scancel",
        "sacct",
        "sacctmgr",
        "scontrol",
        "scrontab",
        "sdiag",
        "sinfo",
    ),
    *("slurm", "slurmd", "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)
_PREFIXES = tuple(f"{name.upper()}_" for name in _PROGRAMS)
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
)
"""States of a job that is over."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""States of a job that is in the queue. A state that is neither here nor in `ENDED` is one of a job that may run."""
"""States in which a job waits for its next start: no process of it is left. One that is completing may have some."""
_QUESTION_SECONDS = 20.0
"""For one question about the holder of a lock, while others wait for the lock."""
_SKEW = 60.0
"""Seconds by which the clocks of a node and the controller may differ."""

Answer = Literal["running", "ended", "unknown"]


class SchedulerError(MachineError):
    """A command of SLURM failed.

    Args:
        command: what was called.
        output: of it.
        hint: what may help, a sentence or two.
    """

    def __init__(self, command: Sequence[str], output: str, hint: str = "") -> None:
        text = output.strip() or "no message"
        if any(words in text for words in _NOT_CONFIGURED):
            text = "no SLURM is configured for this shell: use a login node of the cluster, or set SLURM_CONF"
        self.command = list(command)
        self.output = text
        more = f"; {_WHY_AWAY}" if self.away else f"\n{hint}" if hint else ""
        super().__init__(f"`{shlex.join(command)}` failed: {text}{more}")

    @property
    def away(self) -> bool:
        """True if nothing answered, so that the same command may be tried again later."""
        return any(words in self.output for words in _AWAY)


def is_slurm_variable(name: str) -> bool:
    """True for a variable of SLURM's programs or jobs that does not say where the controller is.

    Such variables filter what `squeue` lists (SQUEUE_PARTITION), change how times are written (SLURM_TIME_FORMAT), or
    send a question to other clusters (SLURM_CLUSTERS).
    """
    return name.startswith(_PREFIXES) and name not in _KEPT


def environment() -> dict[str, str]:
    """The environment in which SLURM's programs run."""
    return {name: value for name, value in os.environ.items() if not is_slurm_variable(name)}


def ask(
    command: Sequence[str],
    hint: str = "",
    *,
    seconds: float = SECONDS,
    given: str = "",
    variables: Mapping[str, str] | None = None,
) -> str:
    """Output of a command.

    SIGTERM does not end the command: a job that was put back into the queue gets it, with all of its processes, and has
    something to ask all the same.

    Args:
        command: with its arguments.
        hint: what may help where it fails.
        seconds: to wait for the answer.
        given: its input.
        variables: its environment; by default `environment()`.

    Raises:
        SchedulerError: it is not there, failed, or took too long.
    """
    # The mask is inherited. That of this thread is as before when the command has started, so nothing is lost here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        pipe = subprocess.PIPE
        env = environment() if variables is None else variables
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
    except FileNotFoundError:
        raise SchedulerError(
            command, f"{command[0]} is not on the path", "Run this on a login node of the cluster"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with process:
        try:
            output, errors = process.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SchedulerError(command, f"{_NO_ANSWER} {seconds:g} seconds", hint) from None
        except BaseException:  # a Ctrl-C, say
            process.kill()
            raise
    if process.returncode != 0:
        raise SchedulerError(command, errors or output, hint)
    return output


@dataclass(frozen=True)
class JobAnswer:
    """The scheduler's answer to whether a job runs."""

    state: Answer
    why: str
    """In words, like `job 77 is RUNNING`."""


@dataclass(frozen=True)
class JobIdentity:
    """A job, as one of its processes has written it down: numbers are given again after a controller lost its state."""

    number: str
    """`77`, or `77_3` of an array."""
    uid: int | None = None
    """Its user; None where that was not written down."""
    cluster: str | None = None
    seen: float | None = None
    """A time at which it was running, in seconds since 1970."""
    restarts: int = 0
    """Number of earlier starts by then."""

    @property
    def is_own(self) -> bool:
        """True for a job of this user, whom the controller shows all of their jobs."""
        return self.uid is not None and self.uid == own_uid()


def own_uid() -> int:
    """The user to whom the scheduler counts this process: in a container it may have another number."""
    of_job = os.environ.get("SLURM_JOB_UID", "")
    return int(of_job) if of_job.isdecimal() else os.getuid()


def whether_runs(job: JobIdentity, *, seconds: float = _QUESTION_SECONDS) -> JobAnswer:
    """The scheduler's answer about a job: it runs, it has ended, or that is unknown.

    Only a record that is the job's own counts. A job without one has ended if it is this user's and the controller has
    given out its number; another user's may be hidden (PrivateData), so accounting has to know its end.
    """
    unknown = JobAnswer("unknown", f"the scheduler does not say whether job {job.number} runs")
    try:
        settings = configuration(seconds)
        if job.cluster is not None and settings.get("ClusterName", job.cluster) != job.cluster:
            return JobAnswer("unknown", f"job {job.number} is of cluster {job.cluster}, which cannot be asked here")
        records = job_records(job.number, seconds)
    except SchedulerError:
        return unknown
    if records:
        return _by_records(job, records)
    if job.is_own and _has_issued(settings, job.number):
        return JobAnswer("ended", f"the scheduler has forgotten job {job.number}")
    if _accounted_end(job, seconds):
        return JobAnswer("ended", f"job {job.number} has ended by its accounting record")
    return unknown if job.is_own else JobAnswer("unknown", f"the scheduler does not show job {job.number} to this user")


def configuration(seconds: float = SECONDS) -> dict[str, str]:
    """`scontrol show config`, by key, like `MaxArraySize`.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    text = ask(["scontrol", "show", "config"], seconds=seconds)
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in text.splitlines())}


def job_records(number: str, seconds: float = SECONDS) -> list[dict[str, str]]:
    """`scontrol show job`, by key, for each task of an array; none for a job that the controller does not show.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    try:
        text = ask(["scontrol", "show", "job", "--all", "--oneliner", number], seconds=seconds)
    except SchedulerError as error:
        if any(words in error.output for words in GONE):
            return []
        raise
    found = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
    return [record for record in found if "JobState" in record]


def _by_records(job: JobIdentity, records: Sequence[Mapping[str, str]]) -> JobAnswer:
    """The answer by what the controller shows under the number of a job."""
    own = [record for record in records if _is_record_of(job, record)]
    if not own:
        return JobAnswer("unknown", f"number {job.number} is another job's now, and nothing is known of the one before")
    for record in own:
        if (state := record["JobState"]) not in ENDED | WAITING:
            return JobAnswer("running", f"job {job.number} is {state}")
    return JobAnswer("ended", f"job {job.number} is {own[0]['JobState']}")


def _is_record_of(job: JobIdentity, record: Mapping[str, str]) -> bool:
    user = re.search(r"\((\d+)\)$", record.get("UserId", ""))
    if job.uid is not None and user is not None and int(user.group(1)) != job.uid:
        return False
    # A job that goes back into the queue gets a new time of submission, and counts its starts.
    later = job.seen is not None and (_time(record.get("SubmitTime", "")) or 0.0) > job.seen + _SKEW
    return not later or int(record.get("Restarts", "0")) > job.restarts


def _has_issued(settings: Mapping[str, str], number: str) -> bool:
    """True if the controller has given out a number: one that lost its state may be about to give it out again."""
    following = settings.get("NEXT_JOB_ID", "")
    return following.isdecimal() and int(number.partition("_")[0]) < int(following)


def _accounted_end(job: JobIdentity, seconds: float) -> bool:
    """True if accounting, where there is any, has the end of that very job."""
    fields = "JobID,State,UID,Submit"
    try:
        lines = ask(["sacct", "-nP", "-X", "-o", fields, "-j", job.number], seconds=seconds).splitlines()
    except SchedulerError:
        return False
    rows = [line.split("|") for line in lines if line.count("|") == fields.count(",")]
    return bool(rows) and all(
        state.partition(" ")[0] in ENDED
        and (job.uid is None or uid == str(job.uid))
        and (job.seen is None or (_time(submit) or float("inf")) <= job.seen + _SKEW)
        for _, state, uid, submit in rows
    )


def _time(text: str) -> float | None:
    """A time as SLURM writes it, in seconds since 1970."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # "N/A", "Unknown"
        return None
