"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
