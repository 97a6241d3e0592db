"""The command line: one function per command, no logic. Everything heavy is imported inside the commands."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline import DISTRIBUTION, __version__
from pipeline.cli.arguments import (
    AsJson,
    InAllocation,
    Local,
    Overrides,
    RunOrFolder,
    Slurm,
    Step,
    TakeOver,
    TrustFilesOf,
    Verbose,
    WeightsFolder,
)
from pipeline.cli.checkpoint import checkpoint_app
from pipeline.cli.config import config_app
from pipeline.cli.convert import convert_app
from pipeline.cli.curate import curate
from pipeline.cli.data import data_app
from pipeline.cli.failures import CommandGroup, report_error, report_mistake
from pipeline.cli.generation import chosen_weights, generate, serve
from pipeline.cli.jobs import add_to
from pipeline.cli.mirrors import fetched, fetched_report, refuse_mirror
from pipeline.cli.submitted import submitted
from pipeline.common.console import Console, echo, flush, say, spell_out_what_cannot_be_encoded
from pipeline.common.errors import EXIT_OK, EXIT_OTHER, EXIT_REFUSED, UserError
from pipeline.common.objects.urls import url_of_path
from pipeline.common.redaction import mask_streams
from pipeline.common.signals import repeat_lost_interrupts
from pipeline.train.distributed.rank import begin_rank, is_rank, record_error

if TYPE_CHECKING:
    from pipeline.config import Config

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pretrain a language model from a run file: curate, preprocess, train, eval, on this machine or on SLURM.",
    epilog=f"Pages named docs/... are in share/doc/{DISTRIBUTION} of the Python environment, or in the checkout.",
)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(convert_app, name="convert")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done or submitted; write nothing.")]


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"pipeline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command()(curate)


@app.command()
def preprocess(
    run: RunOrFolder,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show progress, from any shell, and exit.")] = False,
    slurm: Slurm = False,
    local: Local = False,
    units: Annotated[
        bool, typer.Option("--units", help="Process unclaimed units, then exit (used by array tasks).")
    ] = False,
    grow: Annotated[
        bool, typer.Option("--grow", help="Append files that were added to sources to their datasets.")
    ] = False,
    verbose: Verbose = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Tokenize documents into datasets (data.sources). Rerun to resume."""
    # NumPy's library of matrix products would start a thread for each core, and this command multiplies no matrices.
    # Without them it has one thread, and can fork its workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = _load(run, overrides, of_data=True)
    if status:
        from pipeline.data.preprocess.status import print_status

        print_status(Console(), config, shlex.join([str(run), *(overrides or ())]))
        return
    if grow and (slurm or local) and not dry_run:
        from pipeline.data.preprocess.stage import grow_plans

        grow_plans(config)  # the jobs find the plans that have grown
    if submitted(config, ["preprocess"], slurm, local, dry_run):
        return
    from slurm.local.stages import preprocess as stage

    stage(config, dry_run=dry_run, units=units, grow=grow)


