"""Rows of metrics.jsonl about steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.console import Console, warn
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.stream_shape import StreamShape
from pipeline.data.order.segments import Segment
from pipeline.train.distributed import process_group
from pipeline.train.loop.quantities.quantity import Quantity
from pipeline.train.loop.step import StepResult
from pipeline.train.model.flops import flops_per_token
from pipeline.train.monitor.hardware import HardwareWatch, rises_text
from pipeline.train.monitor.memory import memory_used
from pipeline.train.monitor.metrics import peak_flops
from pipeline.train.monitor.straggler import WallClock
from pipeline.train.parallel.setup import Setup
from pipeline.train.parallel.teacher import Teacher
from pipeline.train.run.folder import RunFolder


@dataclass
class Issued:
    """A step between its data and its numbers."""

    data: StepData
    segment: Segment
    """Segment of the journal."""
    stream: StreamShape
    """What the objective makes of a window."""
    begin: float
    """Time at which its data were asked for, by `time.monotonic`."""
    waited: float
    """Seconds until they were there."""
    lr: float = 0.0
    result: Callable[[], StepResult] | None = None
    """Waits for the numbers; None where nothing is computed."""

    @property
    def trains(self) -> bool:
        """True if something of it is trained on. If not, nothing is computed and nothing changes."""
        return not self.data.skipped and self.data.valid_targets > 0


class StepMetrics:
    """Rows of metrics, and the clocks that they need.

    Args:
        config: resolved config.
        setup: of the run.
        folder: of the run.
        console: where rank 0 prints warnings that follow from the numbers of a step.
        stopped: seconds in which this process was stopped so far.
        quantities: of the step, which are asked for warnings.
        teacher: of a distillation, whose forward pass is among the FLOPs of a step.
    """

    def __init__(
        self,
        config: Config,
        setup: Setup,
        folder: RunFolder,
        console: Console,
        stopped: Callable[[], float],
        quantities: Sequence[Quantity],
        teacher: Teacher | None = None,
    ) -> None:
        self._spec, self._folder, self._console = setup.spec, folder, console
        self._quantities, self._teacher = quantities, teacher
        self.hardware = HardwareWatch(folder, process_group.of_environment(), config.train.metrics.hardware_seconds)
        peak = peak_flops(setup.device, config.train.precision.compute)
        self._device = setup.device
        self._peak = None if peak is None else peak * setup.mesh.layout.world_size
        self.wall = WallClock(stopped)
        """Since the last step, validation or save ended."""

    def start(self) -> None:
        """Begin to count: building and loading were no step."""
        self.wall.take()
        self.wall.suspended()

    def head(self, step: int) -> dict[str, Any]:
        """The keys of every row; `step` from 1."""
        return {"step": step, "attempt": self._folder.attempt, "time": time.time()}

    def skipped(self, loader: Loader, issued: Issued) -> dict[str, Any]:
        """Row of a step of which nothing is trained on; it takes no time."""
        self.wall.take()
        return {**self.head(issued.data.step + 1), **place(loader, issued.data), "passed_over": True}

    def trained(self, loader: Loader, issued: Issued, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Row of a step, with the columns of its result."""
        step, values = issued.data.step + 1, dict(columns)
        # The device has done the step by now: a step lasts from the end of the one before to its own.
        seconds = self.wall.take()
        for quantity in self._quantities:
            if warning := quantity.warning(step, columns, seconds):
                warn(self._console, warning)
        if rises := self.hardware.take():
            if grave := [rise for rise in rises if not rise.minor]:
                warn(self._console, f"hardware errors: {rises_text(grave)}; see {RunFiles(self._folder.path).hardware}")
            values["hardware_errors"] = sum(rise.by for rise in grave)
            values["hardware_corrected"] = sum(rise.by for rise in rises if rise.minor)
        tokens, stream = sum(issued.data.tokens_by_source.values()), issued.stream
        flops, causal_flops = (self._flops(stream, causal=causal) for causal in (False, True))
        return {
            **self.head(step),
            **place(loader, issued.data),
            **values,
            "lr": issued.lr,
            "data_wait": issued.waited,
            **speed(tokens, seconds, flops, causal_flops, self._peak),
            **self.wall.suspended(),
            "memory": memory_used(self._device),
        }

    def _flops(self, stream: StreamShape, *, causal: bool) -> float:
        """FLOPs of a token; of a teacher those of its forward pass, a third of training."""
        own = flops_per_token(self._spec, stream, causal=causal)
        return own if self._teacher is None else own + flops_per_token(self._teacher.spec, stream, causal=causal) / 3


def place(loader: Loader, data: StepData) -> dict[str, Any]:
    """Place of a step in the run and its data; also of one that is skipped."""
    step = data.step + 1
    return {
        "tokens": loader.journal.tokens(step),
        "tokens_by_source": loader.tokens_by_source(step),
        "epochs_by_source": loader.epochs_by_source(step),
        "order_hash": f"{data.order_hash:016x}",
    }


def speed(tokens: int, seconds: float, flops: float, causal_flops: float, peak: float | None) -> dict[str, float]:
    """Speed of a step.

    Args:
        tokens: targets of the step, over all ranks.
        seconds: that it lasted.
        flops: of a token, attention counted whole.
        causal_flops: the same, attention counted half.
        peak: FLOP/s of all devices; None where it is not known.
    """
    rate = tokens / seconds
    values = {"tokens_per_second": rate, "step_seconds": seconds, "model_flops_per_second": rate * flops}
    if peak is not None:
        values |= {"mfu": rate * flops / peak, "mfu_causal": rate * causal_flops / peak}
    return values
