"""`pipeline init`: a commented run file to start from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.storage import put
from pipeline.config.load import find_shipped

_RUN_DIR = "runs/my-run"
"""`run.dir` of the files that are meant to be filled in."""
_PLAIN = re.compile(r"\w[\w.-]*")
"""Names that are one word in YAML and on a command line."""


def write(folder: Path, source: str = "starter") -> Path:
    """Copy the run file `source` that ships with the package to `folder/run.yaml`.

    `run.dir` of a starter gets the name of the folder, so that two of them are two runs.

    Raises:
        UserError: `folder/run.yaml` exists, or no such run file ships.
    """
    original = find_shipped(source)
    text, name = original.read_text(encoding="utf-8"), os.path.basename(os.path.abspath(folder))
    if _PLAIN.fullmatch(name):
        text = text.replace(_RUN_DIR, f"runs/{name}")
    return write_new(folder / "run.yaml", text.encode())


def write_new(path: Path, data: bytes) -> Path:
    """Write a file that is not there yet, for somebody to edit.

    Raises:
        UserError: it is there.
    """
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten; name another folder, or move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, data)
    return path
