"""A trial of the notifications of a run: `pipeline doctor RUN --notify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.common.console import Console, say
from pipeline.common.errors import MachineError, UserError
from pipeline.config.load import load_run
from pipeline.config.parsing.code_keys import refuse_code_of_others
from slurm.notify.notice import Notice
from slurm.notify.outbox import deliver, describe


def try_notifications(run: Path | None, overrides: Sequence[str], console: Console) -> None:
    """Send a test message through each notification. What a command prints goes to the terminal.

    Args:
        run: run file or run folder.
        overrides: of the run file.
        console: for the results.

    Raises:
        UserError: there are none, or others may have written the commands.
        MachineError: one of them failed.
    """
    if run is None:
        raise UserError("--notify needs a run file: `pipeline doctor RUN.yaml --notify`")
    config = load_run(run, overrides)
    if not config.notify:
        raise UserError(
            f"{run} has no notifications to try; add some (notify: [{{on: [failed], command: [...]}}]), see "
            "docs/monitoring.md"
        )
    refuse_code_of_others(config, "notify")
    problems = []
    for number, entry in enumerate(config.notify):
        notice = Notice(entry.on[0], config.run.dir, "train", "a test message; nothing has happened", test=True)
        problem = deliver(entry, notice, show=True)
        say(console, f"{describe(number, entry)}: {problem or f'told that {notice.event}'}")
        if problem:
            problems.append(describe(number, entry))
    if problems:
        raise MachineError(f"{', '.join(problems)} did not work; what is above says why")
