"""Reads the metrics of a run: once, or again and again while it trains, and then only what is new."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.run_files import RunFiles
from pipeline.eval.report.reading import MALFORMED
from pipeline.eval.report.series import Columns
from pipeline.train.run.attempts import Attempt
from pipeline.train.run.goodput import Goodput, GoodputSums

_TAIL = 256
"""Bytes before the place read to, by which it is known that the file is still the same."""


class Follower:
    """The objects of a file of JSON lines that is appended to: each call reads those that are new.

    A line counts once its end is written. A file that was replaced or cut is read from its begin again.

    Args:
        path: of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._place = 0
        self._tail = b""

    def rows(self, unread: Callable[[], None], restarted: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """The new objects.

        Args:
            unread: called for each line that is none.
            restarted: called before the first object if all before do not count any more.
        """
        try:
            file = storage.open_regular(self._path)
        except FileNotFoundError:
            if self._place:
                self._begin()
                restarted()
            self._file = None
            return
        with file:
            status = os.fstat(file.fileno())
            which = (status.st_dev, status.st_ino)
            file.seek(self._place - len(self._tail))
            if self._place and (which != self._file or file.read(len(self._tail)) != self._tail):
                self._begin()
                restarted()
            self._file = which
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._place += len(line)
                self._tail = (self._tail + line)[-_TAIL:]
                if (row := storage.json_object(line)) is not None:
                    yield row
                elif line.strip():
                    unread()

    def _begin(self) -> None:
        self._place, self._tail = 0, b""


class MetricsReader:
    """Columns and goodput of a run.

    Args:
        folder: of the run.
        follows: whether `read` is called again and again, and reads only what is new then.
        seen: told each row.
    """

    def __init__(
        self, folder: Path, *, follows: bool = False, seen: Callable[[dict[str, Any]], None] = lambda row: None
    ) -> None:
        self._path = RunFiles(folder).metrics
        self._follower = Follower(self._path) if follows else None
        self._seen = seen
        self._restart()

    def _restart(self) -> None:
        self.columns = Columns()
        self._sums: GoodputSums | None = GoodputSums()
        self._unread = 0
        self._without_goodput = ""

    def read(
        self, tries: Sequence[Attempt], again: Callable[[], Sequence[Attempt]]
    ) -> tuple[Columns, Goodput | None, list[str]]:
        """All steps so far, and what is wrong with the file.

        Args:
            tries: attempts, as they were known before this call.
            again: tells them anew, where a row is of an attempt that began in between.

        Raises:
            OSError: the file cannot be read.
        """
        if self._follower is not None and self.columns.contradicted(tries):
            self._follower = Follower(self._path)
            self._restart()
        self._know(tries)
        known = {each.number for each in tries}

        def unread() -> None:
            self._unread += 1

        def restarted() -> None:
            self._restart()
            self._know(tries)

        follower = self._follower
        rows = storage.json_lines(self._path, unread) if follower is None else follower.rows(unread, restarted)
        for row in rows:
            attempt = row.get("attempt")
            if follower is not None and type(attempt) is int and attempt not in known:
                known.add(attempt)
                tries = [each for each in again() if each.number <= attempt]
                self._know(tries)
            self._add(row)
        self.columns.finish()
        return self.columns, self._goodput(tries), self._problems()

    def _know(self, tries: Sequence[Attempt]) -> None:
        self.columns.know(tries)
        if self._sums is not None:
            self._sums.know(tries)

    def _add(self, row: dict[str, Any]) -> None:
        self.columns.add(row)
        self._seen(row)
        if self._sums is not None:
            try:
                self._sums.add(row)
            except MALFORMED as error:
                self._sums, self._without_goodput = None, str(error) or type(error).__name__

    def _goodput(self, tries: Sequence[Attempt]) -> Goodput | None:
        if self._sums is None or not tries:
            return None
        try:
            return self._sums.goodput(tries)
        except MALFORMED as error:
            self._without_goodput = str(error) or type(error).__name__
            return None

    def _problems(self) -> list[str]:
        problems = [f"the goodput cannot be read: {self._without_goodput}"] if self._without_goodput else []
        if lines := self._unread + self.columns.unread:
            problems.append(f"{lines:,} line{'s' * (lines > 1)} of {self._path.name} cannot be read")
        if untimed := self.columns.untimed:
            without = f"{untimed:,} line{'s have' if untimed > 1 else ' has'} no time"
            problems.append(f"{self._path.name}: {without}; the goodput leaves them out")
        return problems
