"""The first failure of a launch: from the records that ranks left behind and from the output of srun.

One that fails takes all others with it: they lose their connections, or are ended from outside. Of thousands of ranks
one is the cause, and the rest is aftermath. Nothing here needs torch.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.common import links, storage
from pipeline.common.errors import EXIT_OTHER, EXIT_REFUSED, EXIT_STOPPED
from pipeline.train.distributed.rank import ErrorRecord, read_error, read_errors
from slurm.record.drill_record import read_drill
from slurm.record.rank_logs import ERRORS, rank_log
from slurm.scheduler import numbers_in

TAIL = 20
"""Lines of the log of a rank that has left no message."""
_ERROR_FILE = re.compile(r"^rank-(\d+)\.error\.json$")

# What srun says, as seen with SLURM 22.05; "Out Of Memory" needs control groups.
_TASKS = re.compile(r"^srun: error: \S+: tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)$")
_NOT_STARTED = re.compile(r"^srun: error: task (?P<task>\d+) launch failed: (?P<why>.+)$")
_NODE_LOST = re.compile(r"^srun: error: Node failure on (?P<nodes>\S+)$")
_ENDING = re.compile(
    r"^srun: (?:(?:launch/slurm: _step_signal: )?Terminating |Force Terminated |Job step aborted|got SIG|forcing )|"
    r"error: \*\*\* (?:STEP|JOB) "
)
"""From this line on processes end because they are told to."""
_CANCELLED = re.compile(r"error: \*\*\* (?:STEP|JOB) .*? CANCELLED AT \S+(?: DUE TO (?P<why>.+?))? \*\*\*")
"""On the error output of a node's first process, and so at the end of its log."""
_OTHER = re.compile(r"^srun: (?:error|fatal): (?P<what>.+)$")
_EXIT_CODE = re.compile(r"^Exited with exit code (?P<code>\d+)$")
_OUT_OF_MEMORY = "Out Of Memory"
_NO_MEMORY = (
    "ran out of the memory that the job has on its node: ask for more (mem_gb), or lower train.micro_batch_size"
)
_TOLD_EARLY = ("received SIGTERM before", "received SIGTERM; what was committed is kept", "SIGTERM came before")
"""Messages of a stop before the training listens: of `slurm.job.srun_task`, `slurm.local.stages`, earlier versions."""
_NO_PROGRAM = "error: execve(): "
"""In the log of a process whose program could not be started."""
_CORE = " (core dumped)"
_SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}
"""By what the C library calls them, as srun does."""


@dataclass(frozen=True)
class FailedProcess:
    """A process that has not ended well."""

    rank: int
    code: int
    """Exit code, or minus the signal that ended it."""
    time: float
    """Time at which that was noticed, in seconds since 1970."""
    record: ErrorRecord | None
    """What it left, if anything."""
    detail: str = ""
    """Description of its end, where srun's words tell more than the code."""

    @property
    def consequence(self) -> bool:
        """True if it failed because another one did, by its own record."""
        return self.record is not None and self.record.consequence

    @property
    def order(self) -> tuple[float, bool, int]:
        """The earliest comes first; an abort may be how a connection was lost."""
        return (self.record.time if self.record else self.time, self.code == -signal.SIGABRT, self.rank)

    @property
    def words(self) -> str:
        """Description of its end, where it has left no message."""
        if self.detail or self.code >= 0:
            return self.detail or f"ended with exit code {self.code} and left no message"
        hint = ""
        if self.code == -signal.SIGKILL:
            hint = (
                "; if no user did that, it was most likely the kernel, because the memory of the machine was full "
                "(`dmesg` shows it): lower train.micro_batch_size or use fewer processes"
            )
        return f"was killed by {signal.Signals(-self.code).name}{hint}"


def causes(ended: Sequence[FailedProcess]) -> list[FailedProcess]:
    """Those that no other one explains.

    Stops are among them only if nothing failed, and what followed from other failures only if no cause is known.
    """
    found = [each for each in ended if not each.consequence] or list(ended)
    return [each for each in found if each.code != EXIT_STOPPED] or found


