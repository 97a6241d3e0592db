"""Numbers out of the loop: to all loggers of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

import torch

from pipeline.train.host.devices import device_of_driver
from pipeline.train.monitor.loggers.base import Logger
from pipeline.train.monitor.loggers.retrying import RetryingLogger


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Dense peak of the device in the compute dtype, or None where it is not known.

    A slice of a device, or a variant with other clocks, has no MFU rather than a wrong one; and so has fp32, whose
    products may or may not use the tensor cores.
    """
    if device.type != "cuda" or compute == "fp32":
        return None
    known = device_of_driver(torch.cuda.get_device_name(device))
    return None if known is None else known.flops[compute]


_CHECK_SECONDS = 1.0
"""Between two looks at whether the rows may still be written, each of which reads a small file."""


class Metrics(AbstractContextManager["Metrics"]):
    """All loggers of a run, by name. A context manager: they are closed however the run ends.

    No logger ends the run: one that cannot be written to, on a full disk, is tried again later.

    Args:
        loggers: with their names.
        check: refuses, by raising, to write in a run folder that another process has taken over.
    """

    def __init__(self, loggers: Sequence[tuple[str, Logger]], check: Callable[[], None] = lambda: None) -> None:
        self._loggers = [RetryingLogger(name, logger) for name, logger in loggers]
        self._check = check
        self._checked = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger in self._loggers:
            logger.close()
        for logger in self._loggers:
            logger.wait()

    def write(self, row: dict[str, Any]) -> None:
        """Hand a row to every logger.

        Raises:
            MachineError: another process has taken the run folder over.
        """
        if time.monotonic() - self._checked >= _CHECK_SECONDS:
            self._checked = time.monotonic()
            with suppress(OSError):  # a disk that cannot be read now says nothing of the run's lock
                self._check()
        for logger in self._loggers:
            logger.write(row)

    def rewind(self, step: int) -> None:
        """Tell every logger that the run resumes from an earlier step: later ones no longer count."""
        for logger in self._loggers:
            logger.rewind(step)
