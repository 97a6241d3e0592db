"""Access to a run for others than its owner: group and permissions of its files."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from pipeline.common import storage, trust
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.train.run.folder import make_writable
from slurm import jobs
from slurm.record import integrity


def apply_permissions(config: Config) -> None:
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
    for folder in (config.run.dir, RunFiles(config.run.dir).slurm):
        storage.make_below(config.run.dir, folder)
        _give_to_group(folder, group)


def private_folder(config: Config, run: Path) -> Path | None:
    """Folder for what jobs execute, where that is not the run folder because others may write there.

    Args:
        config: of the run.
        run: its folder, or that of a sweep.
    """
    base = config.slurm.private_dir
    if base is None:
        if config.slurm.group is None and not _others_will_write(config, run) and not _is_of_others(run):
            return None
        base = Path.home() / ".pipeline"
    return base / f"{run.name}-{value_hash(str(run))[:8]}"


def _is_of_others(run: Path) -> bool:
    """True if another user owns a run folder, who may put other files in the place of those that jobs execute."""
    owners = {folder.stat().st_uid for folder in (run, RunFiles(run).slurm) if folder.exists()}
    return not owners <= {0, os.geteuid()}


def _others_will_write(config: Config, run: Path) -> bool:
    """True if folders that this process makes in a run may be written by others than its user."""
    umask = int(config.slurm.umask, 8) if config.slurm.umask is not None else _umask()
    if umask & 0o022 == 0o022:
        return False
    if umask & 0o002 == 0 or config.slurm.umask is not None:
        return True
    # Many systems give each user a group, and all of them the umask 0002.
    above = next(each for each in (run, *run.absolute().parents) if each.exists()).stat()
    return not trust.is_own_group(above.st_gid if above.st_mode & stat.S_ISGID else os.getegid())


def make_private(config: Config, run: Path) -> Path | None:
    """Make the private folder of a run, to which nobody else may write.

    Raises:
        UserError: others may write to it or above it, or it cannot be made.
    """
    folder = private_folder(config, run)
    if folder is None:
        return None
    todo = "set slurm.private_dir to a folder of yours on a disk that all nodes share"
    own = [folder, *(each for each in folder.parents if not each.exists())]
    try:
        with integrity.for_owner_alone():
            for each in (*reversed(own), folder / jobs.CODE, folder / jobs.SUBMISSIONS, folder / jobs.LOGS):
                each.mkdir(exist_ok=True)
                integrity.others_cannot_write(each)
    except OSError as error:
        raise UserError(f"slurm.private_dir: {folder} cannot be made ({error.strerror}); {todo}") from error
    trust.refuse_replaceable(folder, todo)
    return folder


def _give_to_group(folder: Path, group: str) -> None:
    """Give a folder to a group, also what will be made in it."""
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
    """The umask of this process; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
