"""The commands of SLURM, as functions: what each is asked, what it answers, and what to do when it fails.

Nothing else calls them. Where there is no SLURM `here()` says so, and the rest fails with one message that has the
command.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.common.errors import MachineError
from pipeline.config.slurm import parse_minutes

SECONDS = 30.0
"""A command that takes longer is given up."""
_GONE = ("Invalid job id",)
"""Words of the commands about a job that ended so long ago that the controller has forgotten it."""
_NOT_CONFIGURED = ("DNS SRV", "configuration source")
"""Words of the commands where there is no slurm.conf."""
_NO_ANSWER = "no answer for"
_AWAY = (
    *(_NO_ANSWER, "Unable to contact slurm controller", "timed out", "Zero Bytes were transmitted"),
    *("in standby mode", "connect failure", "Connection refused", "Communication connection"),
)
"""Words of the commands where the controller does not answer; it may be restarting."""
_WHY_AWAY = "check that the controller is up, and that SLURM_CONF names the right file"
_NEVER = "Requested node configuration is not available"
"""Words of sbatch about a job for which there are too few nodes."""


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


@dataclass(frozen=True)
class JobState:
    """State of a job, or of a task of an array."""

    job: str
    """`77`, or `77_3` of an array."""
    state: str
    """Long form: PENDING, RUNNING, COMPLETING, COMPLETED, TIMEOUT ..."""
    reason: str = ""
    """Reason for waiting, like `Priority`."""
    nodes: str = ""
    """Compact, like `n[1-2]`."""
    restarts: int = 0
    start: float | None = None
    """Start, or expected start, in seconds since 1970."""
    end: float | None = None
    """End of its time, in seconds since 1970."""
    excluded: str = ""
    """Nodes that it is kept from, compact."""

    @property
    def waits(self) -> bool:
        """True if it is in the queue."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")

    @property
    def runs(self) -> bool:
        """True if processes of it may run."""
        return self.state in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING")

    @property
    def active(self) -> bool:
        """True if it waits or runs."""
        return self.waits or self.runs


def here() -> bool:
    """True if SLURM's commands are on the path."""
    return shutil.which("sbatch") is not None


def ask(command: Sequence[str], hint: str = "", *, seconds: float = SECONDS, given: str = "") -> str:
    """Output of a command.

    SIGTERM does not end the command: a job that was put back into the queue gets it, with all of its processes, and has
    something to ask all the same.

    Args:
        command: with its arguments.
        hint: what may help where it fails.
        seconds: to wait for the answer.
        given: its input.

    Raises:
        SchedulerError: it is not there, failed, or took too long.
    """
    # The mask is inherited. That of this thread is as before when the command has started, so nothing is lost here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
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


_SQUEUE = "%i|%T|%r|%N|%S|%e|%x"


def jobs(numbers: Sequence[str], *, seconds: float = SECONDS) -> dict[str, JobState]:
    """State of jobs by number, arrays task by task; those that the controller has forgotten are missing.

    Args:
        numbers: of the jobs, or of tasks of arrays.
        seconds: to wait for the answer.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    wanted = sorted({number.partition("_")[0] for number in numbers})
    if not wanted:
        return {}
    command = ["squeue", "--noheader", "--array", "--states=all", "--format", _SQUEUE]
    try:
        text = ask([*command, "--jobs", ",".join(wanted)], seconds=seconds)
    except SchedulerError as error:
        if not any(words in error.output for words in _GONE):
            raise
        if len(wanted) == 1:
            return {}
        # One that is forgotten makes squeue refuse to speak of the others.
        return {key: state for number in wanted for key, state in jobs([number], seconds=seconds).items()}
    found = {}
    for line in text.splitlines():
        job, state, reason, nodes, start, end, excluded = line.split("|")
        reason, excluded = ("" if text in ("None", "(null)") else text for text in (reason, excluded))
        found[job] = JobState(job, state, reason, nodes, 0, _seconds(start), _seconds(end), excluded)
    return found


def details(job: str) -> dict[str, str]:
    """`scontrol show job`, by key; {} of a job that the controller has forgotten.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    try:
        text = ask(["scontrol", "show", "job", "--oneliner", job])
    except SchedulerError as error:
        if any(words in error.output for words in _GONE):
            return {}
        raise
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def hostnames(compact: str) -> list[str]:
    """`n[1-2]` -> n1, n2, in this order."""
    return ask(["scontrol", "show", "hostnames", compact]).split() if compact else []


def node_states(nodes: Sequence[str]) -> dict[str, str]:
    """State of nodes by name, in lower case: idle, allocated, down ...; one with `*` does not answer."""
    text = ask(["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N %T"])
    return {name: state for name, _, state in (line.partition(" ") for line in text.splitlines())}


