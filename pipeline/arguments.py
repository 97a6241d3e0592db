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
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
