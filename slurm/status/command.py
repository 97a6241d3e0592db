"""`pipeline status`: how runs are, from their files and one question to the scheduler."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live

from pipeline.common.console import say, verbatim
from pipeline.common.errors import UserError
from pipeline.common.format import when
from pipeline.config import Config
from pipeline.config.load import load_run
from slurm import jobs, scheduler
from slurm.record import sweep_folder
from slurm.scheduler import Accounted, SchedulerError
from slurm.status.files import RunSnapshot, is_run
from slurm.status.queued import SchedulerSnapshot
from slurm.status.run import RunStatus, describe
from slurm.status.show import picture, show

_EVERY = 5.0
"""Seconds between pictures."""
_ASK_EVERY = 30.0
"""Seconds between questions to the scheduler while runs are watched and their files have nothing new."""
_SQUEUE, _SACCT = 6.0, 3.0
"""Seconds that the scheduler and its accounting are waited for."""
_RUNS = Path("runs")
_DEEP = 3
"""Levels of folders in which runs are looked for."""


def show_status(runs: Sequence[Path], console: Console, *, watch: bool = False, as_json: bool = False) -> None:
    """Print how runs are; nothing is changed.

    Args:
        runs: run files or folders, also those of sweeps, for all their runs; by default the current folder if it is
            one of a run or sweep, else all below ./runs.
        console: where to.
        watch: again and again, until Ctrl-C.
        as_json: one JSON object, with all digits; with `watch` one a line.

    Raises:
        UserError: one of them does not exist, or there is none.
    """
    named = _named(runs)
    ask = _RememberedAnswer() if watch else _query_scheduler
    try:
        on_screen = watch and console.is_terminal and not as_json
        with Live(console=console, auto_refresh=False) if on_screen else nullcontext() as live:
            while True:
                folders = named or _found()
                found = status(folders, spent=as_json or len(folders) == 1, ask=ask)
                if live is not None:
                    live.update(picture(found, console), refresh=True)
                elif as_json:
                    value = {"runs": [each.to_json() for each in found]}
                    verbatim(console, json.dumps(value, indent=None if watch else 2, ensure_ascii=False))
                else:
                    if watch:
                        say(console, when(time.time()))
                    show(found, console)
                if not watch:
                    return
                time.sleep(_EVERY)
    except KeyboardInterrupt:
        if not watch:
            raise


def status(
    folders: Mapping[Path, Config | None],
    *,
    spent: bool = True,
    ask: Callable[[Sequence[RunSnapshot]], SchedulerSnapshot] | None = None,
) -> list[RunStatus]:
    """Status of runs; the scheduler is asked once for all of them.

    Args:
        folders: of the runs, with the run file where that was named.
        spent: whether the goodput is wanted.
        ask: has the scheduler's answer about the jobs of runs.
    """
    facts = [RunSnapshot(folder, config) for folder, config in folders.items()]
    snapshot = (ask or _query_scheduler)(facts)
    return [describe(each, snapshot, spent=spent) for each in facts]


class _RememberedAnswer:
    """The scheduler's answer, asked for again after a while, or when the files of the runs have something new."""

    def __init__(self) -> None:
        self._about: object = None
        self._time = 0.0
        self._snapshot = SchedulerSnapshot({})

    def __call__(self, facts: Sequence[RunSnapshot]) -> SchedulerSnapshot:
        about = [
            (each.run, each.questions(), each.cancelled, [(x.key, x.end) for x in each.launches]) for each in facts
        ]
        if about != self._about or time.monotonic() - self._time >= _ASK_EVERY:
            self._snapshot, self._about, self._time = _query_scheduler(facts), about, time.monotonic()
        return self._snapshot


def _named(runs: Sequence[Path]) -> dict[Path, Config | None]:
    found: dict[Path, Config | None] = {}
    beside = None
    for run in runs:
        path = Path(os.path.abspath(run))
        members = sweep_folder.runs_of(path.parent)
        if path in members:
            found[path] = None
        elif members:
            beside = path  # `SWEEP/*` has its notes, jobs and results, too
        elif path.is_dir():
            found.update(dict.fromkeys(sweep_folder.runs_of(path) or [path]))
        else:
            config = load_run(run)
            found[config.run.dir] = config
    if beside is not None and not found:
        raise UserError(f"{beside} is not a run of the sweep; `pipeline status {beside.parent}` shows them")
    return found


def _found() -> dict[Path, None]:
    here = Path.cwd()
    if is_run(here):
        return {here: None}
    found = sweep_folder.runs_of(here)
    for folder, below, _ in os.walk(here / _RUNS):
        path = Path(folder)
        if is_run(path):
            found.append(path)
        for sweep in sweep_folder.sweeps_of(path):
            found += sweep_folder.runs_of(sweep)
        # What else is inside of a run is its own: data, checkpoints.
        if is_run(path) or len(path.relative_to(here).parts) > _DEEP:
            below.clear()
        below[:] = [name for name in below if name != sweep_folder.SWEEPS]
    if not found:
        raise UserError(
            f"there is no run in {here / _RUNS}, and {here} is not one itself; name run files or run folders, like "
            "`pipeline status RUN.yaml`"
        )
    return dict.fromkeys(sorted(found))


def _query_scheduler(facts: Sequence[RunSnapshot]) -> SchedulerSnapshot:
    """Answer of the scheduler about the jobs of all runs together."""
    numbers = sorted({number for each in facts for number in each.questions()})
    if not numbers:
        return SchedulerSnapshot({})
    try:
        own = [number for each in facts for job in each.sent if job.user == jobs.user() for number in job.numbers]
        states = scheduler.jobs(numbers, own=own, seconds=_SQUEUE)
    except ValueError as error:  # the command failed, or a line of its output has another form
        return SchedulerSnapshot(None, problem=_short("squeue", error))
    gone = sorted({number for each in facts for number in _to_account(each) if number not in states})
    if not gone or shutil.which("sacct") is None:
        return SchedulerSnapshot(states)
    accounted: dict[str, Accounted] = {}
    problem = None
    try:
        accounted = scheduler.accounting(gone, seconds=_SACCT)
    except ValueError as error:
        problem = _short("sacct", error)
    return SchedulerSnapshot(states, accounted, problem)


def _to_account(facts: RunSnapshot) -> list[str]:
    """Jobs of sites with accounting that may have ended without a word."""
    found = []
    for job in facts.open_jobs():
        submission = facts.submission(job)
        if job.where == "slurm" and (submission is None or submission.site.has_sacct):
            found += job.numbers
    return found


def _short(program: str, error: ValueError) -> str:
    """The first line of what a command of SLURM said, or of why its output cannot be read."""
    output = error.output if isinstance(error, SchedulerError) else str(error)
    return f"{program}: {output.partition(chr(10))[0].removeprefix(f'{program}: ')}"
