"""The command line: one function a command, no logic. Everything heavy is imported inside the commands."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pipeline import __version__
from pipeline.cli.arguments import AsJson, Local, Overrides, RunOrFolder, Slurm, Step
from pipeline.cli.checkpoint import checkpoint_app
from pipeline.cli.convert import convert_app
from pipeline.cli.data import data_app
from pipeline.cli.jobs import add_to
from pipeline.common.console import Console, alarm, echo, flush
from pipeline.common.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_OTHER, EXIT_REFUSED, RankFailed, Stopped, UserError
from pipeline.train.distributed.rank import begin_rank, is_consequence, is_rank, record_error

if TYPE_CHECKING:
    from pipeline.config import Config
    from slurm.submit.job_plan import StageName

_ADVICE = {
    errno.ENOSPC: "free some space or point run.dir and data.dir to another disk, then run the same command again; "
    "what was committed is kept",
    errno.EDQUOT: "free some of your quota or point run.dir and data.dir to another disk, then run the same command "
    "again; what was committed is kept",
    errno.EROFS: "point run.dir and data.dir to a disk that can be written",
    errno.EACCES: "check the permissions, or point run.dir and data.dir to a folder of yours",
    errno.EPERM: "check the permissions, or point run.dir and data.dir to a folder of yours",
    errno.ENOENT: "check the path in the run file or on the command line",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.EIO: "the disk or network file system failed; run the same command again when it is back",
    errno.ESTALE: "the disk or network file system failed; run the same command again when it is back",
}


class _Commands(TyperGroup):
    """Turns what a command raises into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            # Now, while somebody is listening to errors: a full disk or a closed pipe behind `>` and `|`.
            sys.stdout.flush()
            return result
        except (UserError, Stopped, RankFailed, OSError, KeyboardInterrupt) as error:
            record_error(error)
            if os.environ.get("PIPELINE_DEBUG") == "1":
                echo(traceback.format_exc(), end="", error=True)
            sys.exit(_report(error))


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="From documents to an evaluated language model: preprocess, train, eval, one run file.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at run files and their keys.")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(convert_app, name="convert")
add_to(app)

DryRun = Annotated[bool, typer.Option("--dry-run", help="With --slurm or --local: show what would be sent.")]
Run = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file, or one that ships: quickstart.yaml.")]


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"pipeline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def preprocess(
    run: Run,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, write nothing.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show how far it is, from any shell, and leave.")] = False,
    slurm: Slurm = False,
    local: Local = False,
    units: Annotated[
        bool, typer.Option("--units", help="Make units as long as there are free ones, and leave; as array tasks do.")
    ] = False,
) -> None:
    """Turn documents into tokens: data.sources -> datasets. The same command goes on where one ended."""
    config = _load(run, overrides)
    if status:
        from pipeline.data.preprocess.status import print_status

        print_status(Console(), config, str(run))
        return
    if _submitted(config, ["preprocess"], slurm, local, dry_run):
        return
    from slurm.local.stages import preprocess as stage

    stage(config, dry_run=dry_run, units=units)


@app.command()
def train(
    run: Run,
    overrides: Overrides = None,
    check: Annotated[
        bool, typer.Option("--check", help="Show the layout over processes and what it costs; start nothing.")
    ] = False,
    slurm: Slurm = False,
    local: Local = False,
    dry_run: DryRun = False,
) -> None:
    """Train the model, or go on from the newest checkpoint."""
    config = _load(run, overrides)
    if check:
        from slurm.local.stages import check_layout

        check_layout(config)
        return
    if _submitted(config, ["train"], slurm, local, dry_run):
        return
    from slurm.local.stages import train as stage

    stage(config)


