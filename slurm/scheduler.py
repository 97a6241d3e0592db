"""The commands of SLURM, as functions: what each is asked, what it answers, and what to do when it fails.

`pipeline.common.slurm_commands` runs them. Where there is no SLURM `here()` says so, and the rest fails with one
message that has the command.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.slurm_commands import (
    ENDED,
    GONE,
    SECONDS,
    WAITING,
    SchedulerError,
    ask,
    configuration,
    job_records,
)
from pipeline.config.slurm import parse_minutes

__all__ = ["SchedulerError", "ask", "configuration"]  # those of the module that runs the commands, beside what is here

UNKNOWN = "UNKNOWN"
"""State of a job of which the scheduler says nothing."""
_SEND_SECONDS = 120.0
"""For sbatch, which itself tries again for a while."""
_BUSY_PAUSES = (2.0, 8.0, 20.0)
"""Seconds after each try to send a job to a controller that is too busy to answer."""
_NEVER = "Requested node configuration is not available"
"""Words of sbatch about a job for which there are too few nodes."""


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
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        """True if processes of it may run: also in a state that only a newer SLURM has."""
        return not (self.waits or self.unknown or self.state in ENDED)

    @property
    def unknown(self) -> bool:
        """True if the scheduler does not show the job to this user."""
        return self.state == UNKNOWN

    @property
    def active(self) -> bool:
        """True if it waits or runs, or may."""
        return self.state not in ENDED


def here() -> bool:
    """True if SLURM's commands are on the path."""
    return shutil.which("sbatch") is not None


_SQUEUE = "%i|%T|%r|%N|%S|%e|%x"


def jobs(numbers: Sequence[str], *, own: Collection[str] = (), seconds: float = SECONDS) -> dict[str, JobState]:
    """State of jobs by number, arrays task by task; those that the controller does not show are missing.

    A job of this user that is missing is forgotten, so it has ended. That of another user may be hidden: `states_of`.
    squeue loads the jobs of the whole cluster for a list of numbers, and only what is asked for with one number or
    with `--me`.

    Args:
        numbers: of the jobs, or of tasks of arrays.
        own: those that are known to be this user's, of which the controller need not be asked again where they are
            forgotten.
        seconds: to wait for an answer.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    wanted = {number.partition("_")[0] for number in numbers}
    found: dict[str, JobState] = {}
    if len(wanted) > 1:
        shown = _squeue(["--me"], seconds)
        found = {job: state for job, state in shown.items() if job.partition("_")[0] in wanted}
        wanted -= {number.partition("_")[0] for number in (*found, *own)}
    return found | _numbered(sorted(wanted), seconds)


def _numbered(wanted: Sequence[str], seconds: float) -> dict[str, JobState]:
    """Jobs and arrays, whoever's they are."""
    if not wanted:
        return {}
    try:
        return _squeue(["--jobs", ",".join(wanted)], seconds)
    except SchedulerError as error:
        if not any(words in error.output for words in GONE):
            raise
        if len(wanted) == 1:
            return {}
        # One that is forgotten makes squeue refuse to speak of the others.
        return {key: state for number in wanted for key, state in _numbered([number], seconds).items()}


def _squeue(which: Sequence[str], seconds: float) -> dict[str, JobState]:
    command = ["squeue", "--noheader", "--all", "--array", "--states=all", "--format", _SQUEUE, *which]
    found = {}
    for line in ask(command, seconds=seconds).splitlines():
        job, state, reason, nodes, start, end, excluded = line.split("|")
        reason, excluded = ("" if text in ("None", "(null)") else text for text in (reason, excluded))
        found[job] = JobState(job, state, reason, nodes, 0, _seconds(start), _seconds(end), excluded)
    return found


def states_of(owners: Mapping[str, str], me: str) -> dict[str, JobState]:
    """State of jobs by number; those that are known to have ended, and are forgotten, are missing.

    Args:
        owners: user of each job, or task of an array, by its number.
        me: this user, whom the controller shows all of their jobs. Those of others may be hidden (PrivateData): without
            an end in accounting they are `UNKNOWN`.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    own = [number for number, user in owners.items() if user == me]
    found = {number: state for number, state in jobs(list(owners), own=own).items() if number in owners}
    hidden = [number for number, user in owners.items() if number not in found and user != me]
    ended: set[str] = set()
    if hidden and shutil.which("sacct") is not None:
        with suppress(SchedulerError):  # a site without accounting
            ended = {number for number, each in accounting(hidden).items() if each.over}
    return found | {number: JobState(number, UNKNOWN) for number in hidden if number not in ended}


def details(job: str) -> dict[str, str]:
    """`scontrol show job`, by key; {} of a job that the controller has forgotten.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    records = job_records(job)
    return records[0] if records else {}


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


