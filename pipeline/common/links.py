"""Symbolic links that other users have put into a shared folder: nothing is written or removed where they lead.

The rule is that of Linux for folders like /tmp (`fs.protected_symlinks`), for every folder. Below the first folder of
this user on the way to a file it is stricter: a member of a group who may write there can make a folder, whose owner he
then is. What lies above is a way that the user has chosen.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

from pipeline.common.errors import UserError

_PASSED = getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder that may be passed, and need not be readable, and on Linux a link itself."""
_FOLDER = _PASSED | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LINKS = 40


def refuse_link_of_others(path: Path) -> None:
    """Refuse a path that is a link of somebody who is neither root nor this user nor the owner of the folder.

    Raises:
        UserError: names the link and its target.
    """
    try:
        status = path.lstat()
        owners = {0, os.geteuid(), path.parent.stat().st_uid}
    except OSError:  # there is none
        return
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in owners:
        raise UserError(
            f"{path} is a link to {os.readlink(path)} that belongs to the user {status.st_uid}, who may have put it "
            "there to have your files changed; nothing is written or removed there. Look at it, and remove it"
        )


@contextmanager
def held_folder(path: Path) -> Iterator[int]:
    """The descriptor of a folder, for `dir_fd`: what is put in the folder's place meanwhile is not touched.

    Args:
        path: of the folder; a link if it belongs to this user, to root or to the owner of the folder above.

    Raises:
        UserError: it is a link of somebody else.
        OSError: it cannot be opened.
    """
    refuse_link_of_others(path)
    # A link of ours is followed here, once; one that has come since then is an error.
    real = path.resolve() if path.is_symlink() else path
    refuse_link_of_others(path)
    descriptor = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class FolderEntry(NamedTuple):
    """A file as calls of the system take it: its name in a folder, or its whole path without one."""

    name: str
    folder: int | None


@contextmanager
def folder_of(path: Path) -> Iterator[FolderEntry]:
    """The place of a file, to write or remove it by `dir_fd` if other users may put links on the way to it.

    Args:
        path: of the file, which need not exist.

    Raises:
        OSError: its folder cannot be opened, or the way to it passes a link of somebody else.
    """
    folder = path.absolute().parent
    if _is_closed(folder):
        yield FolderEntry(str(path), None)
        return
    descriptor = _open_folder(folder)
    try:
        yield FolderEntry(path.name, descriptor)
    finally:
        os.close(descriptor)


def _is_closed(folder: Path) -> bool:
    """True if nobody but this user and root may put anything on the way to a folder, below the first one of this user.

    It says nothing of the ACLs of NFSv4.
    """
    user, is_own = os.geteuid(), False
    for each in reversed((folder, *folder.parents)):
        try:
            status = each.lstat()
        except OSError:
            return False
        is_own = is_own or (status.st_uid == user and not stat.S_ISLNK(status.st_mode))
        if is_own:
            # With the sticky bit nobody replaces what is there; whose that is the next step sees.
            open_to_others = status.st_mode & 0o022 and (not status.st_mode & stat.S_ISVTX or each == folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, user) or open_to_others:
                return False
    return is_own


