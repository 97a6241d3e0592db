"""`--dry-run` of stages on this machine: what each would do, and what would end it at its start. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from pipeline.common.console import Console, say
from pipeline.common.errors import UserError
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.parsing.code_keys import refuse_code_of_others
from pipeline.data.curate.results.dry_run import print_dry_run as print_curation
from pipeline.data.preprocess.dry_run import print_sources
from pipeline.data.work.units import reading
from pipeline.train.planning.fit import check_memory, is_meant_for_this_machine
from pipeline.train.rules.layout_check import check, world_size
from slurm.checks import look_at_stages
from slurm.jobs import StageName
from slurm.site.site_profile import site_of
from slurm.submit.course import forecast
from slurm.submit.disk_space import check_room
from slurm.submit.dry_run import show_findings, training_lines
from slurm.submit.job_plan import plan


def preview(config: Config, stages: Sequence[StageName], console: Console, step: int | None = None) -> None:
    """Print what stages would do here, in their order, then warnings and problems.

    Args:
        config: the run.
        stages: in their order.
        console: where to.
        step: of the checkpoint to evaluate; None for the latest one.

    Raises:
        UserError: there are problems; the message lists all of them.
    """
    found = Problems()
    with found.collecting():
        refuse_code_of_others(config)
    processes = 1
    with found.collecting():
        processes = world_size(config, {})
    scopes = look_at_stages(config, stages, found, train=processes, evaluate=config.eval.processes, step=step)
    say(console, f"run: {config.run.dir}")
    if scopes.curate is not None:
        print_curation(console, scopes.curate)
    if scopes.preprocess is not None:
        with reading(config, scopes.preprocess.sources):
            print_sources(console, scopes.preprocess, found)
    if "train" in stages:
        _print_training(config, processes, console, found)
    if "eval" in stages:
        say(console, f"eval: {', '.join(_evaluated(config))}")
    show_findings(console, found)
    found.raise_problems()
    say(console, "no problem was found; nothing was started and nothing was written (--dry-run)")


def _print_training(config: Config, processes: int, console: Console, found: Problems) -> None:
    """The layout, the time and the disk of a training here."""
    with suppress(UserError):  # it is among the problems already
        check(config, console, {})
    with found.collecting():
        if is_meant_for_this_machine(config, processes):
            found.warn(*check_memory(config, processes))
        found.warn(*check_room(config))
        site = site_of(config, "local")
        (job,) = plan(config, site, ["train"], "local")
        for line in training_lines(config, job, "local", forecast(config, site, job), time.time()):
            say(console, line)


def _evaluated(config: Config) -> list[str]:
    """Names of what an evaluation scores."""
    names = [f"split {config.eval.split}", *(f"set {name}" for name in config.heldout_sets)]
    names += [task.title for task in config.eval.tasks]
    return names + (list(config.eval.harness.tasks) if config.eval.harness is not None else [])
