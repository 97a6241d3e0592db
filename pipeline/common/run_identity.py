"""Identity of a run folder: a random id in one of its files, by which a job knows the folder it was submitted for.

A path alone does not tell. Where a disk is not mounted, a folder was moved, or a container does not bind it, the path
is free, and what is made there would be a new run. A folder without an id gets one at its next start or submission.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.common import links, storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.run_files import RunFiles

RUN_FOLDER = "PIPELINE_RUN_FOLDER"
"""Environment variable of processes whose run folder must exist: its id, a colon, and its path."""


class LostRunFolder(MachineError):
    """The run folder that a process works for is not there, or another folder is in its place."""


def read_id(run: Path) -> str | None:
    """Id of a run folder; None where there is no folder, or it has no id."""
    with suppress(OSError, UserError):
        return storage.read_bytes(RunFiles(run).folder_id, storage.SMALL_BYTES).decode(errors="replace").strip() or None
    return None


def take_id(run: Path) -> str:
    """Id of a run folder, which is written if it has none yet.

    Raises:
        OSError: there is no such folder, or it cannot be written to.
    """
    file = RunFiles(run).folder_id
    while (found := read_id(run)) is None:
        tmp = storage.temporary(file)
        try:
            storage.write_new(tmp, f"{secrets.token_hex(16)}\n".encode())
            storage.sync(tmp)
            try:
                with links.folder_of(file) as (name, folder):  # of two processes one writes it
                    os.link(tmp.name if folder is not None else tmp, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                if read_id(run) is None:  # a damaged one says nothing; and some file systems have no links
                    links.replace(tmp, file)
        finally:
            links.remove(tmp, missing_ok=True)
    return found


def environment(run: Path, folder_id: str | None) -> dict[str, str]:
    """Environment for processes that must find a run folder with this id; None: of an older submission, without one."""
    return {} if folder_id is None else {RUN_FOLDER: f"{folder_id}:{os.path.abspath(run)}"}


def expected_id(run: Path, given: Mapping[str, str] = os.environ) -> str | None:
    """Id that a run folder must have for this process; None where it may make one there."""
    folder_id, _, path = given.get(RUN_FOLDER, "").partition(":")
    return folder_id if folder_id and path == os.path.abspath(run) else None


def problem(run: Path, folder_id: str | None) -> str | None:
    """Reason why a folder is not the run folder with this id, in words; None if it is, or if no id is asked for."""
    if folder_id is None or (found := read_id(run)) == folder_id:
        return None
    if not run.is_dir():
        why = "is not there"
    else:
        has = f"the id {storage.shown(ascii(found))}" if found else "no id"
        why = f"is another folder: {RunFiles.folder_id} has {has}"
    return (
        f"run.dir {run} {why} (wanted: {folder_id}); is its disk mounted, was the folder moved, or does a container "
        "lack the bind mount? It is not made anew, since training would begin again at step 0"
    )


def refuse_lost(run: Path, folder_id: str | None) -> None:
    """A `LostRunFolder` unless the run folder with this id is there."""
    if why := problem(run, folder_id):
        raise LostRunFolder(why)
