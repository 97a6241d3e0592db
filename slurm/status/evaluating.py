"""Evaluations of a run that wait or run now, which a table of results does not have yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.format import when
from slurm.record.active_jobs import describe
from slurm.record.launch_log import launches
from slurm.record.live_jobs import live_jobs
from slurm.status.files import RunSnapshot


def evaluation_lines(run: Path) -> Iterator[str]:
    """A line for each evaluation that waits or runs; what cannot be known is left out."""
    try:
        live = live_jobs(run)
    except UserError:  # the jobs of the run cannot be read
        return
    begun = {launch.job for launch in launches(run, "eval") if launch.end is None}
    found = [each for each in live.active if each.job.stage == "eval" or not begun.isdisjoint(each.job.numbers)]
    for each in found:
        step = "" if each.job.step is None else f" of step {each.job.step:,}"
        yield f"not in the table yet: an evaluation{step}, by {describe(run, each)}"
    hand = None if found else RunSnapshot(run).by_hand()
    if hand is not None and hand.stage == "eval":
        yield f"not in the table yet: an evaluation by process {hand.pid} on {hand.host}, since {when(hand.start)}"
