"""Stages that a command sends to jobs instead of running them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.train.checkpoint.exported import WeightsOf
    from slurm.jobs import StageName


def submitted(
    config: Config,
    stages: list[StageName],
    slurm: bool,
    local: bool,
    dry_run: bool,
    step: int | None = None,
    *,
    take_over: bool = False,
    in_allocation: bool = False,
) -> bool:
    """Run stages where the options say, or show what they would do; False if they are to run here and now."""
    if in_allocation:
        if slurm or local:
            raise UserError("--in-allocation sends no job; leave --slurm and --local out")
        from slurm.local.in_allocation import run_in_allocation

        run_in_allocation(config, stages, Console(), step=step, take_over=take_over, dry_run=dry_run)
        return True
    if not (slurm or local):
        if dry_run and stages not in (["preprocess"], ["curate"]):
            from slurm.local.preview import preview

            preview(config, stages, Console(), step)
            return True
        if not dry_run and stages != ["eval"] and RunFiles(config.run.dir).jobs.exists():
            from slurm.local import by_hand

            by_hand.check(config.run.dir, stages, Console(), take_over=take_over)
        if take_over and not dry_run:
            from slurm.local.by_hand import take_over as take_over_run

            take_over_run(config.run.dir, Console())
        return False
    if slurm and local:
        raise UserError("--slurm and --local cannot be combined; give one of them")
    from slurm.submit.submit import submit

    submit(config, stages, "slurm" if slurm else "local", Console(), dry_run=dry_run, step=step, take_over=take_over)
    return True


def importance_alone(config: Config, which: WeightsOf, *, slurm: bool, dry_run: bool) -> None:
    """`pipeline eval --importance`, on this machine or in a job of one's own.

    Raises:
        UserError: a job was to be sent for it, or as `pipeline.eval.importance`.
    """
    if slurm:
        raise UserError(
            "--importance is measured where the command runs; leave out --slurm, --local and --in-allocation, or put "
            "the command into a job of your own"
        )
    if dry_run:
        from pipeline.eval.importance import preview_importance

        preview_importance(config, which, Console())
        return
    from slurm.local.stages import evaluate

    evaluate(config, which, importance=True)