def first_of(found: Sequence[FailedProcess]) -> FailedProcess:
    """The earliest of some causes, or rank 0 where all have come to the same end."""
    first = min(found, key=lambda each: each.order)
    zero = next((each for each in found if each.rank == 0), first)
    if zero.record and first.record and zero.code == first.code:
        # Rank 0 has told it. Of what is refused, like a damaged dataset, each rank may have met another piece: one is
        # enough.
        alike = zero.record.message == first.record.message or first.code in (EXIT_STOPPED, EXIT_REFUSED)
        return zero if alike else first
    return first


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in a launch."""

    rank: int | None
    """None where it was no process: a node, or the step as a whole."""
    node: str | None
    code: int
    """As in `pipeline.common.errors`."""
    message: str
    """One line."""
    details: str
    """The rest of the message and the traceback, or the end of the log; may be empty."""
    time: float | None = None
    """In seconds since 1970, where that is known."""
    signal: str | None = None
    """Name of the signal that ended the process."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that srun found gone, whatever was first."""
    silent: bool = False
    """Nothing is known but the exit code."""

    @property
    def words(self) -> str:
        """Rank, node and message, in a line."""
        if self.rank is None:
            return self.message
        return f"rank {self.rank}{f' on {self.node}' if self.node else ''}: {self.message}"


def first_failure(
    run_logs: Path, launch_nodes: Sequence[str], processes_per_node: int, srun_log: str = ""
) -> Failure | None:
    """The first failure of a launch, and not what followed from it; None without one. A stop (75) does not count.

    A rank that wrote down why it failed is believed. Of those that could not (killed, out of memory, lost with their
    node) srun tells, without times: there the order of its lines counts.

    Args:
        run_logs: folder of the launch's logs.
        launch_nodes: in the order of the ranks.
        processes_per_node: ranks on each.
        srun_log: what srun wrote, text; "" where there was none.
    """
    srun = _read_srun(srun_log, launch_nodes)
    ended = _all_ended(_records(run_logs), srun)
    failure = _drilled(ended, srun, run_logs, launch_nodes, processes_per_node)
    failure = failure or _what_failed(ended, srun, run_logs, processes_per_node)
    if failure is None:
        return None
    if failure.rank is not None:
        place = failure.rank // processes_per_node
        # By its own word, if it left one: a step may order its nodes by the topology.
        own = (each.record.host for each in ended if each.rank == failure.rank and each.record)
        counted = launch_nodes[place] if place < len(launch_nodes) else None
        failure = replace(failure, node=next((host for host in own if host in launch_nodes), counted))
    return replace(failure, lost_nodes=srun.lost)


def _drilled(
    ended: Sequence[FailedProcess], srun: _Srun, run_logs: Path, nodes: Sequence[str], per_node: int
) -> Failure | None:
    """The kill of a drill if the launch ended by it, or what had failed before it; None without a drill."""
    drill = read_drill(run_logs)
    if drill is None or not drill.ranks or srun.lost:
        return None
    own = [each for each in ended if each.record and not each.consequence and each.code != EXIT_STOPPED]
    if earlier := [each for each in own if each.record and each.record.time < drill.time]:
        return _of_process(first_of(earlier), run_logs, per_node)
    killed = {each.rank for each in ended if each.record is None and each.code == -signal.SIGKILL} | {*srun.killed}
    if not nodes and not ended:  # one process of this machine, of which nothing else is known
        killed.add(0)
    if killed.isdisjoint(drill.ranks):
        return None
    rank = min(killed & {*drill.ranks})
    tail = rank_log(run_logs, rank, per_node).last_lines(TAIL)
    return Failure(rank, None, EXIT_OTHER, drill.words, "\n".join(tail), drill.time, signal.SIGKILL.name)