@app.command()
def train(
    run: RunOrFolder,
    overrides: Overrides = None,
    check: Annotated[
        bool, typer.Option("--check", help="Show the parallel layout and its memory; start nothing.")
    ] = False,
    slurm: Slurm = False,
    local: Local = False,
    in_allocation: InAllocation = False,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Compute the reference's log-probabilities of train.preference, and exit."),
    ] = False,
    from_mirror: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="If run.dir has no checkpoints: continue from the mirror of a run (train.checkpoint.mirror.to).",
            show_default=False,
        ),
    ] = None,
    verbose: Verbose = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Train the model, or resume from the latest checkpoint."""
    values: dict[str, Any] = {} if from_mirror is None else {"resume.from_mirror": from_mirror}
    if reference and (slurm or local):
        raise UserError(
            "--reference runs here, or with --in-allocation; a job of `pipeline train` computes the reference itself "
            "before its first step: leave out --reference, or --slurm and --local"
        )
    if reference:
        values["launch.reference_only"] = True
    config = _load(run, overrides, values)
    if check:
        from slurm.local.stages import check_layout

        check_layout(config)
        return
    if submitted(config, ["train"], slurm, local, dry_run, take_over=take_over, in_allocation=in_allocation):
        return
    from slurm.local.srun_rank import join_step
    from slurm.local.stages import train as stage

    join_step()
    stage(config)


@app.command()
def plan(
    run: RunOrFolder,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, all devices of each; default: those of the run file.", min=1)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="a100, h100, h100-pcie, h200, b200, gh200, mi300x, or the device's name in gres; default: that of the "
            "cluster's profile, or h100."
        ),
    ] = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Also search for the fastest layouts that fit. May take minutes.")
    ] = False,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list what is assumed.")] = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Estimate memory, time and communication of a training run. Starts nothing. Exit code 2 if it does not fit."""
    config = _load(run, overrides)
    from slurm.forecast import estimate

    if not estimate(config, Console(), nodes=nodes, device=device, suggest=suggest, as_json=as_json, verbose=verbose):
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def fork(
    run: RunOrFolder,
    new: Annotated[Path, typer.Argument(metavar="NEW.yaml", help="Run file of the new run, with its own run.dir.")],
    step: Annotated[int, typer.Option(help="Step of the parent run's checkpoint.", min=0)],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would differ; write nothing.")] = False,
) -> None:
    """Branch a run from a checkpoint (weights, optimizer, data position) with a new config."""
    from pipeline.config.load import load

    config = load(new, overrides or ())
    from pipeline.train.start.fork import fork as begin

    begin(run, step, config, Console(), dry_run=dry_run, arguments=(str(new), *(overrides or ())))