def _open_folder(folder: Path, links: int = 0) -> int:
    """Descriptor of a folder, for `dir_fd`. Each step is made from a descriptor: nobody changes the way meanwhile."""
    here = next((each for each in reversed((folder, *folder.parents)) if _is_own(each)), folder)
    parts = list(reversed(folder.relative_to(here).parts))
    descriptor = os.open(here, _FOLDER)
    try:
        while parts:
            part = parts.pop()
            here /= part
            try:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                target = _target(descriptor, here, part)
                if target is None:
                    error.filename = str(folder)
                    raise
                if (links := links + 1) > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder)) from None
                if target.is_absolute():
                    below, parts = _open_folder(Path(target, *reversed(parts)), links), []
                else:
                    parts += reversed(target.parts)
                    here = here.parent
                    continue
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_own(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _target(folder: int | None, path: Path, name: str) -> Path | None:
    """The target of a link; None of anything else.

    Args:
        folder: descriptor of the one that it lies in.
        path: of the link.
        name: in the folder; the path without one.

    Raises:
        OSError: the link is somebody else's.
    """
    try:
        descriptor = os.open(name, _PASSED | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        above = path.parent.stat() if folder is None else os.fstat(folder)
        if not stat.S_ISLNK(status.st_mode):
            return None
        target = os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)
    user = os.geteuid()
    is_outside = user == 0 or not _is_own_or_below(path.parent)
    if status.st_uid in (0, user) or (is_outside and status.st_uid == above.st_uid) or _is_trusted(status.st_uid):
        return Path(target)
    reason = (
        f"it is a link to {target} that belongs to the user {status.st_uid}, who may have put it there to have your "
        "files changed; remove it, or name what it leads to"
    )
    raise OSError(errno.ELOOP, reason, str(path))


def _is_own_or_below(folder: Path) -> bool:
    return any(map(_is_own, (folder, *folder.parents)))


def _is_trusted(user: int) -> bool:
    from pipeline.common.trust import is_named  # it prints, for which it imports much

    return is_named(user)


def open_to_write(path: Path, flags: int, mode: int = 0o666, *, links: int = 0) -> int:
    """The descriptor of a file that is written in its place.

    Args:
        path: of the file; a link to it if it belongs to this user, to root or to the owner of the folder.
        flags: as for `os.open`.
        mode: of a new file, which the umask may lessen.
        links: that led to it.

    Raises:
        OSError: it cannot be opened, is a pipe, or a link of somebody else leads to it.
    """
    with folder_of(path) as (name, folder):
        try:
            more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a reader would hold an open
            descriptor = os.open(name, flags | more, mode, dir_fd=folder)
        except OSError as error:
            target = _target(folder, path, name) if error.errno == errno.ELOOP else None
            if target is None or links >= _MOST_LINKS:
                error.filename = str(path)
                raise
        else:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(kind) or stat.S_ISDIR(kind):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "it is not a file but a pipe or a folder; remove it", str(path))
            return descriptor
    return open_to_write(path.parent / target, flags, mode, links=links + 1)


def create(path: Path) -> BufferedWriter:
    """A file that is written in its place, empty at first; raises as `open_to_write`."""
    return os.fdopen(open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def make_folder(path: Path) -> None:
    """Make a folder unless it is there; raises as `remove`."""
    try:
        with folder_of(path) as (name, folder):
            os.mkdir(name, dir_fd=folder)
    except OSError as error:
        if not (isinstance(error, FileExistsError) and path.is_dir()):
            error.filename = error.filename if error.errno == errno.ELOOP else str(path)
            raise


def remove(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file, or a link itself.

    Raises:
        OSError: it cannot be removed, or a link of somebody else leads to its folder.
    """
    try:
        with folder_of(path) as (name, folder):
            os.unlink(name, dir_fd=folder)
    except OSError as error:
        if not (missing_ok and isinstance(error, FileNotFoundError)):
            error.filename = error.filename if error.errno == errno.ELOOP else str(path)
            raise


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with all that is in it.

    Raises:
        OSError: it or a part of it cannot be removed, or a link of somebody else leads to its folder.
    """
    try:
        with folder_of(path) as (name, folder):
            shutil.rmtree(name, ignore_errors, dir_fd=folder)
    except OSError:
        if not ignore_errors:
            raise


def replace(path: Path, final: Path) -> None:
    """Rename a file or folder, as `os.replace`.

    Raises:
        OSError: it cannot be renamed, or a link of somebody else leads to a folder of either.
    """
    with folder_of(path) as source, folder_of(final) as place:
        try:
            if source.folder is place.folder is None:
                os.replace(path, final)
            else:
                os.replace(source.name, place.name, src_dir_fd=source.folder, dst_dir_fd=place.folder)
        except OSError as error:
            error.filename, error.filename2 = str(path), str(final)
            raise


def remove_folder(path: Path, dying: str) -> None:
    """Remove a folder from the one that it is in now, whatever comes in the place of that one.

    Args:
        path: of the folder.
        dying: name beside it under which it is removed, and what an earlier try has left there.

    Raises:
        UserError: the folder above is a link of somebody else.
        OSError: it, or a part of it, cannot be removed.
    """
    with held_folder(path.parent) as above:
        shutil.rmtree(dying, ignore_errors=True, dir_fd=above)
        try:
            os.replace(path.name, dying, src_dir_fd=above, dst_dir_fd=above)
            shutil.rmtree(dying, dir_fd=above)
        except OSError:
            shutil.rmtree(dying, ignore_errors=True, dir_fd=above)  # all that can be
            raise
