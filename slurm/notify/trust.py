"""Commands of notifications are executed as this user, so nobody else may have put them there."""

from __future__ import annotations

import os

from pipeline.common.errors import UserError
from pipeline.config import Config
from slurm.submit.integrity import is_own_group, refuse_replaceable

_TODO = "start it from a run file of yours that names the commands, or with notify=[]"


def refuse_commands_of_others(config: Config) -> None:
    """Refuse commands that come from a run folder to which others may write.

    A job reads them from its submission, which is compared with what was sent.

    Raises:
        UserError: somebody else may have written the file that they come from.
    """
    if not any(entry.command for entry in config.notify):
        return
    for path in config.written:
        folder, file = path.absolute().parent, path.stat()
        refuse_replaceable(folder, f"notify has commands; {_TODO}")
        group = file.st_mode & 0o020 and not is_own_group(file.st_gid)
        if file.st_uid not in (0, os.geteuid()) or group or file.st_mode & 0o002:
            raise UserError(f"notify has commands, and {path} may have been written by another user; {_TODO}")
