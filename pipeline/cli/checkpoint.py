"""The `pipeline checkpoint` commands. As in `main`: no logic; everything heavy is imported inside."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipeline.cli.arguments import AsJson, Overrides, RunOrFolder, Step, shard_bytes
from pipeline.cli.mirrors import fetched
from pipeline.common.console import Console, echo
from pipeline.common.errors import EXIT_OTHER, UserError
from pipeline.common.objects.urls import url_of_path

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.train.checkpoint.manager import Checkpoints

checkpoint_app = typer.Typer(
    no_args_is_help=True, help="Checkpoints of a run: list, show, verify, prune, average, and export the weights."
)

Weights = Annotated[Literal["model", "ema"], typer.Option(help="Trained weights, or their moving average.")]
To = Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to create.")]
MaxShard = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum size of one file of tensors, like 5GB; default: a single file.",
        show_default=False,
    ),
]


@checkpoint_app.command("list")
def checkpoint_list(run: RunOrFolder, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show a run's checkpoints: step, time, size, parent, attempt, layout, and whether their files are all there."""
    if url := url_of_path(run):
        from pipeline.train.export import commands

        rows = commands.mirror_rows(url)
    else:
        config, checkpoints = _open(run, overrides)
        from pipeline.train.export import commands

        rows = commands.rows(checkpoints, config.train.checkpoint)
    _show(commands.list_lines(rows), commands.as_json(rows) if as_json else None)


@checkpoint_app.command("show")
def checkpoint_show(
    run: RunOrFolder,
    overrides: Overrides = None,
    step: Step = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also show the tensors of the optimizer and of the moving average.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint: where it comes from, what it was made with, its tensors."""
    if url := url_of_path(run):
        from pipeline.train.export import commands

        with commands.mirror_details(url, step) as there:
            _show(commands.details_lines(there, all_tensors=every), commands.details_json(there) if as_json else None)
        return
    _, checkpoints = _open(run, overrides)
    from pipeline.train.export import commands

    found = commands.details(checkpoints, step)
    _show(commands.details_lines(found, all_tensors=every), commands.details_json(found) if as_json else None)


@checkpoint_app.command("verify")
def checkpoint_verify(
    run: RunOrFolder,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Verify only the checkpoint of this step.", min=0)] = None,
) -> None:
    """Read a run's checkpoints and compare all hashes; exit code 1, and the damaged files named, if any differs.

    Hashes beside the files protect against damage, not against people: who changes a file can change its hash.
    """
    from pipeline.common.console import alarm, say

    console = Console()
    if url := url_of_path(run):
        from pipeline.train.export import commands

        found = commands.verify_mirror(url, step, console, lambda line: say(console, line))
    else:
        _, checkpoints = _open(run, overrides)
        from pipeline.train.export import commands

        found = commands.verify(checkpoints, step, console, lambda line: say(console, line))
    for problems in found.values():
        for problem in problems:
            alarm("bad:", problem)
    if any(found.values()):
        raise typer.Exit(EXIT_OTHER)
    say(console, "The hashes are stored beside the files: they detect damage, but do not prove who wrote a checkpoint.")


@checkpoint_app.command("prune")
def checkpoint_prune(
    run: RunOrFolder,
    overrides: Overrides = None,
    keep: Annotated[
        int | None, typer.Option(help="Number of latest checkpoints to keep; default: train.checkpoint.keep.", min=1)
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Remove the checkpoints of these steps instead.", show_default=False),
    ] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Also remove checkpoints abandoned by a rewind.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
) -> None:
    """Remove checkpoints that the policy does not keep, or chosen ones; never the last valid one."""
    config, checkpoints = _open(run, overrides)
    from pipeline.train.export import commands

    commands.prune(
        checkpoints,
        config.train.checkpoint,
        print,
        keep=keep,
        steps=None if steps is None else _steps(steps),
        abandoned=abandoned,
        dry_run=dry_run,
    )


@checkpoint_app.command("export")
def checkpoint_export(
    run: RunOrFolder,
    to: To,
    overrides: Overrides = None,
    step: Step = None,
    weights: Weights = "model",
    max_shard: MaxShard = None,
) -> None:
    """Write a checkpoint's weights as safetensors, whole, with the tokenizer and the resolved config."""
    run = fetched(run, step)
    _, checkpoints = _open(run, overrides)
    from pipeline.train.checkpoint.export import export

    echo(export(checkpoints, to, step=step, weights=weights, max_shard=shard_bytes(max_shard), console=Console()))
    echo(_next(run, to))


@checkpoint_app.command("average")
def checkpoint_average(
    run: RunOrFolder,
    to: To,
    overrides: Overrides = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Steps of the checkpoints.", show_default=False)
    ] = None,
    last: Annotated[int | None, typer.Option(help="Number of latest checkpoints.", min=1)] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option(
            "--with", metavar="RUN", help="Further run to take the same steps, or number, from; may be repeated."
        ),
    ] = None,
    weights: Weights = "model",
    max_shard: MaxShard = None,
) -> None:
    """Write the mean of several checkpoints' weights as safetensors, like `export`."""
    _, checkpoints = _open(run, overrides)
    further = [_open(other, None)[1] for other in others or ()]
    from pipeline.train.checkpoint.export import average

    echo(
        average(
            checkpoints,
            to,
            others=further,
            steps=None if steps is None else _steps(steps),
            last=last,
            weights=weights,
            max_shard=shard_bytes(max_shard),
            console=Console(),
        )
    )
    echo(_next(run, to))


def _next(run: Path, weights: Path) -> str:
    return f"next: {shlex.join(['pipeline', 'eval', str(run), '--weights', str(weights)])}"


def _open(run: Path, overrides: list[str] | None) -> tuple[Config, Checkpoints]:
    """The config of a run, and its checkpoints."""
    from pipeline.config.load import load_run

    config = load_run(run, overrides or ())  # a mistake in it shows before the heavy packages are imported
    from pipeline.train.checkpoint.manager import Checkpoints

    return config, Checkpoints.of_run(config.run.dir)


def _show(lines: Iterable[str], value: Any) -> None:
    """A value as JSON if there is one, else the lines."""
    if value is None:
        for line in lines:
            echo(line)
    else:
        echo(json.dumps(value, indent=2, ensure_ascii=False))


def _steps(text: str) -> list[int]:
    steps = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in steps):
        raise UserError(f"--steps must be numbers separated by commas, like 1000,2000, not {text!r}")
    return [int(part) for part in steps]
