"""The commands about jobs. One function per command, no logic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.arguments import AsJson, Overrides, RunOrFolder, TrustFilesOf, Verbose
from pipeline.common.console import Console

RunsOrFolders = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN", help="Run files or folders; default: all in ./runs.", show_default=False),
]
Attempt = Annotated[int | None, typer.Option(help="Attempt; default: the latest.", min=1)]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (status, logs, cancel, hold, release, doctor, drill, sweep):
        app.command()(command)


def status(
    runs: RunsOrFolders = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C; SLURM is asked every 30 s.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the status of runs: state, step, loss, rates, time left, checkpoint, attempts, nodes."""
    from slurm.status.command import show_status

    show_status(runs or (), Console(), watch=watch, as_json=as_json)


def logs(
    run: RunOrFolder,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow new lines, across requeues.")] = False,
    rank: Annotated[int | None, typer.Option(help="Rank; default: 0.", min=0)] = None,
    attempt: Attempt = None,
    first_error: Annotated[
        bool,
        typer.Option(
            "--first-error",
            help="Show the first process that failed in the newest submission, or in --attempt: rank, node, lines.",
        ),
    ] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Number of last lines; 0 shows all.", min=0)] = 50,
) -> None:
    """Show the logs of a run's processes."""
    from slurm.logs.command import show_logs

    show_logs(run, Console(), follow=follow, rank=rank, attempt=attempt, first_error=first_error, lines=lines)


def cancel(
    run: RunOrFolder,
    now: Annotated[bool, typer.Option("--now", help="End the run at once, without saving.")] = False,
    chain: Annotated[bool, typer.Option("--chain", help="Also remove all queued jobs of the run.")] = False,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Keep the evaluation that waits for the training; it then starts.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the save; it continues after that.", min=0)] = 300,
) -> None:
    """Stop a run: it saves, exits and is not restarted."""
    from slurm.control import cancel as cancel_run

    cancel_run(run, Console(), now=now, chain=chain, wait=wait, evaluate=evaluate)


def hold(run: RunOrFolder) -> None:
    """Hold the pending jobs of a run."""
    from slurm.control import hold as hold_run

    hold_run(run, Console())


def release(run: RunOrFolder) -> None:
    """Release the held jobs of a run."""
    from slurm.control import release as release_run

    release_run(run, Console())


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run file or run folder: also check what the run needs.")
    ] = None,
    overrides: Overrides = None,
    notify: Annotated[
        bool, typer.Option("--notify", help="Only send a test message through each notification of the run file.")
    ] = False,
    image: Annotated[
        bool, typer.Option("--image", help="In a container: also check what the image has, and what does not fit.")
    ] = False,
    as_json: AsJson = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Check this node: GPUs, a matrix product, disk, inodes, clock, versions. Exit code 78 if it is unfit."""
    if notify:
        from slurm.notify.trial import try_notifications

        try_notifications(run, overrides or (), Console())
        return
    from slurm.doctor.command import doctor as check

    check(run, overrides or (), Console(), as_json=as_json, image=image)


def drill(
    run: RunOrFolder,
    kill: Annotated[
        Literal["rank", "node", "batch"],
        typer.Option(help="Kill one process, all processes of the run on one node, or the batch process of the job."),
    ],
    rank: Annotated[
        int | None, typer.Option(help="The process, or one on the node; default: the last rank.", min=0)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, show what would happen.")] = False,
    minutes: Annotated[float, typer.Option(help="Minutes to wait for the training to come back.", min=0)] = 60,
) -> None:
    """Kill a part of a training that a job runs, and report how it comes back. A fire drill."""
    from slurm.drill.command import drill as drill_run

    drill_run(run, Console(), kill=kill, rank=rank, yes=yes, minutes=minutes)


def sweep(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    values: Annotated[
        list[str], typer.Argument(metavar="KEY.PATH=VALUE[,VALUE...]", help="Values to try; several keys are combined.")
    ],
    slurm: Annotated[bool, typer.Option("--slurm", help="Run as a SLURM job array.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run one by one on this machine, in the background.")] = False,
    per_node: Annotated[
        int, typer.Option(help="Runs of one node that share a job and its node, with --slurm.", min=1)
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs; start nothing.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Show the results so far.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Train with each combination of values, each in its own run folder, and compare the results."""
    from slurm.sweep.command import sweep as run_sweep

    run_sweep(
        run,
        values,
        Console(),
        slurm=slurm,
        local=local,
        dry_run=dry_run,
        table=table,
        as_json=as_json,
        per_node=per_node,
    )
