"""The ledger of a run: one line when a stage starts and one when it ends, whoever started it.

`ledger.jsonl` in the run folder is what is true about attempts when the scheduler has forgotten them.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from pipeline.errors import EXIT_OK, EXIT_OTHER


class Ledger:
    """Appends to, and reads, the ledger of a run folder."""

    def __init__(self, run: Path) -> None:
        self._path = run / "ledger.jsonl"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record that a stage starts, and how and after how many seconds it ends."""
        start = time.time()
        entry = {"stage": name, "host": socket.gethostname(), "pid": os.getpid(), "start": start}
        self._append({**entry, "event": "start"})
        code = EXIT_OTHER
        try:
            yield
            code = EXIT_OK
        except BaseException as error:
            code = getattr(error, "exit_code", EXIT_OTHER)
            raise
        finally:
            self._append({**entry, "event": "end", "exit": code, "seconds": time.time() - start})

    def seconds(self) -> dict[str, float]:
        """Seconds by stage over all attempts that ended, the failed ones included."""
        total: dict[str, float] = defaultdict(float)
        for entry in self.entries():
            if entry["event"] == "end":
                total[entry["stage"]] += entry["seconds"]
        return dict(total)

    def entries(self) -> list[dict[str, Any]]:
        """All lines but those that a crash cut short."""
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_bytes().splitlines():
            try:
                found.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                continue
        return found

    def _append(self, entry: dict[str, Any]) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(orjson.dumps(entry) + b"\n")
