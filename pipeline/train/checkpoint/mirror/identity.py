"""Id of a run in mirrors: that of its folder, unless it has come from another one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipeline.common import run_identity, storage
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles


def mirror_run(run: Path) -> str | None:
    """Id by which a mirror knows the run of a folder; None of a folder that has no id."""
    with suppress(OSError, UserError):
        if found := storage.read_bytes(RunFiles(run).mirror_id, storage.SMALL_BYTES).decode(errors="replace").strip():
            return found
    return run_identity.read_id(run)


def adopt(run: Path, mirror_id: str) -> None:
    """Let a run folder continue the run of a mirror."""
    if mirror_run(run) != mirror_id:
        storage.put(RunFiles(run).mirror_id, f"{mirror_id}\n".encode())


def folder_id(run: Path) -> str:
    """Id of a run folder, which a start has given it."""
    return run_identity.read_id(run) or ""
