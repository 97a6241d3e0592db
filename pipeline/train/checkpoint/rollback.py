"""Steps that are lost where a run resumes from an older checkpoint than the one it saved last.

`latest` names the one that was saved last. Where it cannot be read, or its folder is gone, the records of the run tell
too: `metrics.jsonl` has a row for each save, `ledger.jsonl` a line for each attempt with the step that it began at. The
steps trained since the last save do not count: every run that is killed loses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.policy import saves_lost
from pipeline.train.run.attempts import first_steps


def rollback_lines(checkpoints: Checkpoints, found: Checkpoint, config: Config, damage: list[str]) -> list[str]:
    """Warnings about what a run loses that resumes from a checkpoint; none if that is the one it saved last.

    Args:
        checkpoints: of the run, before anything is moved there.
        found: the one to resume from.
        config: of this start.
        damage: reasons that are known already why later ones are not it.

    Raises:
        UserError: more than one save is lost, and `resume.from` does not name the checkpoint.
    """
    asked = config.resume.step
    if asked is not None and not checkpoints.was_followed(asked):
        return damage
    run, folder = config.run.dir, checkpoints.folder
    reached, missing = checkpoints.saved_last()
    reasons = [*damage, *missing]
    saved = saves_on_line(first_steps(run), RunFiles(run).newest_rows(), found.step) if reasons else set()
    if missing and (recorded := max(saved, default=0)) > reached:
        reached = recorded
        reasons.append(f"{RunFiles(run).metrics} and {RunFiles.ledger} say that step {reached} was saved")
    lost = reached - found.step
    if lost <= 0:
        return damage
    steps = counted(lost, "step")
    if saves_lost(config.train.checkpoint, found.step, reached, saved) <= 1:
        return [
            *reasons,
            f"the run saved step {reached}; resuming from {found.path.name}, the newest valid checkpoint, "
            f"trains {steps} again",
        ]
    again = f"remove {checkpoints.followed_file} and " if asked == found.step else ""
    raise UserError(
        f"the run saved step {reached}, but the newest valid checkpoint is {found.path.name} in {folder}: "
        f"resuming from it loses {steps}, which is more than one save:\n  "
        + "\n  ".join(reasons)
        + f"\nrestore the later checkpoints; or, to train from step {found.step + 1} again, {again}give "
        f"resume.from={found.step}"
    )


def saves_on_line(attempts: Mapping[int, int], newest_rows: Iterable[Mapping[str, Any]], down_to: int = 0) -> set[int]:
    """Steps of the saves that a run has come from, as its records have them.

    An attempt that began at an earlier step has given up what those before it saved after that step: the run had been
    rewound, or `resume.from` had named that step.

    Args:
        attempts: by number, the step that each began at.
        newest_rows: of `metrics.jsonl`, the last one first.
        down_to: no further back than to this step.
    """

    def limit(attempt: int) -> float:
        return min((step for number, step in attempts.items() if number > attempt), default=math.inf)

    found = {step for number, step in attempts.items() if down_to <= step <= limit(number) and step > 0}
    for row in newest_rows:
        step = row.get("step")
        if "save_seconds" in row and isinstance(step, int) and step <= limit(row.get("attempt", 0)):
            found.add(step)
            if step <= down_to:
                break
    return found
