"""`pipeline logs`: what the processes of a run wrote, of any launch and rank, and which of them failed first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.common.console import say, verbatim
from pipeline.common.errors import UserError
from slurm import jobs
from slurm.logs.follow import follow_logs, write_out
from slurm.logs.parts import LogPart, parts
from slurm.record import active_jobs
from slurm.record.failure_analysis import Failure, first_failure
from slurm.record.job_log import own_error
from slurm.record.rank_logs import srun_log
from slurm.record.tail import Tail, Tails, last_lines
from slurm.run_argument import run_folder

_SRUN_LINES = 10_000
"""Last lines of srun's own output that are read."""


def show_logs(
    run: Path,
    console: Console,
    *,
    follow: bool,
    rank: int | None,
    attempt: int | None,
    first_error: bool,
    lines: int,
) -> None:
    """Show the log of a rank, or the first failure.

    Args:
        run: run file or folder.
        console: where to.
        follow: go on with what comes, in later launches, too, until the run ends.
        rank: whose; by default rank 0.
        attempt: of the training; by default the newest launch of any stage.
        first_error: the first process that failed instead.
        lines: number of last lines; 0: all.

    Raises:
        UserError: there is no such run, attempt or rank.
    """
    folder = run_folder(run)
    found = parts(folder)
    if attempt is not None:
        found = _of_attempt(found, attempt)
    if first_error:
        if attempt is not None:
            _show_first_error(found, console)
        elif not _show_refused_job(folder, found, console):
            newest = _newest_start(folder, found)
            _show_first_error(newest, console, [part for part in found if part not in newest])
        return
    if not found:
        if not follow or not jobs.sent(folder):
            _show_jobs(folder, console, lines)
            return
        follow_logs(folder, None, rank or 0, None, console)
        return
    tail = _show(found[-1], rank or 0, console, lines)
    if follow:
        follow_logs(folder, found[-1], rank or 0, tail, console)
    elif attempt is None:
        _print_later_jobs(folder, found[-1], console)


def _of_attempt(found: list[LogPart], number: int) -> list[LogPart]:
    for part in found:
        if any(each.number == number for each in part.attempts):
            return [part]
    numbers = [each.number for part in found for each in part.attempts]
    there = f"there are {min(numbers)} to {max(numbers)}" if numbers else "there is none yet"
    raise UserError(f"--attempt {number}: the run has no such attempt at training; {there}")


def _show(part: LogPart, rank: int, console: Console, lines: int) -> Tails | None:
    """The last lines of a rank's log; returns where to go on."""
    processes = _processes(part)
    if processes is not None and rank >= processes:
        there = "is only rank 0" if processes == 1 else f"are ranks 0 to {processes - 1:,}"
        raise UserError(f"--rank {rank}: in this launch ({part.words}) there {there}; name one of them")
    say(console, f"==> {part.words}")
    log = part.log(rank)
    if log is None:
        say(console, _in_the_terminal(part))
        return None
    missing = f"there is no log of rank {rank} yet: {log.path}"
    if part.end is not None:
        missing = f"rank {rank} wrote nothing before the launch ended: there is no {log.path}"
    say(console, f"==> {log.path}" if log.path.exists() else missing)
    how = part.launch.end if part.launch is not None else None
    if how is not None and how.reason and not log.path.exists():
        say(console, f"the end: {how.reason}")
    tail = log.tail(lines)
    write_out(tail, console)
    return tail


def _processes(part: LogPart) -> int | None:
    """Number of processes of its step; None where that is not known."""
    if part.attempts and (size := part.attempts[-1].layout.get("world_size")):
        return size
    return len(part.launch.nodes) * part.launch.processes_per_node if part.launch and part.launch.nodes else None


def _in_the_terminal(part: LogPart) -> str:
    text = "rank 0 of a training that was started by hand writes to its terminal, not to a log"
    if part.ranks is not None:
        text += f"; the logs of ranks from 1 on are in {part.ranks}: --rank 1"
    return text


def _print_later_jobs(run: Path, part: LogPart, console: Console) -> None:
    """Print the logs of later jobs: one that ended before it launched anything has the reason there."""
    for job in jobs.sent(run):
        log = job.log(run)
        if job.time > part.begin and log.exists():
            what = active_jobs.stage_names(run, job)
            say(console, f"job {job.job} ({what}) was sent later and has launched nothing so far: {log}")