def send(script: Path) -> str:
    """Number of the job, or array, that was sent with a script whose path no other job has.

    On a busy controller sbatch may give up on an answer after the job was accepted. So the queue is asked for the
    script before another try.

    Raises:
        SchedulerError: it was refused; or it is not known whether it was accepted (`away`).
    """
    number, tries = None, 0
    while number is None:
        try:
            number = _number_in(ask(["sbatch", str(script)], seconds=_SEND_SECONDS))
        except SchedulerError as error:
            if error.away:
                time.sleep(_BUSY_PAUSES[tries])  # what was sent may still be on its way
            tries += 1
            sent = _sent_all_the_same(script, error)
            if not sent and (not error.away or tries == len(_BUSY_PAUSES)):
                raise
            number = sent[0] if sent else None
    if tries:
        cancel([each for each in sent_with(script) if each != number])  # an earlier try that was late
    return number


def _sent_all_the_same(script: Path, error: SchedulerError) -> list[str]:
    """`sent_with` after an error of sbatch, whose words may not tell a refusal from an answer that was lost.

    Raises:
        SchedulerError: the scheduler does not answer; else the error itself.
    """
    try:
        return sent_with(script)
    except SchedulerError as other:
        if other.away:
            raise
        raise error from None


def _number_in(text: str) -> str:
    """The number in what sbatch prints of a job that it has sent."""
    found = re.search(r"job (\d+)", text)
    if found is None:
        raise SchedulerError(["sbatch"], f"no number of a job in its output: {text}")
    return found.group(1)


def sent_with(script: Path) -> list[str]:
    """Numbers of this user's jobs, or arrays, that were sent with a script: by the queue, then by accounting.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    command = ["squeue", "--me", "--all", "--states=all", "--noheader", "--format", "%F|%o"]
    rows = [line.partition("|")[::2] for line in ask(command).splitlines()]
    found = [number for number, path in rows if path.strip() == str(script)]
    if not found and shutil.which("sacct") is not None:
        with suppress(SchedulerError):  # a site without accounting
            lines = ask(["sacct", "-nPX", "-S", "now-1hours", "-o", "JobID,SubmitLine"]).splitlines()
            found = [line.partition("|")[0].partition("_")[0] for line in lines if line.endswith(f" {script}")]
    return sorted(set(found), key=int)


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
        if not any(words in error.output for words in GONE):
            raise


def steps(job: str) -> set[str]:
    """Steps of a job that run, as `77.0`.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    return set(ask(["squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i"]).split())


def find_step(job: str, name: str) -> str | None:
    """A step of a job that runs, as `77.0`, by its name; None if there is none.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    lines = ask(["squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i|%j"]).splitlines()
    rows = (line.strip().partition("|") for line in lines)
    return next((step for step, _, found in rows if found == name), None)


def signal_step(step: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a step; nothing happens to one that has ended.

    Raises:
        SchedulerError: the scheduler does not answer, or the step is another user's.
    """
    try:
        ask(["scancel", f"--signal={number.name.removeprefix('SIG')}", step])
    except SchedulerError as error:
        if not any(words in error.output for words in GONE):
            raise


def run_beside(job: str, node: str, words: Sequence[str], *, seconds: float = SECONDS) -> None:
    """Run a command on a node of a job that runs, in a step of the job beside the others.

    Args:
        job: number as `scontrol show job` has it: of a task of an array its own.
        node: of the job.
        words: of the command.
        seconds: to wait for its end.

    Raises:
        SchedulerError: the scheduler refuses, or the command fails.
    """
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--jobid={job}", f"--nodelist={node}"]
    ask([*step, *words], seconds=seconds)


def hold(numbers: Sequence[str]) -> None:
    """Waiting jobs do not start until their user releases them: `hold` of an operator would keep the user from that."""
    if numbers:
        ask(["scontrol", "uhold", *numbers])


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
class NodeSize:
    """Nodes of a partition with the same CPUs and memory."""

    nodes: int
    cpus: int
    """CPUs of each node."""
    memory_mib: int
    """Memory of each node for jobs, in MiB."""


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
    sizes: tuple[NodeSize, ...] = ()
    """Its nodes by size; empty where that is not known."""


def partitions() -> dict[str, Partition]:
    """All partitions by name.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    found: dict[str, Partition] = {}
    # A line for each kind of node in a partition.
    text = ask(["sinfo", "--all", "--exact", "--noheader", "--format", "%P|%a|%l|%s|%F|%G|%f|%c|%m"])
    for line in text.splitlines():
        name, state, limit, sizes, counts, gres, features, *size = (word.strip() for word in line.split("|"))
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
            (*(before.sizes if before else ()), *_node_sizes(total, size)),
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


def _node_sizes(nodes: int, size: Sequence[str]) -> list[NodeSize]:
    """Size of nodes from the words for CPUs and memory; empty where one of them is unreadable."""
    try:
        cpus, memory = map(_count, size)
    except ValueError:
        return []
    return [NodeSize(nodes, cpus, memory)]


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
        return self.state.partition(" ")[0] in ENDED  # without `by UID`


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