def requeue(job: str) -> None:
    """Put a running job back into the queue, of an array `ARRAY_TASK`.

    Raises:
        SchedulerError: it was refused.
    """
    ask(
        ["scontrol", "requeue", job],
        "If the site does not let users requeue jobs, set slurm.chain=singleton (has_requeue: false in the profile)",
    )


def can_start(job: str, exclude: Sequence[str]) -> bool:
    """True if a job has enough nodes without some of them, now or when other jobs have ended.

    The scheduler itself is asked, with the script of the job: it knows what features and devices are wanted. Where it
    says anything else than that there are too few, a job like this one is taken to be possible.

    Raises:
        SchedulerError: the script of the job cannot be had.
    """
    script = ask(["scontrol", "write", "batch_script", job, "-"])
    # What the job has waited for is no longer of interest, and the scheduler may have forgotten it.
    command = ["sbatch", "--test-only", "--dependency=singleton", f"--exclude={','.join(exclude)}"]
    try:
        ask(command, given=script)
    except SchedulerError as error:
        return _NEVER not in error.output
    return True


def kill_wait() -> float:
    """Seconds that the processes of a job have when the scheduler ends it."""
    try:
        return float(configuration()["KillWait"].split()[0])
    except (SchedulerError, KeyError, ValueError):
        return 30.0


def update(job: str, values: Mapping[str, str]) -> None:
    """Change a job, like `ExcNodeList`.

    Raises:
        SchedulerError: it was refused.
    """
    ask(["scontrol", "update", f"JobId={job}", *(f"{key}={value}" for key, value in values.items())])


def cancel(numbers: Sequence[str]) -> None:
    """End jobs, or take them out of the queue; those that have ended are skipped.

    Raises:
        SchedulerError: the scheduler does not answer, or the job is another user's.
    """
    if not numbers:
        return
    try:
        ask(["scancel", *numbers])
    except SchedulerError as error:
        if not any(words in error.output for words in _GONE):
            raise


def hold(numbers: Sequence[str]) -> None:
    """Waiting jobs do not start until they are released."""
    if numbers:
        ask(["scontrol", "hold", *numbers])


def release(numbers: Sequence[str]) -> None:
    """Held jobs may start."""
    if numbers:
        ask(["scontrol", "release", *numbers])


def _seconds(text: str) -> float | None:
    """A time of squeue, in seconds since 1970."""
    import datetime

    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:  # "N/A"
        return None


@dataclass(frozen=True)
class Partition:
    """A partition with its limits and nodes."""

    name: str
    default: bool
    """Jobs that name no partition go there."""
    state: str
    """`up`; `down`: jobs wait; `drain` and `inact`: none are taken."""
    minutes: int | None
    """Longest time limit; None for none."""
    most_nodes: int | None
    """Largest number of nodes of one job; None for no limit."""
    nodes: int
    """In all."""
    usable: int
    """Those that are not down, drained or reserved for repair: idle or at work."""
    gres: tuple[str, ...]
    """Generic resources of its nodes, like `gpu:h100:8`; one for each kind of node."""
    features: frozenset[str] = frozenset()
    """Features of some of its nodes, for `constraint`."""


def partitions() -> dict[str, Partition]:
    """All partitions by name.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    found: dict[str, Partition] = {}
    # A line for each kind of node in a partition.
    for line in ask(["sinfo", "--all", "--noheader", "--format", "%P|%a|%l|%s|%F|%G|%f"]).splitlines():
        name, state, limit, sizes, counts, gres, features = (word.strip() for word in line.split("|"))
        default, name = name.endswith("*"), name.removesuffix("*")
        busy, idle, _, total = (_count(word) for word in counts.split("/"))
        most = sizes.rpartition("-")[2]
        before = found.get(name)
        found[name] = Partition(
            name,
            default,
            state,
            parse_minutes(limit) if limit[:1].isdecimal() else None,
            int(most) if most.isdecimal() else None,
            total + (before.nodes if before else 0),
            busy + idle + (before.usable if before else 0),
            (*(before.gres if before else ()), gres),
            (before.features if before else frozenset()).union(features.split(",")) - {"(null)"},
        )
    return found


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    nodes: int
    cpus: int
    """CPUs of each node."""
    gres: str
    """Like `gpu:h100:8`; `(null)` for none."""


def node_kinds(partition: str) -> list[NodeKind]:
    """The kinds of nodes of a partition.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    text = ask(["sinfo", "--noheader", "--exact", "--partition", partition, "--format", "%D|%c|%G"])
    rows = [[word.strip() for word in line.split("|")] for line in text.splitlines()]
    return [NodeKind(_count(nodes), _count(cpus.rstrip("+")), gres) for nodes, cpus, gres in rows]