def _show_jobs(run: Path, console: Console, lines: int) -> None:
    """Print the job's own log, where nothing was launched."""
    sent = jobs.sent(run)
    for job in reversed(sent):
        log = next((log for task in range(job.tasks) if (log := job.log(run, task)).exists()), None)
        if log is not None:
            what = active_jobs.stage_names(run, job)
            say(console, f"==> {what}: job {job.job} on its own; it has launched no processes")
            say(console, f"==> {log}")
            write_out(Tail(log, lines), console)
            return
    if sent:
        names = ", ".join(job.job for job in sent)
        say(console, f"there are no logs yet: jobs {names} have not begun (`pipeline status {run}`)")
    else:
        say(console, f"there are no logs in {run}: it was never submitted, nor trained on several processes")


def _show_refused_job(run: Path, found: list[LogPart], console: Console) -> bool:
    """Show the error of the newest job that ended on its own after the last launch; False if there is none."""
    began = found[-1].begin if found else 0.0
    launched = [part.launch for part in found if part.launch is not None]
    for job in reversed(jobs.sent(run)):
        error = own_error(run, job, [launch for launch in launched if launch.job in job.numbers])
        if error is None or error[1].stat().st_mtime < began:
            continue
        text, log = error
        say(console, f"==> {active_jobs.stage_names(run, job)}: job {job.job} on its own")
        verbatim(console, text)
        say(console, f"==> {log}")
        return True
    return False


def _newest_start(run: Path, found: Sequence[LogPart]) -> list[LogPart]:
    """Launches of the newest submission that has launched anything, or the newest training by hand."""
    by_job: dict[str, str] = {}
    first = ""
    for job in jobs.sent(run):
        # Jobs of a submission wait for each other, are of a chain, or evaluate checkpoints of it.
        if job.link == 1 and job.step is None and not set(job.after) & by_job.keys():
            first = job.job
        by_job |= dict.fromkeys([job.job, *job.numbers], first or job.job)

    def start(part: LogPart) -> object:
        return part.begin if part.launch is None else by_job.get(part.launch.job, part.launch.job)

    return [part for part in found if start(part) == start(found[-1])]


def _show_first_error(found: Sequence[LogPart], console: Console, earlier: Sequence[LogPart] = ()) -> None:
    """Show the newest failure of some launches; where there is none, name that of earlier starts."""
    failed = _newest_failure(found)
    if failed is None:
        say(console, f"nothing failed in the newest start: {found[-1].words}" if found else "nothing failed")
        if (before := _newest_failure(earlier)) is not None:
            number = next((f"; --attempt {each.number} shows it" for each in before[0].attempts[-1:]), "")
            say(console, f"an earlier start failed: {before[0].words}{number}")
        return
    part, failure = failed
    say(console, f"==> {part.words}")
    how = f" ({failure.signal})" if failure.signal else f" (code {failure.code})"
    say(console, f"{failure.words}{how}")
    if failure.details:
        verbatim(console, failure.details)
    log = None if failure.rank is None else part.log(failure.rank)
    if log is not None and log.path.exists():
        say(console, f"==> {log.path}")


def _newest_failure(found: Sequence[LogPart]) -> tuple[LogPart, Failure] | None:
    """The last launch that failed, and how."""
    return next(((part, failure) for part in reversed(found) if (failure := _failure(part)) is not None), None)


def _failure(part: LogPart) -> Failure | None:
    """The first failure of a launch; the end that the job or the training noted, where no process is known."""
    launch = part.launch
    if launch is not None and launch.end is not None and not launch.crashed:
        return None
    folder = part.ranks or part.folder
    nodes, per_node = (launch.nodes, launch.processes_per_node) if launch else ((), 1)
    found = None
    if folder is not None:
        srun = "\n".join(last_lines(srun_log(folder), _SRUN_LINES))
        found = first_failure(folder, nodes, per_node, srun)
    if found is not None:
        return found
    if launch is not None and launch.end is not None:
        log = part.log(0)
        details = "\n".join(log.last_lines(20)) if log and not launch.nodes else ""
        return Failure(launch.end.rank, launch.end.node, launch.end.code, launch.end.reason, details)
    died = [each for each in part.attempts if each.died]
    return Failure(None, None, died[-1].code or 1, died[-1].reason, "") if died else None
