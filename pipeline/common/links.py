"""Symbolic links that other users have put into a shared folder: nothing is written or removed where they lead.

The rule is that of Linux for folders like /tmp (`fs.protected_symlinks`), for every folder.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.common.errors import UserError


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
