"""Stages of a run that are complete, so that a submission of the whole run sends no jobs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console

from pipeline.common.console import say
from pipeline.common.errors import EXIT_OK, UserError
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.eval.reports import evaluated_checkpoint, report_path
from pipeline.train.checkpoint.committed import UNREADABLE
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.policy import is_permanent
from slurm.jobs import StageName


def missing_stages(
    config: Config, stages: Sequence[StageName], console: Console, *, so: str = "so no job is sent for it"
) -> list[StageName]:
    """Stages of a whole run that still have something to do; prints a line for each complete one.

    A stage counts as complete only after complete stages, and only where that is sure: its job looks at everything.

    Args:
        config: the run.
        stages: in their order. One that is asked for alone is never left out.
        console: where to.
        so: what follows for a stage that is complete.
    """
    from pipeline.data.curate.stage import is_complete as is_curated
    from pipeline.data.preprocess.stage import is_complete as is_preprocessed

    if len(stages) == 1:
        return list(stages)
    missing = list(stages)
    if "preprocess" in missing:
        if not _is_sure(is_preprocessed, config):
            return missing
        say(console, f"preprocess: complete, {so}")
        missing.remove("preprocess")
    # Where decisions apply, preprocessing is complete only by those of the run.
    applies = config.data.curate is not None and config.data.curate.mode == "apply"
    if "curate" in missing and (applies or _is_sure(is_curated, config)):
        say(console, f"curate: complete, {so}")
        missing.remove("curate")
    if "train" in missing:
        step = _trained_step(config)
        if step is None:
            return missing
        say(console, f"train: complete at step {step:,}, {so}")
        missing.remove("train")
        if "eval" in missing and _is_evaluated(config, step):
            say(console, f"eval: complete, {so}")
            missing.remove("eval")
    return missing


def _is_sure(is_complete: Callable[[Config], bool], config: Config) -> bool:
    """True if a stage would find nothing to do; of what it would refuse, the checks or its job report."""
    with suppress(UserError, OSError):
        return is_complete(config)
    return False


def _trained_step(config: Config) -> int | None:
    """Last step of a training that would find nothing to do; None where there is something, or it is not sure."""
    from pipeline.train.rules.layout_check import planned_spec
    from pipeline.train.start.run_plan import plan_run
    from slurm.submit.course import checkpoints_disk, read_course

    run, state = config.run.dir, RunFiles(config.run.dir).exit_state()
    if config.resume.from_ is not None or state.get("code") != EXIT_OK:
        return None
    with suppress(UserError, *UNREADABLE):
        spec = planned_spec(config)
        course, latest = read_course(config, spec), Checkpoints.of_run(run).latest()
        if course.assumed or latest is None or not course.steps == course.done_steps == latest.step == state["step"]:
            return None
        plan_run(config, latest, check=False)  # which refuses a run that differs from its checkpoint
        if latest.problems(full=False) or checkpoints_disk(config, spec, course).exports:
            return None
        if config.eval.every_checkpoint and not _all_evaluated(config):  # the job of the training sends these
            return None
        return latest.step
    return None


def _all_evaluated(config: Config) -> bool:
    """True if every checkpoint that is kept for ever has a report."""
    kept = [
        each for each in Checkpoints.of_run(config.run.dir).all() if is_permanent(config.train.checkpoint, each.step)
    ]
    return all(evaluated_checkpoint(report_path(config, each.step)) == each.fingerprint for each in kept)


def _is_evaluated(config: Config, step: int) -> bool:
    """True if an evaluation of a checkpoint would find nothing to do."""
    from pipeline.eval.benchmarks import benchmarks_are_made
    from pipeline.eval.perplexity import read_report

    with suppress(UserError, OSError, ValueError):
        return read_report(config, step) is not None and benchmarks_are_made(config, step)
    return False