def _what_failed(ended: Sequence[FailedProcess], srun: _Srun, run_logs: Path, per_node: int) -> Failure | None:
    if srun.lost:  # then an abort is how a connection was lost
        ended = [each for each in ended if each.record or each.code != -signal.SIGABRT]
    recorded = {each.rank for each in ended}
    found = causes(_without_late_stops(ended))
    stops = bool(found) and found[0].code == EXIT_STOPPED
    # With a node that is lost the others are told to end: that is not why.
    if found and not found[0].consequence and not (stops and srun.lost):
        return None if stops else _of_process(first_of(found), run_logs, per_node)
    if srun.lost:
        what = f"node {srun.lost[0]} was lost" if len(srun.lost) == 1 else f"nodes {', '.join(srun.lost)} were lost"
        return Failure(None, srun.lost[0], EXIT_OTHER, what, "")
    why = srun.why or _why(rank_log(run_logs, 0, per_node).last_lines(TAIL))
    if found and not why:  # nothing is known but that connections were lost, and perhaps who could not say so any more
        silent = [each for each in srun.killed if each not in recorded]
        lost = FailedProcess(silent[0], -signal.SIGKILL, math.inf, None) if len(silent) == 1 else first_of(found)
        return _of_process(lost, run_logs, per_node)
    if found or srun.from_outside:
        return Failure(None, None, EXIT_OTHER, f"the processes were ended from outside ({why or 'scancel'})", "")
    return Failure(None, None, EXIT_OTHER, f"srun: {srun.other}", "") if srun.other else None


def stopped(run_logs: Path, srun_log: str = "") -> bool:
    """True if the processes of a launch were asked to stop, saved and exited: some did, and none of them failed.

    Args:
        run_logs: folder of the launch's logs.
        srun_log: what srun wrote, text: of processes that could not leave a record.
    """
    ended = _without_late_stops(_all_ended(_records(run_logs), _read_srun(srun_log, ())))
    codes = {each.code for each in ended if each.record and not each.consequence}
    codes |= {EXIT_STOPPED} & {each.code for each in ended if not each.record}
    return codes == {EXIT_STOPPED}


def _without_late_stops(ended: Sequence[FailedProcess]) -> list[FailedProcess]:
    """Without stops that came of a failure: srun tells the others to end, by SIGTERM, while they import torch, say."""
    failures = [each.record.time for each in ended if each.record and each.code != EXIT_STOPPED]
    stops = [each for each in ended if each.code == EXIT_STOPPED]
    late = bool(failures) and all(
        each.record and each.record.time >= min(failures) and each.record.message.startswith(_TOLD_EARLY)
        for each in stops
    )
    return [each for each in ended if each.code != EXIT_STOPPED] if late else list(ended)


def gather_errors(folder: Path) -> None:
    """Put what the ranks of each node have left into one file, when the launch has ended."""
    files = sorted(folder.glob(f"node-*.{ERRORS}"))
    with suppress(OSError):  # on a full disk they stay as they are
        if files:
            storage.put(folder / ERRORS, b"".join(file.read_bytes() for file in files))
        for file in files:
            links.remove(file)


def interrupted(run_logs: Path, srun_log: str) -> bool:
    """True if a process was signalled to end, however the others ended; for a step in which none ends the others."""
    codes = {record.code for record in _records(run_logs).values()}
    codes |= {event.code for event in _read_srun(srun_log, ()).events}
    return not codes.isdisjoint((EXIT_STOPPED, -signal.SIGTERM, -signal.SIGHUP))


def _records(folder: Path) -> dict[int, ErrorRecord]:
    """Error records, by rank."""
    found: dict[int, ErrorRecord] = {}
    try:
        with os.scandir(folder) as entries:  # of thousands of ranks: no look at what is not asked for
            for entry in entries:
                name = _ERROR_FILE.match(entry.name)
                if name and (record := read_error(Path(entry.path))) is not None:
                    found[int(name[1])] = record
                elif entry.name.endswith(ERRORS):
                    found |= read_errors(Path(entry.path))
    except OSError:
        return {}
    return found


@dataclass(frozen=True)
class _Event:
    """A line of srun's about processes that ended on their own."""

    ranks: tuple[int, ...]
    code: int
    detail: str


@dataclass(frozen=True)
class _Srun:
    """The parsed output of srun."""

    events: tuple[_Event, ...]
    lost: tuple[str, ...]
    killed: tuple[int, ...]
    """Ranks of which it told that they were killed when it was ending them all: by it, or before."""
    from_outside: bool
    """Processes were ended from outside."""
    why: str
    """Reason for the cancellation of the step, in SLURM's words; "" without one."""
    other: str
    """The last of its errors that are about no process."""


