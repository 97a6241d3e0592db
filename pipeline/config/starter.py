"""`pipeline init`: a commented run file to start from."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.load import find
from pipeline.data.store import put
from pipeline.errors import UserError


def write(folder: Path, source: str = "starter") -> Path:
    """Copy the run file `source` that ships with the package to `folder/run.yaml`.

    Raises:
        UserError: `folder/run.yaml` exists, or no such run file ships.
    """
    path = folder / "run.yaml"
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten; name another folder, or move it away")
    original = find(Path("configs", f"{source.removesuffix('.yaml')}.yaml"))
    folder.mkdir(parents=True, exist_ok=True)
    put(path, original.read_bytes())
    return path
