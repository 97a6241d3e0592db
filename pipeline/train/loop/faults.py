"""The policy for steps that went wrong: record them, skip the update, rewind, or end the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import warn
from pipeline.common.errors import NumericalError
from pipeline.common.format import counted
from pipeline.common.run_files import RunFiles
from pipeline.config.train import FaultsConfig
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.loop.saving import Saver
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.rewind_request import Rewind

Kind = Literal["nonfinite", "spike"]
Action = Literal["stop", "skip", "rewind"]


class Faults:
    """The policy of `train.faults`.

    All ranks see the same metrics and come to the same end; rank 0 keeps the record, `faults.jsonl`.

    Args:
        config: it.
        folder: of the run; rank 0 records there.
        saver: knows the checkpoints that the run could go back to.
        describe: step, counted from 0 -> its samples and their documents, for the record.
        console: where rank 0 speaks.
    """

    def __init__(
        self,
        config: FaultsConfig,
        folder: RunFolder,
        saver: Saver,
        describe: Callable[[int], Any],
        console: Console,
    ) -> None:
        self._config = config
        self._folder = folder
        self._saver = saver
        self._describe = describe
        self._console = console
        self._in_a_row = 0
        self._rewinds = 0
        self._updates = self._withheld = 0
        self._fp16 = False

    @property
    def record(self) -> Path:
        """One JSON object a fault."""
        return RunFiles(self._folder.path).faults

    @property
    def troubled(self) -> bool:
        """True if the last step went wrong: a checkpoint of now may not be worth keeping."""
        return self._in_a_row > 0

    def recall(self) -> None:
        """Learn from the record how often the run has gone back; every rank calls this.

        A checkpoint alone does not know: it is from before the fault that led back to it.
        """

        def count() -> int:
            return sum(row.get("action") == "rewind" for row in storage.read_json_lines(self.record))

        self._rewinds = max(self._rewinds, broadcast_from_rank0(count))

    def after(self, row: dict[str, Any]) -> None:
        """Look at the metrics of a step; every rank calls this.

        Raises:
            Rewind: the policy is to go back.
            NumericalError: it is to stop, or there were too many faulty steps.
        """
        if not row["skipped"]:
            self._in_a_row = 0
            self._updates += 1
            return
        self._withheld += 1
        self._fp16 = "loss_scale" in row
        kind: Kind = "spike" if row.get("spike") else "nonfinite"
        # An overflow of fp16 that a smaller scale prevents next time is part of the method. The loss itself is not
        # scaled, so no scale explains it.
        if kind == "nonfinite" and row.get("loss_scale", 1.0) > 1.0 and math.isfinite(row["loss"]):
            return
        self._in_a_row += 1
        step = row["step"]
        what = f"step {step}: {_in_words(kind, row)}"
        policy = self._config.on_spike if kind == "spike" else self._config.on_nonfinite
        if policy == "stop":
            self._end(row, kind, f"{what}, and train.faults.on_{kind} is stop", "it")
        if policy == "rewind":
            back = self._way_back(step - 1)
            if back is not None:
                if self._rewinds >= self._config.max_rewinds:
                    times = f"{counted(self._rewinds, 'time')}, as often as train.faults.max_rewinds allows"
                    self._end(row, kind, f"{what}, and the run was already rewound {times}", "it")
                self._rewinds += 1
                self._in_a_row = 0
                self._write(row, kind, "rewind", skip=back)
                raise Rewind(back[0], back, f"{what} (its samples are in {self.record})")
            what += ", and there is no checkpoint from before it to rewind to"
        if self._in_a_row >= self._config.max_in_a_row:
            were = "were not finite" if self._config.on_spike == "ignore" else "were spikes or not finite"
            lowest = ", with the loss scale at its lowest" if row.get("loss_scale") == 1.0 else ""
            self._end(row, kind, f"{self._in_a_row} steps in a row up to step {step} {were}{lowest}", "them")
        self._write(row, kind, "skip")
        warn(self._console, f"{what}; the weights were not updated (the step's samples are in {self.record})")

    def at_end(self, step: int) -> None:
        """All steps are trained, and the last one is not saved yet; every rank calls this.

        Raises:
            NumericalError: no update was made. With fp16 that may be before the loss scale is at its lowest.
        """
        if self._withheld and not self._updates:
            raise NumericalError(
                f"{self.withheld} and none was made up to the last step ({step}): the weights are still those that "
                f"the run began with, so no final checkpoint is saved. {self._advice()}, and run the same command in a "
                "new folder (run.dir)"
            )

    @property
    def withheld(self) -> str:
        """The number of withheld updates, without those of steps that a rewind has undone, in words; "" for none."""
        if not self._withheld:
            return ""
        return "1 update was withheld" if self._withheld == 1 else f"{self._withheld:,} updates were withheld"

    def _way_back(self, fault: int) -> tuple[int, int] | None:
        """Steps to skip, [first, end), where they begin at a checkpoint or after one; None without such.

        Args:
            fault: the faulty step, counted from 0.
        """
        before = [step for step in self._saver.saved_steps() if step <= fault]
        # Where all checkpoints are newer than wanted, the oldest one has to do.
        return (max(fault - self._config.rewind_steps, before[0]), fault + 1) if before else None

    def _end(self, row: dict[str, Any], kind: Kind, why: str, them: str) -> None:
        self._write(row, kind, "stop")
        last, first = row["step"], row["step"] - max(self._in_a_row, 1) + 1
        steps = f"{first}-{last}" if first < last else f"{last}"
        these = f"the {'steps' if first < last else 'step'} (blend.skip: [{{steps: {steps}}}])"
        saved = self._saver.last_saved()
        earlier = "; resume.from rewinds to an earlier checkpoint" if len(self._saver.saved_steps()) > 1 else ""
        raise NumericalError(
            f"{why} ({self.withheld} in all). {saved} is from before {them}. {self._advice()}, "
            f"look at the samples in {self.record}, or skip {these} and run the same command{earlier}"
        )

    def _advice(self) -> str:
        """Advice where steps go wrong."""
        if self._fp16:
            return (
                "NaN and infinity often come from fp16 or from a learning rate that is too high: set "
                "train.precision.compute: bf16 (or fp32), whose range is larger, lower train.optimizer.lr, lengthen "
                "train.schedule.warmup"
            )
        return (
            "NaN, infinity and spikes often come from a learning rate that is too high: lower train.optimizer.lr, "
            "lengthen train.schedule.warmup"
        )

    def _write(self, row: dict[str, Any], kind: Kind, action: Action, skip: tuple[int, int] | None = None) -> None:
        """Append the fault to the record, on rank 0."""
        if dist.get_rank() > 0:
            return
        numbers = ("loss", "grad_norm", "loss_zscore", "grad_norm_zscore", "loss_scale")
        fault = {
            "step": row["step"],
            "attempt": self._folder.attempt,
            "time": time.time(),
            "kind": kind,
            "action": action,
            **({"passes_over": [skip[0] + 1, skip[1]]} if skip else {}),
            **{name: row[name] for name in numbers if name in row},
            "samples": self._describe(row["step"] - 1),
        }
        try:
            storage.add_json_line(self.record, fault)
        except OSError as error:  # a full disk ends no run
            warn(self._console, f"{self.record} could not be written: {error.strerror or error}")

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "in_a_row": self._in_a_row,
            "rewinds": self._rewinds,
            "updates": self._updates,
            "withheld": self._withheld,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `state`."""
        self._in_a_row = int(state["in_a_row"])
        # A rewind is not forgotten by going back to before it.
        self._rewinds = max(self._rewinds, int(state["rewinds"]))
        # Checkpoints of earlier versions do not have these; they had made an update, as far as is known.
        self._updates, self._withheld = int(state.get("updates", 1)), int(state.get("withheld", 0))


def _in_words(kind: Kind, row: dict[str, Any]) -> str:
    if kind == "nonfinite":
        return "loss or gradient is not finite"
    return (
        f"a spike, loss {row['loss']:.4f} (z-score {row['loss_zscore']:.1f}), "
        f"gradient norm {row['grad_norm']:.3f} (z-score {row['grad_norm_zscore']:.1f})"
    )
