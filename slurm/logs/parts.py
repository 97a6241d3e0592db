"""Logs of a run: a part for each launch by a job, and for each time that it was trained by hand."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.format import when
from pipeline.common.run_files import RunFiles
from pipeline.train.run.attempts import Attempt, attempts
from slurm import jobs
from slurm.jobs import Stage, stage_words
from slurm.record.launch_log import Launch, launches
from slurm.record.rank_logs import STAMP, RankLog, rank_log

_BY_HAND = re.compile(r"^(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(-eval)?(?:\.\d+)?$")
"""A folder that `pipeline train` or `pipeline eval` makes for its ranks from 1 on."""
_SLACK = 1.0
"""Seconds: names of folders have whole ones."""


@dataclass(frozen=True)
class LogPart:
    """A launch, or a training that was started by hand."""

    stage: Stage
    begin: float
    """In seconds since 1970, like `end`."""
    end: float | None
    launch: Launch | None
    """None: by hand."""
    attempts: tuple[Attempt, ...]
    """What the training calls it; several where it went back and on by itself."""
    folder: Path | None
    """Logs of the launch; rank 0 of one by hand has the terminal."""
    ranks: Path | None
    """Logs of ranks from 1 on, where the processes were started on one machine."""
    is_job: bool = False
    """The launch is of a job of SLURM, also where it has no nodes of its own."""

    def log(self, rank: int) -> RankLog | None:
        """The log of a rank, which may not be there yet."""
        if rank and self.ranks is not None:
            return rank_log(self.ranks, rank)
        per_node = self.launch.processes_per_node if self.launch and self.launch.nodes else 1
        return None if self.folder is None else rank_log(self.folder, rank, per_node)

    @property
    def words(self) -> str:
        """Description: stage, attempts, job, nodes, time."""
        numbers = [attempt.number for attempt in self.attempts]
        text: list[str] = [stage_words(self.stage)]
        if numbers:
            text.append(f"attempt {numbers[0]}" if len(numbers) == 1 else f"attempts {numbers[0]}-{numbers[-1]}")
        if self.launch is None:
            host = f" on {self.attempts[-1].host}" if self.attempts else ""
            text.append(f"by hand{host}")
        else:
            launch = self.launch
            again = f" (restart {launch.restarts})" if launch.restarts else ""
            count = f", launch {launch.number}" if launch.number > 1 else ""
            nodes = ", ".join(launch.nodes) or launch.host
            text.append(f"{'job' if self.is_job else 'process'} {launch.job}{again}{count} on {nodes}")
        until = "" if self.end is None else f" to {when(self.end)}"
        return f"{', '.join(text)}, from {when(self.begin)}{until}"


def parts(run: Path) -> list[LogPart]:
    """All of them, in the order in which they began."""
    launched, tries, folders = launches(run), attempts(run), list(_by_hand(run))
    of_slurm = {number for job in jobs.sent(run) if job.where == "slurm" for number in job.numbers}
    found = []
    for launch in launched:
        begin, end = launch.time - _SLACK, _end(launch, launched)
        own = tuple(each for each in tries if begin <= each.begin <= end and _is_of(each, launch))
        mine = [] if launch.nodes else [each for each in folders if each.stage == launch.stage]
        ranks = [each.path for each in mine if begin <= each.begin <= end]
        tries = [each for each in tries if each not in own]
        folders = [each for each in folders if each.path not in ranks]
        last = launch.end.time if launch.end else None
        place = ranks[-1] if ranks else None
        is_job = bool(launch.nodes) or launch.job in of_slurm
        found.append(LogPart(launch.stage, launch.time, last, launch, own, run / launch.logs, place, is_job))
    for group in _by_process(tries):
        begin, last = group[0].begin, group[-1].end
        until = math.inf if last is None else last
        ranks = [each.path for each in folders if each.stage == "train" and begin - _SLACK <= each.begin <= until]
        folders = [each for each in folders if each.path not in ranks]
        found.append(LogPart("train", begin, last, None, group, None, ranks[0] if ranks else None))
    found += [LogPart(each.stage, each.begin, None, None, (), None, each.path) for each in folders]
    return sorted(found, key=lambda part: part.begin)


def _end(launch: Launch, launched: list[Launch]) -> float:
    """Latest time at which a launch can have ended."""
    if launch.end is not None:
        return launch.end.time
    later = [each.time for each in launched if each.job == launch.job and each.time > launch.time]
    return min(later, default=math.inf)


def _is_of(attempt: Attempt, launch: Launch) -> bool:
    """True if an attempt that began in the time of a launch belongs to it."""
    if launch.stage != "train":
        return False
    # A task of an array, and a local job, are called otherwise than what the training sees.
    named = attempt.job is not None and launch.job.isdecimal() and launch.nodes
    return not named or (attempt.job, attempt.restarts) == (launch.job, launch.restarts)


def _by_process(tries: list[Attempt]) -> list[tuple[Attempt, ...]]:
    """Attempts that one process made after another, going back by itself, are one training."""
    found: dict[tuple[str, int], list[Attempt]] = {}
    for each in tries:
        found.setdefault((each.host, each.pid), []).append(each)
    return [tuple(group) for group in found.values()]


@dataclass(frozen=True)
class _ByHand:
    """Logs of ranks that a command has started here."""

    stage: Stage
    begin: float
    path: Path


def _by_hand(run: Path) -> Iterator[_ByHand]:
    with suppress(OSError):
        for path in sorted(RunFiles(run).logs.iterdir()):
            if name := _BY_HAND.match(path.name):
                begin = time.mktime(time.strptime(name[1], STAMP))
                yield _ByHand("eval" if name[2] else "train", begin, path)
