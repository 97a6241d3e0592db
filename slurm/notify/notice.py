"""A notice: an event of a run, as commands and webhooks get it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.common.format import when
from pipeline.common.redaction import masked
from pipeline.config.notify import NotifyEvent

_LONGEST = 2000
"""Characters of a reason that are sent."""
_WORDS: dict[NotifyEvent, str] = {
    "done": "training is done",
    "failed": "{stage} has failed",
    "stopped": "training has stopped, and nothing continues it",
    "requeued": "training was interrupted and continues",
    "stalled": "training gives no sign of life",
    "spike": "a step went wrong",
    "saves_failing": "saves fail",
    "export_failed": "a checkpoint was not exported",
    "mirror_failing": "checkpoints are not uploaded to the mirror",
    "hardware": "a node has hardware errors",
}


@dataclass(frozen=True)
class Notice:
    """An event of a run."""

    event: NotifyEvent
    run: Path
    """Run folder."""
    stage: str
    reason: str
    """Why, in words."""
    job: str | None = None
    """As the scheduler names it; None without one."""
    restarts: int = 0
    """Number of earlier starts of the job by the scheduler."""
    attempt: int | None = None
    step: int | None = None
    code: int | None = None
    """Exit code, of an end."""
    next: str | None = None
    """What follows on the end of a launch, see `slurm.record.launch_log.Next`."""
    test: bool = False
    """Nothing has happened: somebody tries the notifications."""
    time: float = field(default_factory=time.time)
    """In seconds since 1970."""

    @property
    def text(self) -> str:
        """The notice in a line, for a person."""
        step = "" if self.step is None else f" at step {self.step:,}"
        job = "" if self.job is None else f" (job {self.job})"
        test = "[test] " if self.test else ""
        words = _WORDS[self.event].format(stage=self.stage)
        return f"{test}{self.run.name}: {words}{step}{job}: {self._reason}"

    @property
    def _reason(self) -> str:
        """Reason in a line, without the secrets of addresses."""
        line = " ".join("".join(each if each.isprintable() else " " for each in masked(self.reason)).split())
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."

    def to_json(self) -> dict[str, Any]:
        """All of it; `text` is what Slack and others show."""
        names = {"run": self.run.name, "run_dir": str(self.run), "reason": self._reason}
        return {"text": self.text, **asdict(self), **names}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a command; "" stands for what is not known."""
        values = {**self.to_json(), "time": when(self.time), "test": "1" if self.test else ""}
        return {f"PIPELINE_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}
