"""Numbers out of the loop: metrics.jsonl always, TensorBoard and W&B if asked, a bar or plain lines on the terminal."""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.config.train import MetricsConfig
from pipeline.console import say
from pipeline.errors import UserError

# Dense bf16 peaks in FLOP/s as the vendor states them, by the device's full name. A device that is not here (a slice of
# one, a variant with other clocks) has no MFU rather than a wrong one.
_PEAK_FLOPS = {
    r"NVIDIA A100[ -](SXM4|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe": 312e12,
    r"NVIDIA H100 PCIe": 756e12,
    r"NVIDIA H100 80GB HBM3|NVIDIA H200": 989e12,
    r"NVIDIA B200": 2250e12,
}


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Dense peak of the device in the compute dtype, or None where it is not known."""
    if device.type != "cuda" or compute != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in _PEAK_FLOPS.items() if re.fullmatch(pattern, name)), None)


class Sink(Protocol):
    """Somewhere that scalars go."""

    def write(self, row: dict[str, Any]) -> None:
        """One row of metrics; `step` is in it."""

    def close(self) -> None:
        """Flush."""


class TensorBoard:
    """Scalars of a row under the same names as in metrics.jsonl, nested ones with a slash."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier attempt logged from this step on is not shown.
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in flat(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. One W&B run a run folder, over all attempts."""

    def __init__(self, config: MetricsConfig, run_folder: Path, resolved: dict[str, Any]) -> None:
        assert config.wandb is not None
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "train.metrics.wandb is set, but wandb is not installed: pip install 'pretraining-pipeline[wandb]'"
            ) from error
        id_file = run_folder / "wandb-id"
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

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(flat(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row, nested keys joined by slashes; hashes and other texts are left out."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name not in ("step", "attempt", "time"):
            numbers[prefix + name] = value
    return numbers


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
            numbers += f"  mfu {row['mfu']:.1%}"
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], numbers=numbers)
        elif row["step"] % self._every == 0 or row["step"] == self._total:
            say(self._console, f"step {row['step']:>{len(str(self._total))}}/{self._total}  {numbers}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class Metrics:
    """All sinks of a run. A context manager: they are closed however the run ends."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as failure:  # a full disk, which the run itself has reported or will
                logging.getLogger(__name__).warning("closing %s: %s", type(sink).__name__, failure)

    def write(self, row: dict[str, Any]) -> None:
        """Hand a row to every sink."""
        for sink in self._sinks:
            sink.write(row)