def configuration() -> dict[str, str]:
    """`scontrol show config`, by key, like `MaxArraySize`.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    text = ask(["scontrol", "show", "config"])
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in text.splitlines())}


def partition_details() -> dict[str, dict[str, str]]:
    """`scontrol show partition`, by name and key, like `PreemptMode`.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    lines = ask(["scontrol", "show", "partition", "--oneliner"]).splitlines()
    found = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]
    return {values["PartitionName"]: values for values in found if "PartitionName" in values}


@dataclass(frozen=True)
class Qos:
    """A quality of service, as preemption sees it."""

    mode: str
    """Preemption mode of its jobs, in lower case; `cluster`: that of `PreemptMode` of the cluster."""
    preempts: tuple[str, ...]
    """Those whose jobs it may preempt."""
    grace: str
    """From SIGTERM to the end of a preempted job, `HH:MM:SS`."""


def qualities() -> dict[str, Qos]:
    """All qualities of service by name.

    Raises:
        SchedulerError: there is no sacctmgr, or the accounting does not answer.
    """
    text = ask(["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,preemptmode,preempt,gracetime"])
    rows = [line.split("|") for line in text.splitlines()]
    return {name: Qos(mode, tuple(filter(None, over.split(","))), grace) for name, mode, over, grace in rows}


@dataclass(frozen=True)
class Association:
    """An account of a user, with its partition and qualities of service."""

    account: str
    partition: str
    """That it is for; empty for all."""
    qos: tuple[str, ...]
    default_qos: str = ""
    """Of jobs that name none."""


def associations(user: str) -> list[Association]:
    """Accounts and their qualities of service that a user has; none where the site keeps none.

    Raises:
        SchedulerError: there is no sacctmgr, or the accounting does not answer.
    """
    what = ["show", "associations", "where", f"user={user}", "format=account,partition,qos,defaultqos"]
    rows = [line.split("|") for line in ask(["sacctmgr", "--noheader", "--parsable2", *what]).splitlines()]
    return [
        Association(account, part, tuple(filter(None, qos.split(","))), usual) for account, part, qos, usual in rows
    ]


def _count(text: str) -> int:
    """A number of sinfo, which may write 1.5K."""
    return round(float(text[:-1]) * 1000) if text.endswith("K") else int(text)


@dataclass(frozen=True)
class Accounted:
    """Accounting record of a job that has ended, or of a task of an array."""

    state: str
    """COMPLETED, OUT_OF_MEMORY, NODE_FAIL, TIMEOUT ..., or `CANCELLED by UID`."""
    exit_code: str
    """`CODE:SIGNAL`"""
    elapsed: str
    """`[D-]HH:MM:SS`, of the last start."""
    nodes: str
    """Compact, like `n[1-2]`; "" if it has had none."""

    @property
    def over(self) -> bool:
        """True if accounting knows of the end: it may be some seconds behind the queue."""
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")


def accounting(numbers: Sequence[str], *, seconds: float = SECONDS) -> dict[str, Accounted]:
    """Accounting records of jobs by number, arrays task by task; the last start of each.

    Args:
        numbers: of the jobs, or of tasks of arrays.
        seconds: to wait for the answer.

    Raises:
        SchedulerError: accounting does not answer, or there is none.
    """
    if not numbers:
        return {}
    fields = "JobID,State,ExitCode,Elapsed,NodeList"
    # By array: tasks that never began are in a row of it, which does not come for a task alone.
    wanted = sorted({number.partition("_")[0] for number in numbers})
    text = ask(["sacct", "-nP", "-X", "-o", fields, "-j", ",".join(wanted)], seconds=seconds)
    rows = [line.split("|") for line in text.splitlines()]
    return {
        number: Accounted(state, code, elapsed, "" if nodes == "None assigned" else nodes)
        for job, state, code, elapsed, nodes in rows
        for number in _tasks(job)
        if number in numbers
    }


def _tasks(job: str) -> list[str]:
    """`77_[0,2-3%2]`, tasks that were cancelled before they began: 77_0, 77_2, 77_3."""
    array, bracket, listed = job.partition("_[")
    return [f"{array}_{task}" for task in numbers_in(listed.rstrip("]").partition("%")[0])] if bracket else [job]


def numbers_in(text: str) -> Iterator[str]:
    """`08-10,12` -> 08, 09, 10, 12."""
    for each in filter(None, text.split(",")):
        first, _, last = each.partition("-")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))
