"""The folder of a user on a node's own disk for copies of datasets, and the lock of whoever copies.

All that is in it is good for nothing where others may write, so it belongs to the user alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.common import links
from pipeline.common.console import Console, say
from pipeline.common.errors import MachineError
from pipeline.common.file_lock import open_lock_file

FOLDER = "pipeline-data"
LOCK_FILE = "lock"
CHECKED_FILE = "checked.jsonl"
"""File in the copy of a dataset: size and time that each file had when its bytes were those that were written."""


def own_folder(parent: Path) -> Path:
    """The folder of this user's copies; it is made if it is not there.

    Its name can be guessed, and /tmp is everybody's: what another user made there first, or may write to, is not used.
    Else that user could put in other tokens, or links at which this process would overwrite files of its own user.
    """
    base = parent / f"{FOLDER}-{os.geteuid()}"
    try:
        for each in reversed([parent, *parent.absolute().parents]):
            if not each.exists():
                each.mkdir(0o755, exist_ok=True)  # whatever the umask lets others do
        _keep_alone(parent, base.name)
        with links.folder_of(base) as (name, folder):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise _unusable(base, str(error.strerror)) from None
    if not stat.S_ISDIR(found.st_mode):
        raise _unusable(base, "it is a link or a file, not a folder")
    if found.st_uid != os.geteuid():
        raise _unusable(base, f"it belongs to the user with id {found.st_uid}, who may change its files")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _unusable(base, "other users may write there, so its files may be theirs")
    if others := next((each for each in _own_above(parent) if _lets_others_replace(each)), None):
        todo = f": run `chmod g-w,o-w {others}`" if others.stat().st_uid == os.geteuid() else ""
        raise _unusable(base, f"others may write to {others}, and put a folder of theirs in its place{todo}")
    return base


def _keep_alone(folder: Path, name: str) -> None:
    """Let nobody else write to a folder of this user that has nothing but the copies, as earlier versions made it."""
    found = folder.stat()
    if found.st_uid == os.geteuid() and _lets_others_replace(folder) and set(os.listdir(folder)) <= {name}:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def _own_above(folder: Path) -> Iterator[Path]:
    """A folder, and those above it as long as they belong to this user."""
    yield folder
    for each in folder.absolute().parents:
        if each.stat().st_uid != os.geteuid():
            return
        yield each


def _lets_others_replace(folder: Path) -> bool:
    """Tell whether others may rename what is in a folder, which the sticky bit of /tmp forbids."""
    found = folder.stat()
    # A group with the number of the user is the user's alone, as many systems make it.
    of_group = found.st_mode & stat.S_IWGRP and found.st_gid != found.st_uid
    return bool(of_group or found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX


def _unusable(base: Path, why: str) -> MachineError:
    return MachineError(
        f"stage.dir: {base} cannot be used: {why}; set stage.dir to a folder of yours on a disk of the node"
    )


@contextmanager
def alone(base: Path, console: Console) -> Iterator[None]:
    """Wait until no other process of the user copies on this node. The lock of a process that has died is free.

    Args:
        base: the folder.
        console: hears of a wait.
    """
    with ExitStack() as stack:
        try:
            # Of this user alone, so that it is one of theirs that is waited for, however long a copy takes.
            lock = stack.enter_context(os.fdopen(open_lock_file(base / LOCK_FILE), "r+b", buffering=0))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read(20).decode(errors="replace") or "that has just started"
                say(console, f"waiting for process {holder}, which copies datasets to {base}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _unusable(base, str(error.strerror)) from None
        with suppress(OSError):  # a full disk; the number is for people alone
            lock.truncate(0)
            lock.seek(0)
            lock.write(str(os.getpid()).encode())
        yield


def checked_row(folder: Path, name: str, digest: int) -> dict[str, Any]:
    """The row of `CHECKED_FILE` for a file as it is now; empty if it is not there.

    Args:
        folder: of the copy.
        name: of the file in it.
        digest: xxh3-64 that it has.
    """
    try:
        now = (folder / name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {"file": name, "size": now.st_size, "mtime_ns": now.st_mtime_ns, "xxh3": digest}
