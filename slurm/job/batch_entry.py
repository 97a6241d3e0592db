"""Entry point of a job's script: `python -m slurm.job.batch_entry CHAIN_JOB FILE DIGEST`, one batch process a job.

With `killed` in place of the number it tells of the end of a batch process that was killed and is not started again.

There is no pickle: the file of the submission is JSON, and it is read only if it is what was submitted.
"""

from __future__ import annotations

import signal
import sys

from pipeline.common import storage
from pipeline.common.console import alarm, flush
from pipeline.common.errors import EXIT_OTHER, UserError
from pipeline.common.redaction import mask_streams
from pipeline.common.signals import stop_signals


def main() -> None:
    """Run the batch process."""
    mask_streams("stdout", "stderr")
    # Until the job listens to them: a signal ahead of the time limit, say, must not end what has just begun. Not
    # SIG_IGN, which the processes that are started from here would have, too.
    early: set[int] = set()
    for number in (*stop_signals(), signal.SIGCONT):
        signal.signal(number, lambda number, _: early.add(number))
    storage.keep_room(sys.stdout.fileno())  # what a job says at its end matters most on a disk that is full
    chain_job, file, digest = sys.argv[1:]
    from slurm.job.batch_main import run_submission, tell_killed

    try:
        if chain_job == "killed":
            tell_killed(file, digest)
        else:
            run_submission(file, int(chain_job), digest, early)
    except UserError as error:
        alarm("error:", str(error))
        flush()
        sys.exit(error.exit_code)
    except OSError as error:
        alarm("error:", f"{error.filename or 'the job'}: {error.strerror or error}")
        flush()
        sys.exit(EXIT_OTHER)


if __name__ == "__main__":
    main()