@app.command("eval")
def evaluate(
    run: RunOrFolder,
    overrides: Overrides = None,
    step: Step = None,
    weights: WeightsFolder = None,
    table: Annotated[bool, typer.Option("--table", help="Show the evaluations of all steps, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --table: print one JSON object.")] = False,
    prefetch: Annotated[
        bool,
        typer.Option(
            "--prefetch", help="Download the data of eval.harness.tasks for nodes without a network, and exit."
        ),
    ] = False,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance", help="Instead: measure the importance of channels, heads, experts and layers, for pruning."
        ),
    ] = False,
    slurm: Slurm = False,
    local: Local = False,
    in_allocation: InAllocation = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Evaluate a checkpoint, or weights in a folder: held-out loss, then the benchmarks of eval.tasks and eval.harness.

    `pipeline eval prefetch RUN.yaml` is `pipeline eval RUN.yaml --prefetch`.
    """
    if run == Path("prefetch") and overrides and not run.exists():
        prefetch, run, overrides = True, Path(overrides[0]), overrides[1:]
    if slurm or local or in_allocation or dry_run:
        refuse_mirror(run, "--slurm, --local, --in-allocation and --dry-run")
    run = fetched(run, step)
    which = chosen_weights(step, weights)
    config = _load(run, overrides)
    if prefetch:
        from pipeline.eval.tasks.harness import prefetch as fetch

        fetch(config, Console())
        return
    if table:
        from pipeline.eval.table import show_table

        show_table(config, Console(), as_json=as_json)
        if not as_json and config.run.dir.is_dir():
            from slurm.status.evaluating import evaluation_lines

            for line in evaluation_lines(config.run.dir):
                say(Console(), line)
        return
    if importance:
        from pipeline.cli.submitted import importance_alone

        importance_alone(config, which, slurm=slurm or local or in_allocation, dry_run=dry_run)
        return
    if weights is not None and (slurm or local or dry_run):
        raise UserError(
            "jobs evaluate checkpoints of a run; leave out --slurm, --local and --dry-run to evaluate --weights here"
        )
    if submitted(config, ["eval"], slurm, local, dry_run, step, in_allocation=in_allocation):
        return
    from slurm.local.stages import evaluate as stage

    stage(config, which)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run files or run folders; several are compared.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Default: RUN/report.html, or ./report.html for several runs."),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write the charts as a PNG file beside it.")] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Write no file: serve the report to a browser of this machine, and follow the runs until Ctrl-C. "
            "Runs may not have begun.",
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="With --live: port; default: any free one.")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="With --live: unix socket (mode 600) to listen on instead of a port.")
    ] = None,
) -> None:
    """Write an HTML report of runs, finished or in progress: losses, data, time, texts, scores, layout, differences."""
    if live:
        if out is not None or png:
            raise UserError("--live writes no file; leave out --out and --png, or leave out --live")
        for run in runs:
            refuse_mirror(run, "--live")
        from pipeline.eval.report.live.server import follow

        if port is not None and socket is not None:
            raise UserError("use either --port or --socket")
        follow(runs, Console(), port=port or 0, path=socket)
        return
    for option, value in (("--port", port), ("--socket", socket)):
        if value is not None:
            raise UserError(f"{option} is only for --live; leave it out, or add --live")
    from pipeline.eval.report.command import report as write

    if any(map(url_of_path, runs)):
        out = out or Path("report.html")
        runs = [fetched_report(run) for run in runs]
    write(runs, Console(), out=out, picture=png)


@app.command("run")
def run_all(
    run: RunOrFolder,
    overrides: Overrides = None,
    slurm: Slurm = False,
    local: Local = False,
    in_allocation: InAllocation = False,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    verbose: Verbose = False,
    trusted: TrustFilesOf = None,
) -> None:
    """Run preprocess, train and eval, and print a summary. Completed stages are skipped."""
    config = _load(run, overrides)
    from slurm.jobs import stages_of_run

    if submitted(
        config, stages_of_run(config), slurm, local, dry_run, take_over=take_over, in_allocation=in_allocation
    ):
        return
    from slurm.local.stages import run as run_here

    run_here(config)


app.command()(generate)
app.command()(serve)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for run.yaml (or site.yaml).")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Shipped run file to start from: starter-small (minutes on a CPU), quickstart, models/llama3-8b, ...",
        ),
    ] = "starter",
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Write site.yaml instead: a profile of this SLURM cluster."),
    ] = False,
) -> None:
    """Write a commented run file to start from, or a profile of this cluster."""
    from pipeline.config.parsing.document import parse
    from pipeline.config.starter import write

    if profile:
        from slurm.site.site_init import write_profile

        path = write_profile(folder)
        echo(f"wrote {path}\nCorrect what is marked CHANGE, then write in run files:\nslurm: {{profile: {path}}}")
        return
    path = write(folder, source)
    text = path.read_text(encoding="utf-8")
    run = parse(text, str(path)).value.get("run")
    echo(f"wrote {path}" + (f", of a run in the folder {run['dir']} (run.dir)" if run else ""))
    todo = "Fill in each ???" if "???" in text else "Edit it"
    echo(f"{todo}, then: pipeline run {shlex.quote(str(path))}")


@app.command()
def plugins(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show the options of this plug-in, which imports it.")
    ] = None,
) -> None:
    """List installed plug-ins: sources, layers, objectives, loggers. None is imported."""
    from pipeline.config.reference import plugin_lines

    echo("\n".join(plugin_lines(name)))


add_to(app)


def main() -> None:
    """Entry point of the `pipeline` command and of `python -m pipeline`."""
    spell_out_what_cannot_be_encoded()
    mask_streams("stderr", *(["stdout"] if is_rank() else []))  # what a rank prints is kept in a log
    repeat_lost_interrupts()
    begin_rank()
    try:
        app(prog_name="pipeline")
        code: Any = EXIT_OK
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt as error:
        code = report_error(error)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        record_error(error)
        code = report_mistake(error)
    processes = sys.modules.get("pipeline.train.distributed.process_group")
    if processes is not None:
        if processes.joined():
            processes.leave(code if isinstance(code, int) else EXIT_OTHER if code else EXIT_OK)
        processes.destroy()
    flush()
    sys.exit(code)


def _load(
    run: Path, overrides: list[str] | None, values: dict[str, Any] | None = None, *, of_data: bool = False
) -> Config:
    """The config, before a stage and its heavy packages are imported: a mistake in it shows at once.

    Of a run folder it is what the run was trained with, overrides of that time included.
    """
    from pipeline.config.load import load_run

    return load_run(run, overrides or (), values, of_data=of_data)
