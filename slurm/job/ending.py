"""The end of the processes of a launch: by their own records where there are some, else by what srun and logs say."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from pipeline.common import storage
from pipeline.common.errors import (
    AGREED_CODES,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OTHER,
    EXIT_STOPPED,
    EXIT_UNHEALTHY,
    UserError,
)
from pipeline.common.run_files import RunFiles
from slurm.job.allocation import Allocation
from slurm.job.srun_step import SrunStep
from slurm.record.failure_analysis import first_failure, stopped
from slurm.record.launch_log import Launch
from slurm.record.rank_logs import log_file
from slurm.record.tail import last_lines

SRUN_LINES = 10_000
"""Last lines of srun's own output that are read."""
_REASONS = 3
"""Unhealthy nodes whose reasons an end names; the job's own log names all."""
ExitFile = tuple[int, int, bytes]
"""Inode, time and content of `exit.json`: each is a new file."""


@dataclass(frozen=True)
class Ending:
    """The end of the processes of a launch."""

    code: int
    reason: str
    rank: int | None = None
    """The process that failed first."""
    node: str | None = None
    """Node of this rank."""
    failed_nodes: tuple[str, ...] = ()
    agreed: bool = False
    """All ranks came to it together; a rank alone may have been told to end because another one had failed."""


def too_few_nodes(allocation: Allocation, needed: int) -> Ending:
    """The end of a launch for which too few nodes can be used, with what was found on them."""
    down = allocation.down()
    text = f"of the job's nodes {', '.join(down)} cannot be used, and {needed} {'is' if needed == 1 else 'are'} needed"
    reasons = [f"{node}: {'; '.join(why)}" for node in down if (why := allocation.unhealthy.get(node))]
    if (more := len(reasons) - _REASONS) > 0:
        reasons[_REASONS:] = [f"and {more} more"]
    return Ending(EXIT_UNHEALTHY, ": ".join(filter(None, (text, "; ".join(reasons)))), failed_nodes=tuple(down))


def judge(
    run: Path,
    step: SrunStep,
    status: int,
    launch: Launch,
    state: Ending | None,
    *,
    lost: tuple[str, ...] = (),
    signals: Collection[int] = (),
    stop: signal.Signals | None = None,
) -> Ending:
    """The end of processes that have not agreed on it: their own records count more than srun's exit code.

    Args:
        run: folder.
        step: the processes.
        status: exit code of srun, or of the process.
        launch: of which they were.
        state: `exit_state`.
        lost: nodes of the step that are down.
        signals: that were handed on to a process of this machine.
        stop: a signal by which a user has stopped the step of a command.
    """
    srun = "\n".join(last_lines(step.srun_output, SRUN_LINES))
    failure = first_failure(step.logs, launch.nodes, launch.processes_per_node, srun)
    # Of a rank whose disk was full nothing is known but its code; rank 0 has room in which it notes its end.
    if failure is not None and failure.silent and failure.rank == 0 and state and state.code == failure.code:
        return replace(state, rank=0, node=failure.node, failed_nodes=lost)
    if stop is not None and state is None and status != EXIT_OK:
        # What does not listen yet, and an evaluation, which has nothing to save, die of the signal.
        if step.submission.stage != "train":
            code = EXIT_INTERRUPTED if stop == signal.SIGINT else EXIT_STOPPED
            return Ending(code, f"received {stop.name}; nothing of this evaluation is kept")
        if failure is None or failure.signal == signal.SIGTERM.name:
            return Ending(EXIT_STOPPED, f"received {stop.name} before training began")
    if failure is not None:
        return Ending(failure.code, failure.words, failure.rank, failure.node, lost)
    if state is not None:
        return replace(state, failed_nodes=lost)
    # A process of this machine may not have listened yet to what was handed on to it.
    if stopped(step.logs, srun) or (not step.nodes and -status in signals):
        return Ending(EXIT_STOPPED, "it was stopped; what was committed is kept")
    if status == EXIT_OK and not lost:
        return Ending(EXIT_OK, "done")
    ends = "\n".join(last_lines(step.srun_output if step.nodes else log_file(step.logs, 0), 3))
    last = "; ".join(ends.splitlines()[-3:])  # a progress bar is a line without line feeds
    text = f"{'srun' if step.nodes else 'the process'} exited with {status}: {last or 'no message'}"
    if full := storage.cannot_write(run):
        text += f"; the run folder cannot be written ({full}), so more could not be recorded: make room on its disk"
    known = status > 0 and (not step.nodes or status in AGREED_CODES)
    return Ending(status if known else EXIT_OTHER, text, failed_nodes=lost)


def read_exit_file(run: Path) -> ExitFile | None:
    """`exit.json` of a run; None without one.

    Opening it asks the server of a network file system, where `stat` may be answered from memory.
    """
    with suppress(OSError, UserError), storage.open_regular(RunFiles(run).exit) as file:
        stat = os.fstat(file.fileno())
        return stat.st_ino, stat.st_mtime_ns, file.read()
    return None


def exit_state(run: Path, before: ExitFile | None, attempt: int) -> Ending | None:
    """The end that training has noted in a launch, if it has.

    Args:
        run: folder.
        before: `read_exit_file` at the start of the launch: a start that is refused has the next number and does not
            count, so the number alone does not tell.
        attempt: the last one before the launch.
    """
    found = read_exit_file(run)
    if found is not None and found != before:
        with suppress(ValueError, KeyError, TypeError):
            state = orjson.loads(found[2])
            if state["attempt"] > attempt:
                return Ending(int(state["code"]), str(state["reason"]), agreed=bool(state["agreed"]))
    return None