def _read_srun(text: str, nodes: Sequence[str]) -> _Srun:
    events: list[_Event] = []
    lost: list[str] = []
    killed: list[int] = []
    other, ending, from_outside = "", False, False
    for line in text.splitlines():
        if found := _TASKS.match(line):
            ranks = tuple(map(int, numbers_in(found["tasks"].strip("[]"))))
            code, detail = _code_of(found["how"])
            if ending and code in (-signal.SIGTERM, -signal.SIGKILL) and not detail:
                from_outside = True
                killed += ranks if code == -signal.SIGKILL else ()
            else:
                events.append(_Event(ranks, code, detail))
        elif found := _NOT_STARTED.match(line):
            events.append(_Event((int(found["task"]),), EXIT_OTHER, f"was not started: {found['why']}"))
        elif found := _NODE_LOST.match(line):
            names = _names(found["nodes"])
            lost += [node for node in nodes if node in names] or [found["nodes"]]
            ending = True
        elif _ENDING.search(line):
            ending = True
        elif found := _OTHER.match(line):
            other = found["what"]
    return _Srun(tuple(events), tuple(dict.fromkeys(lost)), tuple(killed), from_outside, _why(text.splitlines()), other)


def _why(lines: Sequence[str]) -> str:
    """Reason for the cancellation of the step, if a line has one."""
    reasons = (found["why"] for line in lines if (found := _CANCELLED.search(line)))
    return next((reason.lower() for reason in reasons if reason), "")


def _code_of(how: str) -> tuple[int, str]:
    """Exit code or minus signal, and words that tell more than it."""
    number = _SIGNALS.get(how.removesuffix(_CORE))
    if found := _EXIT_CODE.match(how):
        code = int(found["code"])
        # What a shell or container makes of a signal.
        number = next((each for each in signal.valid_signals() if each == code - 128), None)
        if number is None:
            return code, ""
    if how == _OUT_OF_MEMORY:
        return -signal.SIGKILL, _NO_MEMORY
    if number == signal.SIGUSR2:
        # It announces the end of the job, and ends only a process that has not come to its first line yet.
        return EXIT_STOPPED, ""
    return (-number, "") if number else (EXIT_OTHER, f"ended: {how}")


def _names(compact: str) -> set[str]:
    """`n[08-10],m1` -> n08, n09, n10, m1."""
    found = set()
    for name, numbers in re.findall(r"([^\[,]+)(?:\[([^\]]*)\])?", compact):
        if not numbers:
            found.add(name)
        found |= {f"{name}{number}" for number in numbers_in(numbers)}
    return found


def _all_ended(records: Mapping[int, ErrorRecord], srun: _Srun) -> list[FailedProcess]:
    """Processes that have not ended well. One without a record came after those that srun told of before it."""
    found = [FailedProcess(rank, record.code, record.time, record) for rank, record in records.items()]
    clock = 0.0
    for event in srun.events:
        clock = max([clock, *(records[rank].time for rank in event.ranks if rank in records)])
        # An abort is so often how a process loses a connection that all others come before it.
        time = math.inf if event.code == -signal.SIGABRT else math.nextafter(clock, math.inf)
        found += [
            FailedProcess(rank, event.code, time, None, event.detail) for rank in event.ranks if rank not in records
        ]
    return found


def _of_process(ended: FailedProcess, run_logs: Path, per_node: int) -> Failure:
    """In words; its node is not known here."""
    name = signal.Signals(-ended.code).name if ended.code < 0 else None
    code = ended.code if ended.code > 0 else EXIT_OTHER
    if ended.record is not None:
        message, _, more = ended.record.message.partition("\n")
        details = "\n".join(filter(None, [more, ended.record.traceback.rstrip()]))
        return Failure(ended.rank, None, code, message, details, ended.record.time, name)
    tail = rank_log(run_logs, ended.rank, per_node).last_lines(TAIL)
    words = ended.words
    if missing := [why for line in tail if (why := line.partition(_NO_PROGRAM)[2])]:
        # What slurmstepd leaves with then is not a code of ours.
        code, words = EXIT_OTHER, f"was not started: {missing[0]}"
    silent = not ended.detail and not missing and ended.code > 0
    return Failure(ended.rank, None, code, words, "\n".join(tail), None, name, silent=silent)
