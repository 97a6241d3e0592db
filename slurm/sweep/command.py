"""`pipeline sweep`: train with each combination of values, every run in a folder of its own, and compare the results.

The runs share the data of the run file, so only training and evaluation are repeated. What is done is skipped, so
the same command resumes a sweep; a value more in it trains only what is new.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from pipeline.common.console import Console, alarm, is_verbose, print_table, say, verbatim, warn
from pipeline.common.errors import MachineError, RankFailed, UserError
from pipeline.common.format import counted, minutes
from pipeline.common.storage import naming
from slurm.jobs import Backend
from slurm.sweep.members import Member, Sweep, find_sweep, make_sweep, problems_message, short_names
from slurm.sweep.table import is_done, live, note_members, show_table


class RunsFailed(UserError):
    """Some runs of a sweep failed; the others are done."""

    exit_code = 1


@dataclass(frozen=True)
class CheckedRun:
    """A run that could start now."""

    member: Member
    steps: int
    """Steps of the whole run."""
    parameters: int


def sweep(
    run: Path,
    values: list[str],
    console: Console,
    *,
    slurm: bool,
    local: bool,
    dry_run: bool,
    table: bool,
    as_json: bool,
    per_node: int = 1,
) -> None:
    """The command; of jobs, each has `per_node` runs.

    Raises:
        UserError: options that exclude each other; words or runs that are not valid, all of them in one message, before
            anything starts; in the foreground, that some runs failed.
    """
    if slurm and local:
        raise UserError("use either --slurm or --local")
    if per_node > 1 and not slurm:
        raise UserError("--per-node is for jobs, in which runs share a node; add --slurm")
    if as_json and not table:
        raise UserError("--json is for the results; add --table")
    if table:
        show_table(find_sweep(run, values), console, as_json=as_json)
        return
    found = make_sweep(run, values)
    backend: Backend | None = "slurm" if slurm else "local" if local else None
    checked = _check(found, backend)
    if dry_run:
        _show(found, checked, backend, console, per_node)
        return
    if backend is not None:
        _send(found, checked, backend, console, per_node)
        return
    _note(found, checked)
    if left := _left(checked, console):
        _in_turn(found, left, console)
    else:
        show_table(found.folder, console, as_json=False)


def _check(found: Sweep, backend: Backend | None) -> list[CheckedRun]:
    """Refuse all runs before the first one starts, where training would refuse one."""
    checked = []
    problems: dict[str, list[str]] = {}
    for member in found.members:
        try:
            checked.append(_check_run(member, backend))
        except UserError as error:
            problems.setdefault(str(error), []).append(member.name)
    if problems:
        raise UserError(problems_message(problems, len(found.members)))
    return checked


def _check_run(member: Member, backend: Backend | None) -> CheckedRun:
    """Lay a run out and plan it."""
    from pipeline.common.problems import Problems
    from pipeline.data.plan.build import make_data_plan
    from pipeline.train.model.flops import num_parameters
    from pipeline.train.rules.layout import check_evaluation_layout, check_layout
    from pipeline.train.rules.layout_check import planned_spec, world_size
    from pipeline.train.start.checks import SEAM_CHECK, TrainScope
    from pipeline.train.start.schedule_seam import planned_seam

    config = member.config
    if backend is None:
        processes = world_size(config, os.environ)
    else:
        from slurm.sweep.send import planned_training, refuse_larger_evaluation

        planned = planned_training(config, backend)
        refuse_larger_evaluation(config, planned, backend)
        processes = planned.processes
    check_layout(config, processes)
    check_evaluation_layout(config, config.eval.processes)
    found = Problems()
    found.look([SEAM_CHECK], TrainScope(config, processes))
    found.raise_problems()
    course = make_data_plan(config, hashed_steps=0, check=partial(planned_seam, config))
    return CheckedRun(member, course.steps, num_parameters(planned_spec(config)))


def _show(
    found: Sweep, checked: Sequence[CheckedRun], backend: Backend | None, console: Console, per_node: int
) -> None:
    """Print what would be done."""
    table = Table(*short_names(found.keys).values(), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("parameters", "steps"):
        table.add_column(column, justify="right")
    table.add_column("now")
    states = live([each.member.folder for each in checked])
    for each in checked:
        done = is_done(each.member.folder, each.steps)
        now = "done" if done else states[each.member.folder] or "to do"
        table.add_row(*each.member.values.values(), f"{each.parameters:,}", f"{each.steps:,}", now)
    say(console, f"sweep {found.folder}")
    print_table(console, table)
    left = [each.member for each in checked if not is_done(each.member.folder, each.steps)]
    left = [member for member in left if not states[member.folder]]
    if backend == "slurm":
        _show_jobs(found.folder, left, console, per_node)
    elif left:
        say(console, f"{counted(len(left), 'run')} one after the other, each trained and then evaluated")
    say(console, f"nothing was {'started' if backend is None else 'sent'} and nothing was written (--dry-run)")


def _show_jobs(folder: Path, left: Sequence[Member], console: Console, per_node: int) -> None:
    """The jobs that would be sent, and with `--verbose` their scripts."""
    from slurm.submit import code_snapshot, permissions, submitit_backend
    from slurm.sweep.send import groups

    wanted = groups(folder, left, "slurm", per_node)
    for warning in dict.fromkeys(warning for group in wanted for warning in group.check(dry_run=True)):
        warn(console, warning)
    for group in wanted:
        planned, count = group.planned, group.planned.tasks
        one = "a job" if len(group.members) > 1 else f"a job for {group.members[0].name}"
        what = f"an array of {count:,} jobs, each" if count > 1 else one
        what += f" of {group.per_node} runs" if group.per_node > 1 else ""
        nodes = counted(planned.nodes + planned.spare_nodes, "node")
        processes = f"{planned.processes_per_node:,} process{'' if planned.processes_per_node == 1 else 'es'}"
        say(
            console,
            f"{what} with {nodes} x {processes}, for {minutes(planned.minutes)}: trained and then evaluated",
        )
    for group in wanted if is_verbose() else ():
        code = code_snapshot.place(folder, permissions.private_folder(group.config, folder))
        text = submitit_backend.script(folder, group.planned, group.site, code, group.config, "slurm")
        verbatim(console, f"\n--- script of {group.planned.name} ---\n{text.rstrip()}\n--- end of script ---\n")


def _note(found: Sweep, checked: Sequence[CheckedRun]) -> None:
    """Write down which runs there are, for the table."""
    values = {each.member.name: each.member.values for each in checked}
    note_members(found.folder, values, {each.member.name: each.steps for each in checked})


def _left(checked: Sequence[CheckedRun], console: Console) -> list[CheckedRun]:
    """The runs that neither are done nor wait or run already."""
    states = live([each.member.folder for each in checked])
    left = []
    for each in checked:
        if is_done(each.member.folder, each.steps):
            say(console, f"{each.member.name}: done")
        elif state := states[each.member.folder]:
            say(console, f"{each.member.name}: {state}, skipped")
        else:
            left.append(each)
    return left


def _in_turn(found: Sweep, left: Sequence[CheckedRun], console: Console) -> None:
    """Train and evaluate one run after the other, in this process. One that fails does not keep the others from it."""
    from pipeline.eval.perplexity import read_report
    from pipeline.train.distributed.rank import is_rank
    from slurm.local.stages import evaluate, train

    if is_rank():
        raise UserError(
            "`pipeline sweep` is one process, which starts those of the training itself (launch.processes), but "
            "WORLD_SIZE is set; unset it"
        )
    failed = []
    for number, each in enumerate(left, start=1):
        config = each.member.config
        say(console, f"run {number} of {len(left)}: {each.member.name}")
        try:
            step = train(config, console)
            if read_report(config, step) is None:
                evaluate(config, step, console)
        except (UserError, RankFailed) as error:
            if isinstance(error, MachineError):
                raise  # the others would meet the same
            alarm("failed:", f"{each.member.name}: {error}")
            failed.append(each.member.name)
    show_table(found.folder, console, as_json=False)
    if failed:
        raise RunsFailed(f"{len(failed)} of {len(left)} runs failed: {', '.join(failed)}; the others are done")


def _send(found: Sweep, checked: Sequence[CheckedRun], backend: Backend, console: Console, per_node: int) -> None:
    """Send what neither is done nor was sent before."""
    from pipeline.train.run.folder import make_writable
    from slurm.submit.submit import cancel_unknown, one_at_a_time
    from slurm.submit.waiting import warn_of_waiting
    from slurm.sweep.send import groups, send

    make_writable(found.folder)
    with one_at_a_time(found.folder):
        left = [each.member for each in _left(checked, console)]
        if not left:
            _note(found, checked)
            show_table(found.folder, console, as_json=False)
            return
        wanted = groups(found.folder, left, backend, per_node)
        for warning in dict.fromkeys(warning for group in wanted for warning in group.check()):
            warn(console, warning)
        _note(found, checked)
        if backend == "slurm":
            cancel_unknown(found.folder, console)
        with naming(found.folder):  # a full disk names no file
            sent = send(found.folder, wanted, backend)
    members = [member for group in wanted for member in group.members]
    for member, job in zip(members, sent, strict=True):
        what = "job" if backend == "slurm" else "in its turn, process"
        say(console, f"{member.name}: {what} {job.job}")
    first = found.folder / members[0].name
    say(console, f"next: the same command with --table; pipeline status {first} (or logs, cancel)")
    warn_of_waiting({member.folder: [job] for member, job in zip(members, sent, strict=True)}, console)
