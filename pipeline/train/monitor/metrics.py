"""Numbers out of the loop: metrics.jsonl always, TensorBoard and W&B if asked, a bar or plain lines on the terminal."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.common import storage
from pipeline.common.console import say
from pipeline.common.errors import UserError, install_extra
from pipeline.common.format import percent
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.train import MetricsConfig
from pipeline.train.planning.devices import device_of_driver
from pipeline.train.run.folder import flat


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Dense peak of the device in the compute dtype, or None where it is not known.

    A slice of a device, or a variant with other clocks, has no MFU rather than a wrong one; and so has fp32, whose
    products may or may not use the tensor cores.
    """
    if device.type != "cuda" or compute == "fp32":
        return None
    known = device_of_driver(torch.cuda.get_device_name(device))
    return None if known is None else known.flops[compute]


_KEPT = 100_000
"""Rows that are kept for a sink that cannot be written to; the oldest go first."""
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until such a sink is tried again: at first, and at most."""
_FLUSH = 30.0
"""Seconds after which TensorBoard has a row."""


class Sink(Protocol):
    """Somewhere that scalars go. What it raises as an `OSError` may be gone later, and the row is given to it again."""

    def write(self, row: dict[str, Any]) -> None:
        """One row of metrics; `step` is in it."""

    def close(self) -> None:
        """Flush."""


@runtime_checkable
class Rewindable(Protocol):
    """A sink that shows steps in order."""

    def rewind(self, step: int) -> None:
        """Forget steps after this one, from which the run resumes: they come again."""


class TensorBoard:
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


class Wandb:
    """Weights & Biases. One W&B run a run folder, over all attempts."""

    def __init__(self, config: MetricsConfig, run_folder: Path, resolved: dict[str, Any]) -> None:
        assert config.wandb is not None
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"train.metrics.wandb is set, but wandb is not installed: {install_extra('wandb')}"
            ) from error
        id_file = RunFiles(run_folder).wandb_id
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=config.wandb.project,
            mode=config.wandb.mode,
            name=run_folder.name,
            dir=str(run_folder),
            id=id_file.read_text(),
            resume="allow",
            config=resolved,
        )
        # Its own count of rows only goes up. Ours goes back where a run does, and a save tells of its step later.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        try:
            self._run.log({**flat(row), "step": row["step"]})
        except Exception as error:  # whatever it is, a service of others does not end a run
            raise OSError(f"W&B: {error}") from error

    def close(self) -> None:
        self._run.finish()


class Terminal:
    """A progress bar on a terminal; elsewhere a plain line for each `every` steps."""

    def __init__(self, console: Console, first: int, total: int, every: int) -> None:
        self._console = console
        self._every = every
        self._total = total
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("train", total=total, completed=first, numbers="")
            self._progress.start()

    def write(self, row: dict[str, Any]) -> None:
        if "loss" not in row:
            if self._progress is not None and row.get("passed_over"):
                self._progress.update(self._task, completed=row["step"])
            return
        numbers = (
            f"loss {row['loss']:.4f}  norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_second']:,.0f} tok/s"
        )
        if "mfu" in row:
            numbers += f"  mfu {percent(row['mfu'], 1)}"
        if "experts" in row:
            numbers += f"  load {row['experts']['load_max_over_mean']:.1f}x"
            numbers += " (forced)" if row["experts"].get("balance_forced") else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], numbers=numbers)
        elif row["step"] % self._every == 0 or row["step"] == self._total:
            say(self._console, f"step {row['step']:>{len(str(self._total))}}/{self._total}  {numbers}")

    def rewind(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def open_sinks(config: Config, run: Path, console: Console, first: int, total: int) -> list[Sink]:
    """All that the metrics of a run go to.

    Args:
        config: of the run.
        run: folder.
        console: for the progress.
        first: steps that are done.
        total: steps of the run.
    """
    metrics = config.train.metrics
    sinks: list[Sink] = [storage.JsonLines(RunFiles(run).metrics)]
    if metrics.tensorboard:
        sinks.append(TensorBoard(RunFiles(run).tensorboard, first))
    if metrics.wandb is not None:
        sinks.append(Wandb(metrics, run, config.model_dump(mode="json")))
    return [*sinks, Terminal(console, first, total, metrics.log_every_steps)]


class _RetryingSink:
    """A sink whose disk may be full for a while: rows are kept, and written when there is room again."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
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
                self.sink.write(self._rows[0])
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
        if isinstance(self.sink, Rewindable):
            self._rows = deque(row for row in self._rows if row["step"] <= step)
            with suppress(OSError):  # which the next row meets, too
                self.sink.rewind(step)

    def close(self) -> None:
        try:
            if self._rows:
                self._write_all()
            self.sink.close()
        except OSError as error:
            self._say("closing: %s", error)
        if self._rows:
            self._say("%d rows could not be written", len(self._rows) + self._lost)

    def _say(self, text: str, *values: object) -> None:
        logging.getLogger(__name__).warning("%s: " + text, type(self.sink).__name__, *values)


class Metrics(AbstractContextManager["Metrics"]):
    """All sinks of a run. A context manager: they are closed however the run ends.

    No sink ends the run: one that cannot be written to, on a full disk, is tried again later.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = [_RetryingSink(sink) for sink in sinks]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()

    def write(self, row: dict[str, Any]) -> None:
        """Hand a row to every sink."""
        for sink in self._sinks:
            sink.write(row)

    def rewind(self, step: int) -> None:
        """Tell every sink that the run resumes from an earlier step: later ones no longer count."""
        for sink in self._sinks:
            sink.rewind(step)
