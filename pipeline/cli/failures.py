"""Messages and exit codes of commands that fail."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from typing import Any

from typer.core import TyperGroup

from pipeline import __version__
from pipeline.common.console import alarm, echo
from pipeline.common.errors import EXIT_INTERRUPTED, EXIT_OTHER, RankFailed, Stopped, UserError
from pipeline.train.distributed.rank import is_consequence, is_rank, record_error

_ADVICE = {
    errno.ENOSPC: "free some space or point run.dir and data.dir to another disk, then run the same command again; "
    "what was committed is kept",
    errno.EDQUOT: "free some of your quota or point run.dir and data.dir to another disk, then run the same command "
    "again; what was committed is kept",
    errno.EROFS: "point run.dir and data.dir to a writable disk",
    errno.EACCES: "check the permissions, or point run.dir and data.dir to a folder that you own",
    errno.EPERM: "check the permissions, or point run.dir and data.dir to a folder that you own",
    errno.ENOENT: "check the path in the run file or on the command line",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.EIO: "the disk or network file system failed; run the same command again when it works again",
    errno.ESTALE: "the disk or network file system failed; run the same command again when it works again",
}


class CommandGroup(TyperGroup):
    """Turns what a command raises into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            # Now, while somebody is listening to errors: a full disk or a closed pipe behind `>` and `|`.
            sys.stdout.flush()
            return result
        except (UserError, Stopped, RankFailed, OSError, KeyboardInterrupt) as error:
            record_error(error)
            if os.environ.get("PIPELINE_DEBUG") == "1":
                echo(traceback.format_exc(), end="", error=True)
            sys.exit(report_error(error))
        except Exception as error:
            # Its class is typer's own in some versions, click's in others.
            if type(error).__name__ == "NoSuchOption":
                _name_keys(error)
            raise


def report_error(error: BaseException) -> int:
    """Say what happened in one message and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough; another would only interrupt the leaving
        alarm("interrupted:", "what was committed is kept; run the same command to resume")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError) and error.filename is None:
        # The reader of our output has gone (`| head`). Nobody is left to tell, and the exit must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OTHER
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename is not None else ""
        advice = f"; {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
        alarm("error:", f"{path}{error.strerror or error}{advice}")
        return EXIT_OTHER
    assert isinstance(error, (Stopped, RankFailed, UserError))
    if not (isinstance(error, RankFailed) and error.shown):
        alarm("stopped:" if isinstance(error, Stopped) else "error:", str(error))
    return error.exit_code


def report_mistake(error: BaseException) -> int:
    """Say what nobody foresaw and return the exit code."""
    if is_rank() and is_consequence(error):
        # The launcher tells of the rank that failed first; a traceback of this one would only be in the way.
        first = str(error).strip().split("\n", maxsplit=1)[0].partition(". ")[0]
        alarm("error:", f"rank {os.environ.get('RANK')} has lost another process of the run ({first[:200]})")
        return EXIT_OTHER
    trace = "".join(traceback.format_exception(error))
    echo(trace, end="", error=True)
    from pipeline.config.plugins import plugins_in

    if plugins := plugins_in(trace):
        alarm(
            "error:",
            f"{type(error).__name__}: likely an error of the plug-in {' or '.join(map(str, plugins))}, whose code the "
            "lines above go through; its authors need these lines and the output of `pipeline config show`",
        )
        return EXIT_OTHER
    alarm(
        "error:",
        f"{type(error).__name__}: this is a bug in the program, not a mistake in your run; please report it with the "
        f"lines above, the output of `pipeline config show` and the version ({__version__})",
    )
    return EXIT_OTHER


def _name_keys(error: Any) -> None:
    """Add the keys of run files that an unknown option may mean to the message of its error."""
    from pipeline.config.parsing.schema import keys_like
    from pipeline.config.root import Config

    if near := keys_like(Config, error.option_name.lstrip("-").replace("-", "_")):
        error.message += f"; keys of the run file have no dashes: {' or '.join(f'{key}=VALUE' for key in near)}"
        error.possibilities = None
