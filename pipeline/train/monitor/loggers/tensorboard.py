"""TensorBoard: event files in the run folder."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common import links
from pipeline.train.monitor.loggers.base import Logger, flat

_FLUSH = 30.0
"""Seconds after which TensorBoard has a row."""


class TensorBoard(Logger):
    """Scalars of a row under the same names as in metrics.jsonl, nested ones with a slash."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        """Those that may not be in the file yet, which are written again where a write fails."""
        self._flushed = time.monotonic()
        self._purge: int | None = first_step + 1
        """Step from which on nothing that was logged earlier is shown."""
        self._writer: Any = None
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        links.make_folder(self._folder)
        with links.folder_of(self._folder / "events"):  # not where a link of somebody else leads
            _silence_writers()
        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge)
        self._purge = None

    def write(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            self._open()
            for each in self._rows:
                self._add(each)
        self._add(row)
        self._rows.append(row)
        if time.monotonic() - self._flushed > _FLUSH:
            self._flush()

    def _add(self, row: dict[str, Any]) -> None:
        # A thread of TensorBoard's does the writing. Once it has failed it is over, and so is its file.
        try:
            for name, value in flat(row).items():
                self._writer.add_scalar(name, value, row["step"])
        except OSError:
            self._drop()
            raise

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError:
            self._rows.pop()  # the last one is given to us again
            self._drop()
            raise
        self._rows.clear()
        self._flushed = time.monotonic()

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        with suppress(OSError):
            writer.close()

    def rewind(self, step: int) -> None:
        self._purge = step + 1
        self._rows = [row for row in self._rows if row["step"] <= step]
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
            self._rows.clear()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _silence_writers() -> None:
    """Print no traceback of a TensorBoard thread that meets a full disk; the next row raises its error."""
    before = threading.excepthook
    if getattr(before, "__name__", "") == "of_writers":
        return

    def of_writers(arguments: threading.ExceptHookArgs) -> None:
        writes = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (writes and isinstance(arguments.exc_value, OSError)):
            before(arguments)

    threading.excepthook = of_writers
