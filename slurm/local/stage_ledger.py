"""The ledger of a run: one line when a stage starts and one when it ends, whoever started it.

`ledger.jsonl` in the run folder is what is true about attempts when the scheduler has forgotten them. The training
itself adds a line for each attempt that begins and one for its end; see `pipeline.train.run.attempts`.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pipeline.common.errors import EXIT_OK, end_reason, exit_code
from pipeline.common.run_files import RunFiles
from pipeline.train.run.attempts import append_entry


class Ledger:
    """Appends to, and reads, the ledger of a run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record that a stage starts, and how, why and after how many seconds it ends."""
        start, clock = time.time(), time.monotonic()
        entry = {"stage": name, "host": socket.gethostname(), "pid": os.getpid(), "start": start}
        append_entry(self._run, {**entry, "event": "start"})
        code = EXIT_OK
        why: dict[str, str] = {}
        try:
            yield
        except BaseException as error:
            code = exit_code(error)
            why = {"reason": end_reason(error).strip().partition("\n")[0]}
            raise
        finally:
            # Where a full disk ended the stage, this cannot be written either; the first message is the better one.
            with suppress(OSError) if code != EXIT_OK else nullcontext():
                seconds = time.monotonic() - clock
                append_entry(self._run, {**entry, "event": "end", "exit": code, "seconds": seconds, **why})

    def seconds(self) -> dict[str, float]:
        """Seconds by stage over all attempts that ended, the failed ones included."""
        total: dict[str, float] = defaultdict(float)
        for entry in self.entries():
            if entry["event"] == "end":
                total[entry["stage"]] += entry["seconds"]
        return dict(total)

    def entries(self) -> list[dict[str, Any]]:
        """All lines but those that a crash cut short."""
        return [entry for entry in RunFiles(self._run).ledger_lines() if "event" in entry]
