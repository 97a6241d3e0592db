"""Following the log of a rank across the launches of a run, until nothing more comes."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from pipeline.common.console import say, visible_log
from pipeline.common.run_files import RunFiles
from pipeline.train.run.lock import is_held
from slurm import jobs
from slurm.logs.parts import LogPart, parts
from slurm.record import active_jobs
from slurm.record.active_jobs import ActiveJob
from slurm.record.launch_log import Launch, launches
from slurm.record.live_jobs import LiveJobs, live_jobs
from slurm.record.tail import Tail, Tails

_POLL = 0.3
"""Seconds between looks at files."""
_ASK = 15.0
"""Seconds between questions to the scheduler, where files say nothing."""


def follow_logs(run: Path, part: LogPart | None, rank: int, tail: Tails | None, console: Console) -> None:
    """Write what comes, until the run has ended for good.

    Args:
        run: folder.
        part: what was shown; None if nothing began yet.
        rank: whose log.
        tail: of what was shown, where there is a log.
        console: where to.
    """
    following = _Following(run, rank, console)
    launch = part.launch if part else None
    if part is not None and part.launch is None:
        if tail is not None:
            following.by_hand(tail)
        if not following.sent_since(part.begin):
            return
        launch = following.last_before(part.begin)
    elif launch is not None and tail is not None:
        following.launch(launch, tail)
    while (launch := following.next_after(launch)) is not None:
        following.begin(launch)


def write_out(tail: Tail | Tails, console: Console) -> bool:
    """Print all that has come, which any program may have written. Returns whether that was anything."""
    some = False
    while text := tail.read():
        console.file.write(visible_log(text))
        some = True
    if some:
        console.file.flush()
    return some


class _Following:
    def __init__(self, run: Path, rank: int, console: Console) -> None:
        self._run = run
        self._rank = rank
        self._console = console
        self._launches = _Launches(run)
        self._asked = 0.0
        self._last_message = ""

    def by_hand(self, tail: Tails) -> None:
        """Follow a training by hand, until nobody trains any more."""
        while True:
            left = is_held(self._run)
            write_out(tail, self._console)
            if not left:
                say(self._console, "==> the training has ended")
                return
            time.sleep(_POLL)

    def sent_since(self, time: float) -> bool:
        """True if the run was submitted after a time, in seconds since 1970."""
        return any(job.time > time for job in jobs.sent(self._run))

    def last_before(self, time: float) -> Launch | None:
        """The last launch that began before a time."""
        return next((launch for launch in reversed(self._launches.all()) if launch.time < time), None)

    def begin(self, launch: Launch) -> None:
        """Follow one from its first line on."""
        part = next((part for part in parts(self._run) if part.launch == launch), None)
        if part is None:
            return
        say(self._console, f"==> {part.words}")
        log = part.log(self._rank)
        if log is not None:
            say(self._console, f"==> {log.path}")
            self.launch(launch, log.tail())

    def launch(self, launch: Launch, tail: Tails) -> None:
        """Follow a launch until it has ended, and print the reason."""
        quiet = time.monotonic()
        while True:
            now, after = self._launches.find(launch)
            # The end is noted when all has been written; so what is read after it is complete.
            over = now.end is not None or self._is_gone(launch, after, quiet)
            if write_out(tail, self._console):
                quiet = time.monotonic()
            if over:
                break
            time.sleep(_POLL)
        tail.close()
        now, _ = self._launches.find(launch)  # its end may have been noted while the scheduler was asked
        why = now.end.reason if now.end else "no reason was recorded; it was killed, or its node was lost"
        say(self._console, f"==> ended: {why}")

    def _is_gone(self, launch: Launch, after: Launch | None, quiet: float) -> bool:
        """True if a launch of which no end was noted runs no more.

        Other jobs of the run may launch meanwhile, such as evaluations: only its own job tells. The scheduler is asked
        after some time without a line, or when another job has launched the stage again.
        """
        if self._launches.is_repeated(launch):
            return True
        now = time.monotonic()
        if now < self._asked + _ASK or (after is None and now < quiet + _ASK):
            return False
        self._asked = now
        found = live_jobs(self._run)
        if any(_is_of(each, launch) for each in found.active):
            return False
        if found.unknown is None and all(job.job != launch.job for job in found.elsewhere):
            return True
        # Nobody here can know it. Evaluations and tasks of an array run beside one another, as nothing else does.
        return after is not None and launch.stage != "eval" and launch.job.isdecimal()

    def next_after(self, launch: Launch | None) -> Launch | None:
        """The next launch, when it begins; None if there will be none."""
        asked: float | None = None
        pause, self._last_message = _ASK, ""
        while True:
            now, after = self._launches.find(launch) if launch else (None, self._launches.first())
            if after is not None:
                return after
            ended = now.end if now is not None else None
            if ended is not None and ended.next == "end" and not self.sent_since(ended.time):
                return None
            if asked is None or time.monotonic() > asked + pause:
                asked = time.monotonic()
                found = live_jobs(self._run)
                pause = _ASK if any(each.job.where == "slurm" for each in found.active) else 1.0
                # Once more, since one may have begun and ended meanwhile.
                if found.nothing and (self._launches.find(launch)[1] if launch else self._launches.first()) is None:
                    self._say_over(now)
                    return None
                self._print_waiting(found)
            time.sleep(_POLL)

    def _print_waiting(self, found: LiveJobs) -> None:
        """Print which jobs are waited for, when these change."""
        if found.unknown is not None:
            text = f"{found.unknown}; only the files of the run are looked at"
        else:
            text = "; ".join(active_jobs.describe(self._run, each) for each in found.active)
        numbers = text if found.unknown else " ".join(each.job.job for each in found.active)
        if text and numbers != self._last_message:
            self._last_message = numbers
            say(self._console, f"==> waiting for the next launch: {text}")

    def _say_over(self, launch: Launch | None) -> None:
        if launch is None or launch.end is None or launch.end.next != "done":
            say(self._console, "==> no job of the run waits or runs any more")
            self._show_jobs()

    def _show_jobs(self) -> None:
        """Those that have launched nothing."""
        for job in jobs.sent(self._run)[-1:]:
            known = {launch.job for launch in self._launches.all()}
            if (log := job.log(self._run)).exists() and not known & set(job.numbers):
                say(self._console, f"==> {log}")
                write_out(Tail(log), self._console)


def _is_of(active: ActiveJob, launch: Launch) -> bool:
    """True if a launch is one of a job that waits or runs; of an array, of a task that does."""
    if active.job.where == "local":
        return active.job.job == launch.job
    return any(state.job == launch.job for state in active.states)


class _Launches:
    """The launches of a run, read again only when the ledger has grown."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: tuple[int, int] | None = None
        self._found: list[Launch] = []

    def all(self) -> list[Launch]:
        """In the order in which they began."""
        try:
            state = RunFiles(self._run).ledger.stat()
        except OSError:
            return self._found
        if (seen := (state.st_size, state.st_mtime_ns)) != self._seen:
            self._seen, self._found = seen, launches(self._run)
        return self._found

    def first(self) -> Launch | None:
        """The first one, if any."""
        return next(iter(self.all()), None)

    def is_repeated(self, launch: Launch) -> bool:
        """True if its job has launched something after it, which a job does only when the launch before has ended."""
        return any(each.job == launch.job and each.key > launch.key for each in self.all())

    def find(self, launch: Launch) -> tuple[Launch, Launch | None]:
        """A launch as it is now, and what came after it: of its stage, or of any where it was the last of its own.

        One without an end may still run beside what came after it.
        """
        everything = self.all()
        keys = [each.key for each in everything]
        place = keys.index(launch.key)
        now, later = everything[place], everything[place + 1 :]
        ended = now.end
        if ended is None:
            return now, next((each for each in later if each.stage == now.stage), None)
        if ended.next == "done":
            return now, next((each for each in later if each.end is None or each.time >= ended.time), None)
        return now, next((each for each in later if each.stage == now.stage), None)