@app.command()
def plan(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.yaml", help="The run file, or one that ships: quickstart.yaml, models/llama3-8b.yaml."
        ),
    ],
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, each full of devices; by default as many as the run file names.", min=1)
    ] = None,
    device: Annotated[
        str, typer.Option(help="a100, h100, h100-pcie, h200, b200, gh200 or mi300x; or its name in gres.")
    ] = "h100",
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Look for the fastest layouts that fit, too. Takes up to some minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate what a training takes: memory, time, communication. Starts nothing. Exit code 2 if it does not fit."""
    config = _load(run, overrides)
    from slurm.forecast.command import estimate

    if not estimate(config, Console(), nodes=nodes, device=device, suggest=suggest, as_json=as_json):
        raise typer.Exit(EXIT_REFUSED)


@app.command()
def fork(
    run: RunOrFolder,
    new: Annotated[Path, typer.Argument(metavar="NEW.yaml", help="The run file of the new run, with its own run.dir.")],
    step: Annotated[int, typer.Option(help="Step of the parent's checkpoint.", min=0)],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would differ, write nothing.")] = False,
) -> None:
    """Begin a new run with the whole state of another one at a step: RUN's past, NEW.yaml's future."""
    config = _load(new, overrides)
    from pipeline.train.fork import fork as begin

    begin(run, step, config, Console(), dry_run=dry_run)


@app.command("eval")
def evaluate(
    run: Run,
    overrides: Overrides = None,
    step: Step = None,
    table: Annotated[bool, typer.Option("--table", help="Show the evaluations of all steps, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --table: one JSON object.")] = False,
    prefetch: Annotated[
        bool,
        typer.Option(
            "--prefetch", help="Fetch the data of eval.harness.tasks for machines without network, and leave."
        ),
    ] = False,
    slurm: Slurm = False,
    local: Local = False,
    dry_run: DryRun = False,
) -> None:
    """Measure a checkpoint: held-out loss, then the benchmarks of eval.tasks and eval.harness.

    `pipeline eval prefetch RUN.yaml` is `pipeline eval RUN.yaml --prefetch`.
    """
    if run == Path("prefetch") and overrides and not run.exists():
        prefetch, run, overrides = True, Path(overrides[0]), overrides[1:]
    config = _load(run, overrides)
    if prefetch:
        from pipeline.eval.harness import prefetch as fetch

        fetch(config, Console())
        return
    if table:
        from pipeline.eval.table import show_table

        show_table(config, Console(), as_json=as_json)
        return
    if _submitted(config, ["eval"], slurm, local, dry_run, step):
        return
    from slurm.local.stages import evaluate as stage

    stage(config, step)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files or run folders; several: compared.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="By default RUN/report.html; of several runs ./report.html."),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also the charts as a PNG beside it.")] = False,
) -> None:
    """Write what runs did as one HTML file: curves, data, time, scores, layout, differences. Also while they go on."""
    from pipeline.eval.report.command import report as write

    write(runs, Console(), out=out, picture=png)


@app.command("run")
def run_all(
    run: Run, overrides: Overrides = None, slurm: Slurm = False, local: Local = False, dry_run: DryRun = False
) -> None:
    """Preprocess, train, eval and a summary, each where it is not done yet."""
    config = _load(run, overrides)
    if _submitted(config, ["preprocess", "train", "eval"], slurm, local, dry_run):
        return
    from slurm.local.stages import run as stages

    stages(config)


@app.command()
def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue; give it again for more texts. By default generate.prompt."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt a line; in a .jsonl file a JSON text, or an object with `prompt`."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to add at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the smallest set of this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Draw from tokens of this share of the largest one.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; give it again for more of them.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The most probable token each time.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws, the same for each prompt.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, also of the so many best tokens.", min=0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, with the tokens.")] = False,
    step: Step = None,
) -> None:
    """Continue prompts with a checkpoint, several of them together. Options stand for the keys of `generate:`."""
    options = {
        "prompt": prompt[0] if prompt else None,
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "seed": seed,
    }
    given = {f"generate.{name}": value for name, value in options.items() if value is not None}
    config = _load(run, overrides, given)
    if logprobs is not None and not as_json:
        raise UserError("--logprobs shows nothing without --json; add --json")
    if len(prompt or ()) < 2 and prompts is None and not as_json:
        from pipeline.eval.text import continue_prompt

        continue_prompt(config, step)
        return
    from pipeline.eval.text import continue_prompts, read_prompts

    texts = [*(prompt or ()), *(read_prompts(prompts) if prompts else ())] or [config.generate.prompt]
    continue_prompts(config, texts, step, as_json=as_json, logprobs=logprobs)


@app.command()
def serve(
    run: RunOrFolder,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; by default serve.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. By default serve.port.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Take up new checkpoints as they are committed.")] = False,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Has the key that requests need; by default PIPELINE_API_KEY, if it is set.")
    ] = None,
    step: Step = None,
) -> None:
    """Answer requests with a checkpoint: a page, OpenAI's completions, Megatron-LM's /api. See docs/serving.md."""
    options = {"host": host, "port": port, "watch": watch or None}
    from pipeline.config.load import load_run

    given = {f"serve.{name}": value for name, value in options.items() if value is not None}
    config = load_run(run, overrides or (), given)
    from pipeline.eval.server.serve import serve as start

    start(config, step, api_key_file, Console())


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where run.yaml, or site.yaml, is written.")],
    source: Annotated[str, typer.Option("--from", help="A run file that ships, to start from.")] = "starter",
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Write site.yaml instead: a profile of this cluster, as SLURM describes it."),
    ] = False,
) -> None:
    """Write a commented run file to start from, or a profile of the cluster that this machine belongs to."""
    from pipeline.config.starter import write

    if profile:
        from slurm.submit.site_init import write_profile

        path = write_profile(folder)
        echo(f"wrote {path}\nCorrect what is marked CHANGE, then set slurm.profile={path} in run files")
        return
    path = write(folder, source)
    echo(f"wrote {path}\nEdit it, then: pipeline run {path}")


@config_app.command("show")
def config_show(run: Run, overrides: Overrides = None) -> None:
    """Print the run file after includes, overrides, interpolation and defaults."""
    from pipeline.config.load import dump

    echo(dump(_load(run, overrides)), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of run files, for editors."""
    from pipeline.config.reference import json_schema

    echo(json_schema(), end="")


