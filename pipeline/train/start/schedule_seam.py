"""The learning rate where a resumed run leaves the schedule that its checkpoint was written with.

The schedule is computed from the place in the run, as if it had always been so. A longer `train.duration` therefore
lifts the rate at once wherever it has decayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.common.problems import Agreement
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.base import Duration
from pipeline.config.train import ScheduleConfig
from pipeline.data.order.journal import Journal
from pipeline.data.order.journal_file import saved_journal
from pipeline.data.order.run_length import run_length
from pipeline.data.order.sampler import Sampler
from pipeline.train.checkpoint.committed import UNREADABLE
from pipeline.train.checkpoint.exported_optimizer import ExportedOptimizer
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.optim.lr_schedule import Schedule

RISE = 1.2
"""Factor from which a rise is asked about."""
BEFORE = "schedule_tokens"
"""Key in state.json: tokens that the schedule had behind it at the first step of the run."""


@dataclass(frozen=True)
class Seam:
    """A change of the schedule after a checkpoint.

    Attributes:
        step: first step of the new schedule.
        before: learning rate of the step before.
        expected: learning rate of the step by the schedule of the checkpoint.
        after: learning rate of the step now.
        changed: keys, each with its value in the checkpoint and now.
    """

    step: int
    before: float
    expected: float
    after: float
    changed: Mapping[str, tuple[Any, Any]]

    def __str__(self) -> str:
        changed = "; ".join(f"{key}: {before} -> {now}" for key, (before, now) in self.changed.items())
        line = f"learning rate {_shown(self.before)} -> {_shown(self.after)} at step {self.step:,} ({changed})"
        if not self.rises or "train.duration" not in self.changed:
            return line
        return (
            f"{line}: the schedule now ends later, as if it had always been so. To go without the rise, fork from "
            "a checkpoint before the decay (pipeline fork); with train.schedule.type wsd a run can be made longer"
        )

    @property
    def rises(self) -> bool:
        """True if the rate rises by more than `RISE`, and by more than it would have risen without the change."""
        return self.after > RISE * max(self.before, self.expected)

    def agreement(self, run: Path) -> Agreement:
        """Agreement to the change, whatever the checkpoint: jobs resume from later ones."""
        return Agreement(RunFiles(run).agreements, "schedule", {key: list(pair) for key, pair in self.changed.items()})


def find_seam(config: Config, checkpoint: Checkpoint, journal: Journal, steps: int) -> Seam | None:
    """The change of the learning rate after a checkpoint; None if it shows none, or no step follows.

    Args:
        config: of now.
        checkpoint: that the run resumes from.
        journal: of now.
        steps: of the whole run.
    """
    state, step = checkpoint.state(), checkpoint.step
    before = _values(state.get("config", {}))
    changed = changed_schedule(config, checkpoint)
    if not 0 < step < steps or not changed:
        return None
    with suppress(ValidationError, UserError):
        saved = saved_journal(config.run.dir, state["journal"], step)
        duration = Duration.model_validate(before["train.duration"])
        shape = ScheduleConfig.model_validate(state["config"]["train"]["schedule"])
        old = config.model_copy(update={"train": config.train.model_copy(update={"duration": duration})})
        planned = run_length(old, Sampler(saved)).steps
        now = run_schedule(config, journal, steps, checkpoint)
        then = Schedule(shape, duration, planned, saved.tokens, now.before)
        peak = float(before["train.optimizer.lr"])
        seam = Seam(
            step + 1,
            peak * then.factor(saved.tokens(step)),
            peak * then.factor(saved.tokens(min(step + 1, planned))),
            config.train.optimizer.lr * now.factor(journal.tokens(step + 1)),
            changed,
        )
        return seam if _shown(seam.before) != _shown(seam.after) else None
    return None


def _shown(rate: float) -> str:
    return f"{rate:.2e}"


def run_schedule(config: Config, journal: Journal, steps: int, checkpoint: Checkpoint | None) -> Schedule:
    """The schedule of a run, which `train.init_from` may let begin in its middle.

    Args:
        config: of the run.
        journal: of the run.
        steps: of the whole run.
        checkpoint: that the run resumes from; None: it begins.

    Raises:
        UserError: the run is too short for it, or the folder that it continues the schedule of is not there.
    """
    before = _tokens_before(config, checkpoint)
    return Schedule(config.train.schedule, config.train.duration, steps, journal.tokens, before)


def _tokens_before(config: Config, checkpoint: Checkpoint | None) -> int:
    # A checkpoint keeps them, so a run resumes without the folder that it began with.
    if checkpoint is not None:
        return int(checkpoint.state().get(BEFORE, 0))
    wanted = config.train.init_from
    if wanted is None:
        return 0
    if wanted.tokens is None and wanted.optimizer:
        assert wanted.path is not None, "the section sees to it"
        return ExportedOptimizer.open(wanted.path).tokens
    return wanted.tokens or 0


def planned_seam(config: Config, journal: Journal, steps: int) -> list[str]:
    """The change where the run resumes in words, if there is one; refuses a schedule that training refuses.

    Of a run that begins, the place where its schedule does.
    """
    checkpoint = Checkpoints.of_run(config.run.dir).preferred(config.resume.step)
    schedule = run_schedule(config, journal, steps, checkpoint)
    if checkpoint is None:
        return begin_lines(config, schedule, journal)
    seam = find_seam(config, checkpoint, journal, steps)
    return [] if seam is None else [str(seam)]


def begin_lines(config: Config, schedule: Schedule, journal: Journal) -> list[str]:
    """The place where the schedule of a new run begins in words, if that is not its start.

    Args:
        config: of the run.
        schedule: of the run.
        journal: of the run.
    """
    if not schedule.before:
        return []
    first = config.train.optimizer.lr * schedule.factor(journal.tokens(1))
    return [
        f"train.schedule continues behind {schedule.before:,} tokens (train.init_from): the learning rate of step 1 is "
        f"{_shown(first)}"
    ]


def schedule_differs(config: Config) -> bool:
    """True if the checkpoint that the run resumes from has another schedule; False where that cannot be read."""
    with suppress(*UNREADABLE, UserError):  # training resumes from an older one then, and says so
        checkpoint = Checkpoints.of_run(config.run.dir).preferred(config.resume.step)
        return checkpoint is not None and bool(changed_schedule(config, checkpoint))
    return False


def changed_schedule(config: Config, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Keys of the schedule that are not as when a checkpoint was written: (value then, value now)."""
    now, before = _values(config.model_dump(mode="json")), _values(checkpoint.state().get("config", {}))
    if before.keys() != now.keys():  # an older release had others
        return {}
    return {key: (before[key], now[key]) for key in now if before[key] != now[key]}


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values that decide the learning rate, by key."""
    train = config.get("train", {})
    found = {f"train.schedule.{key}": value for key, value in train.get("schedule", {}).items()}
    return found | {"train.duration": train.get("duration"), "train.optimizer.lr": train.get("optimizer", {}).get("lr")}
