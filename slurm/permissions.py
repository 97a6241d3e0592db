"""Who may look after a run besides its owner: the group and the permissions of what is written for it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.train.run_folder import make_writable
from slurm import jobs


def honour(config: Config) -> None:
    """Let new files of this process have the permissions and group that `slurm:` names.

    Raises:
        UserError: there is no such group, or this user may not give folders to it.
    """
    if config.slurm.umask is not None:
        os.umask(int(config.slurm.umask, 8))
    group = config.slurm.group
    if group is None:
        return
    make_writable(config.run.dir)
    for folder in (config.run.dir, jobs.folder(config.run.dir)):
        folder.mkdir(exist_ok=True)
        _give(folder, group)


def _give(folder: Path, group: str) -> None:
    """To a group, also what will be made in it."""
    try:
        before, mask = folder.stat(), _umask()
        shutil.chown(folder, group=group)
        folder.chmod(stat.S_IMODE(before.st_mode) | stat.S_ISGID | (stat.S_IRWXG & ~mask))
    except LookupError:
        raise UserError(f"slurm.group = {group}: there is no such Unix group here; `id -Gn` lists yours") from None
    except PermissionError as error:
        if folder.stat().st_uid != os.getuid():
            return  # another member of the group has made it, and alone may change it
        raise UserError(
            f"slurm.group = {group}: {folder} cannot be given to it ({error.strerror}); name a group that you are in "
            "(`id -Gn` lists them)"
        ) from None


def _umask() -> int:
    """Of this process; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