def _submitted(
    config: Config, stages: list[StageName], slurm: bool, local: bool, dry_run: bool, step: int | None = None
) -> bool:
    """Send stages to where the options say; False if they are to run here and now."""
    if not (slurm or local):
        if dry_run and stages != ["preprocess"]:
            raise UserError("--dry-run shows what --slurm or --local would send; add one of them")
        return False
    if slurm and local:
        raise UserError("--slurm and --local exclude each other; name one")
    from slurm.submit.submit import submit

    submit(config, stages, "slurm" if slurm else "local", Console(), dry_run=dry_run, step=step)
    return True


def main() -> None:
    """Entry point of the `pipeline` command and of `python -m pipeline`."""
    begin_rank()
    try:
        app(prog_name="pipeline")
        code: Any = EXIT_OK
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt as error:
        code = _report(error)
    except BaseException as error:  # torch's CheckpointException is no Exception
        record_error(error)
        code = _report_mistake(error)
    processes = sys.modules.get("pipeline.train.distributed.process_group")
    if processes is not None:
        if processes.joined():
            processes.leave(code if isinstance(code, int) else EXIT_OTHER if code else EXIT_OK)
        processes.part()
    flush()
    sys.exit(code)


def _load(run: Path, overrides: list[str] | None, values: dict[str, Any] | None = None) -> Config:
    """The config, before a stage and its heavy packages are imported: a mistake in it shows at once."""
    from pipeline.config.load import load

    return load(run, overrides or (), values)


def _report(error: BaseException) -> int:
    """Say what happened in one message and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough; another would only interrupt the leaving
        alarm("interrupted:", "what was committed is kept; the same command goes on from there")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError) and error.filename is None:
        # The reader of our output has gone (`| head`). Nobody is left to tell, and the exit must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OTHER
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename is not None else ""
        advice = f"; {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
        alarm("error:", f"{path}{error.strerror or error}{advice}")
        return EXIT_OTHER
    assert isinstance(error, (Stopped, RankFailed, UserError))
    if not (isinstance(error, RankFailed) and error.said):
        alarm("stopped:" if isinstance(error, Stopped) else "error:", str(error))
    return error.exit_code


def _report_mistake(error: BaseException) -> int:
    """Say what nobody foresaw and return the exit code."""
    if is_rank() and is_consequence(error):
        # The launcher tells of the rank that failed first; a traceback of this one would only be in the way.
        first = str(error).strip().split("\n", maxsplit=1)[0].partition(". ")[0]
        alarm("error:", f"rank {os.environ.get('RANK')} has lost another process of the run ({first[:200]})")
        return EXIT_OTHER
    echo("".join(traceback.format_exception(error)), end="", error=True)
    alarm(
        "error:",
        f"{type(error).__name__}: this is a mistake in the program, not in your run; please report it with the "
        f"lines above, the output of `pipeline config show` and the version ({__version__})",
    )
    return EXIT_OTHER
