"""The commands `pipeline config ...`. One function per command, no logic."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.arguments import RunOrFolder, TrustFilesOf
from pipeline.common.console import echo

config_app = typer.Typer(no_args_is_help=True, help="Show run files and their keys.")


@config_app.command("show")
def config_show(
    run: RunOrFolder,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY | KEY.PATH=VALUE]...",
            help="Sections or keys to print alone, like `train` or `train.optimizer`; and values that override the run "
            "file.",
            show_default=False,
        ),
    ] = None,
    trusted: TrustFilesOf = None,
) -> None:
    """Print a run file with its includes, overrides, interpolation and defaults resolved.

    Exit code 2 where others may have written what it would execute.
    """
    from pipeline.config.load import dump, dump_keys, load_run
    from pipeline.config.parsing.code_keys import refuse_code_of_others

    keys = [word for word in words or () if "=" not in word]
    config = load_run(run, [word for word in words or () if "=" in word])
    echo(dump_keys(config, keys) if keys else dump(config), end="")
    refuse_code_of_others(config)  # after it could be read


@config_app.command("keys")
def config_keys(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Key, section, or words to search for; default: all sections.")
    ] = None,
) -> None:
    """Print keys of run files with type, default and meaning."""
    from pipeline.config.reference import key_lines

    echo("\n".join(key_lines(key)))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of run files, for editors."""
    from pipeline.config.reference import json_schema

    echo(json_schema(), end="")
