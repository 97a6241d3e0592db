"""Output of the status of runs: a block of lines for one, a table for several."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.common.console import print_table, say
from pipeline.common.format import counted, duration, percent
from pipeline.data.work.progress import WIDE
from pipeline.train.run.goodput import Goodput
from slurm.jobs import stage_words
from slurm.record.launch_log import next_words
from slurm.scheduler import UNKNOWN
from slurm.status.queued import QueuedJob
from slurm.status.run import AttemptRow, RunStatus

_SHOWN = 10
"""Attempts and nodes that are listed; --json has all."""
_LONG = 160
"""Characters of a reason."""
_LABEL = 12
_GOOD = ("running", "curating", "preprocessing", "evaluating", "done")
_BAD = ("failed", "refused", "hung", "diverged", "unsaved", "stalled", "chain exhausted")


def show(found: Sequence[RunStatus], console: Console) -> None:
    """Print it; the table where there is a terminal that it fits into, else lines."""
    if len(found) == 1:
        for line in _block(found[0]):
            say(console, line)
    elif console.is_terminal and console.width >= WIDE:
        print_table(console, _table(found))
    else:
        for each in found:
            say(console, f"{_name(each.run)}: {', '.join(_summary(each))}")
    if len(found) > 1:
        for line in _below(found):
            say(console, line)


def picture(found: Sequence[RunStatus], console: Console) -> RenderableType:
    """Picture of the status, to be painted over the one before."""
    head = Text(time.strftime("%Y-%m-%d %H:%M:%S; Ctrl-C ends this"), style="dim")
    if len(found) == 1:
        return Group(head, Text("\n".join(_block(found[0]))))
    if console.width >= WIDE:
        return Group(head, _table(found), Text("\n".join(_below(found))))
    return Group(head, Text("\n".join([*(f"{_name(each.run)}: {', '.join(_summary(each))}" for each in found)])))


def _table(found: Sequence[RunStatus]) -> Table:
    table = Table("run", "state", "step", "loss", "tokens/s", "MFU", "left", "saved", "attempts", "nodes", "jobs")
    for column in table.columns[2:9]:
        column.justify = "right"
    for each in found:
        colour = "green" if each.state in _GOOD else "red" if each.state in _BAD else "yellow"
        table.add_row(
            Text(_name(each.run)),
            Text(_state(each), style=colour),
            _steps(each),
            _number(each.loss, ".4f"),
            _number(each.tokens_per_second, ",.0f"),
            "-" if each.mfu is None else percent(each.mfu, 1),
            "-" if each.seconds_left is None else duration(each.seconds_left),
            "-" if each.checkpoint is None else f"{each.checkpoint:,}",
            f"{sum(row.number is not None for row in each.attempts):,}",
            Text(_few(each.nodes) or "-"),
            Text(" ".join(job.job for job in each.queue[:_SHOWN]) or "-"),
        )
    return table


def _below(found: Sequence[RunStatus]) -> Iterator[str]:
    """Lines for what a table has no room for."""
    for each in found:
        if each.why and each.state != "running":
            yield f"{_name(each.run)}: {_cut(each.why)}"
        for problem in filter(None, (each.failed_saves, each.failed_mirror, *each.problems)):
            yield f"{_name(each.run)}: {_cut(problem)}"
    for line in dict.fromkeys(each.scheduler for each in found if each.scheduler):
        yield f"the scheduler did not answer ({line}); the state shown is from files"


def _summary(each: RunStatus) -> Iterator[str]:
    """One line, off a terminal."""
    yield _state(each)
    yield f"step {_steps(each)}"
    if each.loss is not None:
        yield f"loss {each.loss:.4f}"
    if each.tokens_per_second is not None:
        yield f"{each.tokens_per_second:,.0f} tokens/s"
    if each.mfu is not None:
        yield f"MFU {percent(each.mfu, 1)}"
    if each.seconds_left is not None:
        yield f"{duration(each.seconds_left)} left"
    if each.queue:
        yield f"jobs {' '.join(job.job for job in each.queue[:_SHOWN])}"


def _block(each: RunStatus) -> Iterator[str]:
    """Lines on one run."""
    yield f"{_name(each.run)}: {_state(each)}"
    for label, text in _parts(each):
        yield f"  {label:<{_LABEL}} {text}"
    rows = each.attempts[-_SHOWN:]
    if rows:
        more = f", the last {len(rows)} of {len(each.attempts):,}" if len(rows) < len(each.attempts) else ""
        yield f"  attempts{more}"
    for row in rows:
        yield f"    {_attempt(row)}"


def _parts(each: RunStatus) -> Iterator[tuple[str, str]]:
    if each.why:
        yield "why", each.why
    if each.step is not None:
        done = f" ({percent(each.step / each.steps, 1)})" if each.steps else ""
        tokens = f", {counted(each.tokens, 'token')}" if each.tokens is not None else ""
        yield "step", f"{_steps(each, ' of ')}{done}{tokens}"
    elif each.steps is not None:
        yield "step", f"0 of {each.steps:,}"
    if each.loss is not None or each.validation_loss is not None:
        at = f"validation {_number(each.validation_loss, '.4f')} at step {each.validation_step or 0:,}"
        yield "loss", _number(each.loss, ".4f") + (f"; {at}" if each.validation_step is not None else "")
    if each.validation_sets:
        found = (
            f"{name} {_number(one.loss, '.4f')} at step {one.step:,}" for name, one in each.validation_sets.items()
        )
        yield "sets", "; ".join(found)
    if each.tokens_per_second is not None:
        mfu = f", MFU {percent(each.mfu, 1)}" if each.mfu is not None else ""
        pace = f", {each.step_seconds:.3g} s per step" if each.step_seconds is not None else ""
        yield "speed", f"{each.tokens_per_second:,.0f} tokens/s{mfu}{pace}"
    if each.experts is not None:
        yield "experts", str(each.experts)
    if each.seconds_left:  # of a run that is through, nothing is
        starts = "" if not each.starts_left else f", {counted(each.starts_left, 'more start')} of its job"
        yield "left", f"{duration(each.seconds_left)}{starts}"
    if each.checkpoint is not None:
        age = "" if each.checkpoint_seconds is None else f", {duration(each.checkpoint_seconds)} ago"
        yield "checkpoint", f"step {each.checkpoint:,}{age}"
    if each.failed_saves:
        yield "unsaved", each.failed_saves
    if each.mirror:
        yield "mirror", each.failed_mirror or each.mirror
    if each.newest_beat is not None and each.oldest_beat is not None:
        old = each.oldest_beat
        place = "" if old.step is None else f", step {old.step:,}"
        text = f"{each.beating:,} of {counted(each.ranks or each.beating, 'rank')}; "
        text += "" if each.beating == 1 else f"newest {duration(each.newest_beat.seconds)} ago, oldest "
        text += f"{duration(old.seconds)} ago"
        yield "heartbeat", f"{text} (rank {old.rank} on {old.node}{place}, {old.phase})"
    if each.goodput is not None:
        values = {key: value for key, value in each.goodput.items() if key != "share"}
        until = "; until the last attempt that ended well" if each.goodput_to_last_end else ""
        yield "goodput", f"{Goodput(**values)}{until}"  # type: ignore[arg-type]
    if each.restarts:
        yield "restarts", f"by the scheduler: {each.restarts:,}"
    if each.nodes:
        yield "nodes", _few(each.nodes)
    for node, why in each.suspects.items():
        yield "suspect", f"{node}: {why}"
    for job in each.queue:
        yield "job", _job(job)
    if each.last_evaluation is not None:
        last = each.last_evaluation
        scores = f"loss {_number(last.get('loss'), '.4f')}, {_number(last.get('bits_per_byte'), '.4f')} bits per byte"
        yield "evaluations", f"{each.evaluations:,}; the last of step {last['step']:,}: {scores}"
    if each.scheduler is not None:
        yield "scheduler", f"did not answer ({each.scheduler}); the state shown is from files"
    for problem in each.problems:
        yield "problem", _cut(problem)


def _job(job: QueuedJob) -> str:
    what = f"{job.job} {stage_words(job.stage)}"
    what += f", chain job {job.link}" if job.link > 1 else ""
    what += f", step {job.step:,}" if job.step is not None else ""
    if job.tasks:
        state = ", ".join(f"{count:,} {state}" for state, count in job.tasks.items())
    else:
        state = "state not known" if job.state == UNKNOWN else job.state
    text = f"{what}: {state}" + (f" ({job.reason})" if job.reason else "")
    text += f" on {job.nodes}" if job.nodes else ""
    if job.waits and job.start is not None:
        text += f", expected to start at {_clock(job.start)}"
    return text + (f", until {_clock(job.end)}" if job.end is not None else "")


def _attempt(row: AttemptRow) -> str:
    number = "-" if row.number is None else str(row.number)
    job = "" if row.job is None else f"job {row.job}" + (f" (restart {row.restarts})" if row.restarts else "") + ", "
    text = f"{number:>3}  {_clock(row.begin)}, {job}on {_few(row.nodes)}, steps {row.first_step:,} to {row.step:,} in "
    text += f"{duration(row.seconds)}: {row.outcome}"
    text += f": {_cut(row.reason)}" if row.reason and row.reason != row.outcome else ""
    # What a launch says of its end has it already.
    if row.next is None or row.next == row.outcome or f"; {next_words(row.next)}: " in row.reason:
        return text
    return text + ("; the scheduler decides" if row.next == "scheduler" else f"; then {next_words(row.next)}")


def _state(each: RunStatus) -> str:
    word = each.state
    return f"{word} ({each.stage})" if each.stage and not word.startswith(each.stage.removesuffix("e")[:4]) else word


def _steps(each: RunStatus, of: str = "/") -> str:
    if each.step is None and each.steps is None:
        return "-"
    return f"{each.step or 0:,}" + (f"{of}{each.steps:,}" if each.steps is not None else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return " ".join(names[:_SHOWN]) + more


def _cut(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _LONG:
        return line
    start = line[: _LONG - 3]
    return f"{start.rpartition(' ')[0] or start}..."


def _clock(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def _name(run: Path) -> str:
    return str(run.relative_to(here)) if run != (here := Path(os.getcwd())) and run.is_relative_to(here) else str(run)
