"""`pipeline init`: a commented run file to start from."""

from __future__ import annotations

from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.storage import put
from pipeline.config.load import find


def write(folder: Path, source: str = "starter") -> Path:
    """Copy the run file `source` that ships with the package to `folder/run.yaml`.

    Raises:
        UserError: `folder/run.yaml` exists, or no such run file ships.
    """
    original = find(Path("configs", f"{source.removesuffix('.yaml')}.yaml"))
    return write_new(folder / "run.yaml", original.read_bytes())


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
