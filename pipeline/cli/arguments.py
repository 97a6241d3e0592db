"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.common.errors import UserError

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that replace the file's.", show_default=False),
]
RunOrFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run file, or the run folder.")]
Step = Annotated[int | None, typer.Option(help="Step of the checkpoint; by default the newest one.", min=0)]
Slurm = Annotated[
    bool,
    typer.Option("--slurm", help="Send it to SLURM, by `slurm:` in the run file; --dry-run only shows."),
]
Local = Annotated[
    bool,
    typer.Option("--local", help="Start it in the background on this machine, with the same folder and logs."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def shard_bytes(text: str | None) -> int | None:
    """Bytes of --max-shard; a `UserError` if it is not a size."""
    if text is None:
        return None
    from pipeline.config.base import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--max-shard is {text!r}: {error}") from None
    if size < 1:
        raise UserError(f"--max-shard is {text!r}; a file must be allowed at least one byte")
    return int(size)
