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
        self._calls: deque[dict[str, Any] | int] = deque()
        """Rows to write and steps to rewind to, in their order."""
        self._lost = 0
        self._failing = False
        self._pause = 0.0
        self._again = 0.0

    def write(self, row: dict[str, Any]) -> None:
        self._calls.append(row)
        if len(self._calls) > _KEPT:
            self._calls.popleft()
            self._lost += 1
        if time.monotonic() >= self._again:
            self._make_calls()

    def rewind(self, step: int) -> None:
        self._calls.append(step)
        if not self._failing:
            self._make_calls()

    def _make_calls(self) -> None:
        try:
            while self._calls:
                self._call(self._calls[0])
                self._calls.popleft()
        except OSError as error:
            if not self._failing:
                self._say("%s; training continues, and metrics are written as soon as they can be", error)
            self._failing, self._pause = True, min(max(_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
            self._again = time.monotonic() + self._pause
            return
        if self._failing:
            self._say("written again; %d rows were lost", self._lost)
        self._failing, self._pause, self._lost = False, 0.0, 0

    def _call(self, what: dict[str, Any] | int) -> None:
        if isinstance(what, dict):
            self._logger.write(what)
            return
        with suppress(OSError):  # which the next row meets, too
            self._logger.rewind(what)

    def close(self) -> None:
        try:
            if self._calls:
                self._make_calls()
            self._logger.close()
        except OSError as error:
            self._say("closing: %s", error)
        if self._calls:
            rows = sum(isinstance(each, dict) for each in self._calls)
            self._say("%d rows could not be written", rows + self._lost)

    def _say(self, text: str, *values: object) -> None:
        logging.getLogger(__name__).warning("%s: " + text, self._name, *values)
