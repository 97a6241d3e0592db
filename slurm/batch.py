"""What the script of a job starts: `python -m slurm.batch LINK FILE DIGEST`, one batch process a job.

There is no pickle: the file of the submission is JSON, and it is read only if it is what was submitted.
"""

from __future__ import annotations

import signal
import sys

from pipeline.console import echo
from pipeline.errors import UserError
from pipeline.signals import stop_signals


def main() -> None:
    """Be the batch process."""
    # Until the link listens to them: a signal ahead of the time limit, say, must not end what has just begun. Not
    # SIG_IGN, which the processes that are started from here would have, too.
    for number in (*stop_signals(), signal.SIGCONT):
        signal.signal(number, lambda *_: None)
    link, file, digest = sys.argv[1:]
    from slurm.link import run_link

    try:
        run_link(file, int(link), digest)
    except UserError as error:
        echo(f"error: {error}", error=True, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
