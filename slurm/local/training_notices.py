"""Notices of a training that this process starts on this machine, without a job."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.common.console import Console, warn
from pipeline.common.errors import EXIT_OK, EXIT_REFUSED, end_reason, exit_code
from pipeline.config import Config
from pipeline.config.parsing.code_keys import refuse_code_of_others
from pipeline.train.run.lock import last_attempt
from slurm.job.srun_task import LOGS
from slurm.notify.notices import Notices, end_of, harmless, tell_end

_LOOK = 10.0
"""Seconds between looks at the files of the run."""


@contextmanager
def notified_training(config: Config, console: Console | None) -> Iterator[None]:
    """Tell of the training inside. One that was refused before it began is told of at the terminal alone."""
    if not config.notify or LOGS in os.environ:  # of a job, which tells itself
        yield
        return
    refuse_code_of_others(config, "notify")
    before, run = last_attempt(config.run.dir), config.run.dir

    def tell(text: str) -> None:
        warn(console or Console(), text)

    notices = Notices(config, "train", tell)
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK):
            notices.look(before, running=True)

    thread = threading.Thread(target=look, name="notices", daemon=True)
    thread.start()
    code, reason = EXIT_OK, "all steps are trained"
    try:
        yield
    except BaseException as error:
        code, reason = exit_code(error), end_reason(error)
        raise
    finally:
        ended.set()
        thread.join(_LOOK)
        with harmless(tell):
            if code != EXIT_REFUSED or last_attempt(run) > before:
                notices.look(before, running=False)
                tell_end(notices, end_of(run, code, reason, before))
        notices.close()
