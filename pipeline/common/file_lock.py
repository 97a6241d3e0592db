"""Locks by `flock` on a file beside what they protect.

Whoever may open a file may hold its lock: such a file belongs to its user alone, or to the group of its folder, and it
is waited for with a deadline. Where the file system has no `flock` there is no lock.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.common import links
from pipeline.common.errors import MachineError

SECONDS = 60.0
"""A lock that is held for longer is reported: what is done under one takes a second, or an answer of the scheduler."""
_POLL = 0.05
"""Seconds between tries."""


@contextmanager
def exclusive(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Let one process at a time in, on all machines whose file system has `flock` between them.

    Args:
        path: of the file, which is made where it is missing.
        seconds: to wait for it; by default `SECONDS`.

    Raises:
        MachineError: another process holds it for longer, or the file cannot be used.
    """
    deadline = time.monotonic() + (SECONDS if seconds is None else seconds)
    while True:
        descriptor = open_lock_file(path)
        try:
            has_locks = acquire(descriptor, path, max(0.0, deadline - time.monotonic()))
            if not has_locks or _is_at(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)
        # Somebody removed the file meanwhile, as the message of an expired deadline says: there is another one now.


def open_lock_file(path: Path) -> int:
    """Open the file of a lock, with permissions that keep others from holding it; returns its descriptor.

    0600, whatever the umask; in a folder that was given to a group, 0660 and of that group. A file of this user that
    has others is repaired.

    Raises:
        MachineError: it cannot be opened, or is not a regular file.
    """
    try:
        with links.folder_of(path) as (name, above):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=above)
    except FileNotFoundError as error:
        error.filename = str(path)
        raise
    except OSError as error:
        raise MachineError(f"{path} cannot be opened for a lock ({error.strerror}{_owner(path)}); {_TODO}") from error
    found, folder = os.fstat(descriptor), os.stat(path.parent)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise MachineError(f"{path} is not a regular file, and cannot be used as a lock; {_TODO}")
    shared = folder.st_mode & (stat.S_ISGID | stat.S_IWGRP) == stat.S_ISGID | stat.S_IWGRP
    if found.st_uid == os.geteuid():
        with suppress(OSError):  # a file system without permissions
            if shared and found.st_gid != folder.st_gid:
                os.fchown(descriptor, -1, folder.st_gid)
            if stat.S_IMODE(found.st_mode) != (mode := 0o660 if shared else 0o600):
                os.fchmod(descriptor, mode)
    return descriptor


def acquire(descriptor: int, path: Path, seconds: float = SECONDS) -> bool:
    """Take the lock of an open file; False where the file system has none.

    Raises:
        MachineError: another process has held it all the time; the message names it as far as it can be told.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if (left := deadline - time.monotonic()) <= 0:
                raise MachineError(
                    f"{path} is locked by {holders(descriptor)}, which has not released it within {seconds:.0f} s; end "
                    f"that process if it hangs, or {_TODO}"
                ) from None
            time.sleep(min(_POLL, left))
        except OSError:
            return False


_TODO = "remove the file if no process of this run is running any more (it is made again)"


def holders(descriptor: int) -> str:
    """The processes that hold the lock of an open file, for people."""
    return " and ".join(_process(pid) for pid in _pids(os.fstat(descriptor))) or (
        "a process that is not visible from here (on another machine, or in another container)"
    )


def _pids(file: os.stat_result) -> list[int]:
    """Processes that hold a lock on a file, by the kernel's list."""
    found = set()
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK  ADVISORY  WRITE 123 08:02:4711 0 EOF; one that waits has -> after 1:
            if "->" in words or len(words) < 6 or words[1] != "FLOCK":
                continue
            # Some file systems (btrfs, overlayfs) have another device there than `stat` says; the inode is the same.
            if words[5].split(":")[-1] == str(file.st_ino) and words[4].isdecimal() and int(words[4]) > 0:
                found.add(int(words[4]))
    return sorted(pid for pid in found if _has_open(pid, file) is not False)


def _has_open(pid: int, file: os.stat_result) -> bool | None:
    """Tell whether a process has a file open; None where this user may not look, or the process is gone."""
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(each.stat(), file):
                    return True
    except OSError:
        return None
    return False


def _process(pid: int) -> str:
    """`process 12 (python, user ada)`, as far as it is known."""
    more = []
    with suppress(OSError):
        more.append(Path(f"/proc/{pid}/comm").read_text().strip())
    with suppress(OSError):
        more.append(f"user {_user(os.stat(f'/proc/{pid}').st_uid)}")
    return f"process {pid}" + (f" ({', '.join(more)})" if more else "")


def _owner(path: Path) -> str:
    """`, it belongs to ada`, where that is not this user."""
    with suppress(OSError):
        if (owner := path.lstat().st_uid) != os.geteuid():
            return f", it belongs to {_user(owner)}"
    return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _is_at(descriptor: int, path: Path) -> bool:
    """Tell whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
