"""Submission of a run whose jobs wait or run already: they are shown, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import dump
from pipeline.config.parsing.document import parse
from pipeline.config.parsing.problems import show
from pipeline.config.parsing.schema import flat
from slurm.jobs import Job
from slurm.record.active_jobs import ActiveJob, describe, stages
from slurm.record.planned_job import PlannedJob
from slurm.record.submission import Submission, find_submission, record
from slurm.submit import code_snapshot

_SHOWN = 10
"""Keys that a message names, at most."""
_MISSING = object()


def attach(config: Config, planned: Sequence[PlannedJob], found: Sequence[ActiveJob], console: Console) -> list[Job]:
    """Report the jobs of a run that is submitted again and send nothing, if its config is the same.

    Raises:
        UserError: it was submitted with another config.
    """
    run = config.run.dir
    submission = find_submission(run / found[-1].job.submission)
    listed = "\n".join(f"  {describe(run, each)}" for each in found)
    if submission and (differences := _differences(submission, config)):
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise UserError(
            f"the run has been submitted with another config:\n{listed}\nThese keys differ:\n  "
            + "\n  ".join(differences[:_SHOWN])
            + f"{more}\nTo continue with the new values, run `pipeline cancel {run}` and submit again; to run both, "
            "set run.dir to another folder"
        )
    say(console, f"the run is already submitted, so nothing was sent:\n{listed}")
    if submission and submission.code and submission.code.name != code_snapshot.place(run)[0].name:
        say(console, "its jobs run the code as it was when they were submitted; it has changed since")
    present = {stage for each in found for stage in stages(run, each.job)}
    last = max(index for index, job in enumerate(planned) if job.stage in present)
    if missing := [job.stage for job in planned[last + 1 :]]:
        say(console, f"not among them: {', '.join(missing)}; submit again when they are done")
    say(console, f"next: pipeline status {run}, pipeline logs {run} -f, pipeline cancel {run}")
    return [each.job for each in found]


def _differences(submission: Submission, config: Config) -> list[str]:
    """Keys whose values differ from those that a job was sent with, each with both values."""
    try:
        # Not as a config: it may be of another version of the code.
        run_file = record(submission.run, submission.run_file)
        there = flat(parse(storage.read_bytes(run_file, storage.SMALL_BYTES).decode(), str(run_file)).value)
    except (OSError, UserError):
        return []
    here = flat(parse(dump(config), "").value)
    return [
        f"{key}: {show(there[key]) if key in there else 'not set'} there, "
        f"{show(here[key]) if key in here else 'not set'} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key, _MISSING) != here.get(key, _MISSING)
        and not _is_in_keys_below(key, there, here)
        and not _is_in_keys_below(key, here, there)
    ]


def _is_in_keys_below(key: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if a mapping is empty in one config and has keys in the other, which are differences of their own."""
    return one.get(key) == {} and key not in other and any(each.startswith(f"{key}.") for each in other)
