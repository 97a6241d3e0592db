"""Loggers behind a thread of their own, so that training never waits for a network or a service of others."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.common import storage
from pipeline.common.redaction import masked
from pipeline.train.monitor.loggers.base import Logger

_BATCH = 200
"""Rows that are sent at once."""
_INTERVAL = 0.5
"""Seconds in which rows gather before they are sent."""
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a tracker that failed is tried again: at first, and at most."""
_CLOSE = 15.0
"""Seconds that the end of a run waits for a tracker at most."""
_READ_ERROR, _SHOWN_ERROR = 10_000, 300
"""Characters of an error that are looked at, and shown, at most: it may have a page of a server in it."""


class NumberedRow(NamedTuple):
    """A row of metrics.jsonl and the number of its line, from 1."""

    number: int
    row: dict[str, Any]


class BatchLogger:
    """A `Logger` that takes several rows at a time, and can tell which ones its tracker has.

    After an error it is opened anew, and continues after the rows that the tracker has by then: no row is missing, and
    none is there twice.
    """

    def sent(self) -> int | None:
        """Number of the last row that the tracker has, 0 if it has none; None: the rows before this attempt."""
        raise NotImplementedError

    def send(self, rows: Sequence[NumberedRow]) -> None:
        """Log rows, in the order of their numbers. Raises whatever it may; then the rows come again."""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """As `Logger.rewind`."""

    def close(self) -> None:
        """As `Logger.close`."""


class BackgroundLogger(Logger):
    """A logger that is opened, called and closed by a thread of its own.

    metrics.jsonl is the queue: `write` tells the thread that the file has grown, and the thread reads it from where it
    is. So what waits takes no memory, and is still there for the next attempt. A logger that fails is tried again
    later, with one warning. The end of a run waits for it for a bounded time.
    """

    def __init__(self, name: str, rows: Path, open: Callable[[], Logger | BatchLogger]) -> None:
        """Start the thread, which opens the logger.

        Args:
            name: for messages.
            rows: metrics.jsonl, which is written before this logger is told of a row.
            open: opens the logger. It may raise, and is called again then.
        """
        self._name, self._file, self._open = name, rows, open
        self._logger: Logger | BatchLogger | None = None
        self._place = _Place(*_lines(rows))
        self._rewinds: deque[tuple[int, int]] = deque()
        """Sizes of the file at which the run went back, and the steps that it went back to."""
        self._grown, self._closing = threading.Event(), threading.Event()
        self._failing = False
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def write(self, row: dict[str, Any]) -> None:
        self._grown.set()

    def rewind(self, step: int) -> None:
        with suppress(OSError):
            self._rewinds.append((self._file.stat().st_size, step))

    def close(self) -> None:
        self._deadline = time.monotonic() + _CLOSE
        self._closing.set()
        self._grown.set()

    def wait(self) -> None:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        with suppress(OSError):
            if missing := _lines(self._file)[1] - self._place.number:
                self._say("rows of metrics.jsonl that were not sent: %d; the file has them", missing)

    def _run(self) -> None:
        pause = 0.0
        while True:
            closing = self._closing.is_set()
            try:
                waiting = self._send_some()
            except BaseException as error:  # whatever it is, exits too: a service of others does not end a run
                self._warn(error)
                if closing:
                    break
                pause = min(max(_PAUSE, 2 * pause), _LONGEST_PAUSE)
                self._closing.wait(pause)
                continue
            if waiting:
                continue
            if self._failing:
                self._say("sent again, from the first row that was missing")
            self._failing, pause = False, 0.0
            if closing:
                break
            self._grown.wait()
            self._grown.clear()
            self._closing.wait(_INTERVAL)
        try:
            if self._logger is not None:
                self._logger.close()
        except BaseException as error:
            self._warn(error)

    def _send_some(self) -> bool:
        """Send the next rows, with the logger opened before; True if there may be more."""
        if self._logger is None:
            self._logger = self._open()
            if isinstance(self._logger, BatchLogger):
                sent = self._logger.sent()
                if sent is not None:
                    # Fewer lines than that: the file is not the one it was then.
                    self._place = _Place(*_lines(self._file, sent))
        while self._rewinds and self._rewinds[0][0] <= self._place.offset:
            self._logger.rewind(self._rewinds.popleft()[1])
        batches = isinstance(self._logger, BatchLogger)
        rows, place = self._read(_BATCH if batches else 1)
        try:
            if isinstance(self._logger, Logger):
                for _, row in rows:
                    self._logger.write(row)
            elif rows:
                self._logger.send(rows)
        except BaseException:
            if batches:
                self._logger = None  # the next one finds out what has arrived
            raise
        read, self._place = place != self._place, place
        return read

    def _read(self, most: int) -> tuple[list[NumberedRow], _Place]:
        """The next rows, up to the next rewind, and the place after them. Damaged lines are skipped."""
        rows: list[NumberedRow] = []
        offset, number = self._place
        until = self._rewinds[0][0] if self._rewinds else None
        try:
            file = self._file.open("rb")
        except FileNotFoundError:  # before the first row
            return [], self._place
        with file:
            file.seek(offset)
            for line in file:
                if len(rows) == most or not line.endswith(b"\n") or (until is not None and offset >= until):
                    break
                offset, number = offset + len(line), number + 1
                row = storage.json_object(line)
                if row is not None and "step" in row:
                    rows.append(NumberedRow(number, row))
        return rows, _Place(offset, number)

    def _warn(self, error: BaseException) -> None:
        if not self._failing:
            self._say("%s; training continues, and metrics are sent as soon as they can be", shown(error))
        self._failing = True

    def _say(self, text: str, *values: object) -> None:
        logging.getLogger(__name__).warning("%s: " + text, self._name, *values)


def shown(error: BaseException) -> str:
    """The text of an error of a tracker in a line, without what may be secret."""
    try:
        text = " ".join(str(error)[:_READ_ERROR].split())
    except Exception:  # of its own `__str__`
        text = ""
    return masked(text or type(error).__name__)[:_SHOWN_ERROR]


class _Place(NamedTuple):
    """A place in metrics.jsonl: bytes and lines before it."""

    offset: int
    number: int


def _lines(path: Path, most: int | None = None) -> tuple[int, int]:
    """Bytes and number of the whole lines of a file, or of the first ones; none of a file that is not there."""
    offset = number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if number == most or not line.endswith(b"\n"):
                    break
                offset, number = offset + len(line), number + 1
    except FileNotFoundError:
        pass
    return offset, number
