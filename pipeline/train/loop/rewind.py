"""Going back to a checkpoint: the checkpoint itself, the new plan of the order, the next attempt."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from pipeline.common.console import Console, warn
from pipeline.common.errors import NumericalError
from pipeline.config import Config
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.checkpoint.resume_point import rewind_point
from pipeline.train.distributed.process_group import broadcast_from_rank0
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.rewind_request import Rewind
from pipeline.train.start.run_plan import RunPlan


def go_back(
    rewind: Rewind, config: Config, plan: RunPlan, folder: RunFolder, console: Console
) -> tuple[Checkpoint, RunPlan]:
    """The checkpoint to load, and the plan with the skipped steps; every rank calls this.

    The run folder has the next attempt and the new journal then.

    Raises:
        NumericalError: there is no checkpoint from before the fault.
    """
    checkpoint = rewind_point(
        Checkpoints.of_run(folder.path), config.resume, rewind.before, lambda line: warn(console, line)
    )
    if checkpoint is None:
        raise NumericalError(
            f"{rewind.reason}, and there is no checkpoint of step {rewind.before} or before to rewind to; lower "
            "train.faults.rewind_steps, or save more often (train.checkpoint.every_steps, keep, keep_every)"
        )
    plan = replace(plan, journal=plan.journal.passing_over(rewind.skip, checkpoint.step))
    folder.step = checkpoint.step

    def write_down() -> None:
        folder.next_attempt(write=True)
        plan.write_journal(folder.path)

    broadcast_from_rank0(write_down)
    if dist.get_rank() > 0:
        folder.next_attempt(write=False)
    return checkpoint, plan
