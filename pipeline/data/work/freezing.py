"""Freezing of plans by commands that run at a time."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from pipeline.common import links, run_identity, storage
from pipeline.common.console import say
from pipeline.common.format import counted, size
from pipeline.config import Config
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.work.frozen_plan import FrozenPlan
from pipeline.data.work.job_run import FAILURES_FILE
from pipeline.data.work.leases import LeaseWatch, take_when_free


def make_data_dir(config: Config, *folders: Path) -> None:
    """Make `data.dir`, and folders below it.

    A job finds the one that its submission has made, or ends: its disk may not be mounted.

    Raises:
        FileNotFoundError: in a job, it is not there.
    """
    if run_identity.expected_id(config.run.dir) is None:
        config.data_dir.mkdir(parents=True, exist_ok=True)
    for folder in (config.data_dir, *folders):
        storage.make_below(config.data_dir, folder)


def freeze_alone(plan: FrozenPlan, config: Config, folder: Path, console: Console) -> None:
    """Freeze a plan; of two commands at a time with other plans, one is refused: here, or by its workers.

    Args:
        plan: of a source.
        config: the run.
        folder: of the plan, below `data.dir`.
        console: for messages.
    """
    make_data_dir(config, folder)
    if (folder / PLAN_FILE).exists() and not plan.differences(folder):
        return
    with take_when_free(folder, "plan", LeaseWatch(), lambda _: None):
        grows = plan.found.grows and plan.extends(folder)
        if differences := plan.freeze(folder):
            links.remove(folder / FAILURES_FILE, missing_ok=True)
            say(
                console,
                f"{plan.found.source.name}: planned again, since no unit was started ({'; '.join(differences)})",
            )
        elif grows:
            new, units = plan.found.generation(-1), len(plan.units) - plan.earlier[-1][1]
            say(
                console,
                f"{plan.found.source.name}: {counted(len(new.files), 'file')} added ({size(new.bytes)}, "
                f"{counted(units, 'unit')}), as generation {len(plan.earlier) + 1}",
            )
