"""A logger that is tried again later while its disk is full."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from typing import Any

from pipeline.train.monitor.loggers.base import Logger

_KEPT = 100_000
"""Rows that are kept for a logger that cannot be written to; the oldest go first."""
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until such a logger is tried again: at first, and at most."""


class RetryingLogger(Logger):
    """A logger whose disk may be full for a while: rows are kept, and written when there is room again."""

    def __init__(self, name: str, logger: Logger) -> None:
        self._name = name
        self._logger = logger
        self._rows: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._failing = False
        self._pause = 0.0
        self._again = 0.0

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) > _KEPT:
            self._rows.popleft()
            self._lost += 1
        if time.monotonic() >= self._again:
            self._write_all()

    def _write_all(self) -> None:
        try:
            while self._rows:
                self._logger.write(self._rows[0])
                self._rows.popleft()
        except OSError as error:
            if not self._failing:
                self._say("%s; training continues, and metrics are written as soon as they can be", error)
            self._failing, self._pause = True, min(max(_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
            self._again = time.monotonic() + self._pause
            return
        if self._failing:
            self._say("written again; %d rows were lost", self._lost)
        self._failing, self._pause, self._lost = False, 0.0, 0

    def rewind(self, step: int) -> None:
        if not self._logger.keeps_all:
            self._rows = deque(row for row in self._rows if row["step"] <= step)
        with suppress(OSError):  # which the next row meets, too
            self._logger.rewind(step)

    def close(self) -> None:
        try:
            if self._rows:
                self._write_all()
            self._logger.close()
        except OSError as error:
            self._say("closing: %s", error)
        if self._rows:
            self._say("%d rows could not be written", len(self._rows) + self._lost)

    def wait(self) -> None:
        self._logger.wait()

    def _say(self, text: str, *values: object) -> None:
        logging.getLogger(__name__).warning("%s: " + text, self._name, *values)
