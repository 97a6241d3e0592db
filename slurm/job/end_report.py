"""Report on a chain of jobs that has ended for good: the reason, and the launches that led to it."""

from __future__ import annotations

from pathlib import Path

from pipeline.common import storage
from pipeline.common.format import when
from pipeline.common.run_files import RunFiles
from slurm.jobs import Stage, stage_words
from slurm.record.launch_log import Launch, launches

_LAST = 10
"""Launches that a report shows."""


def report_file(run: Path) -> Path:
    """File of the last report."""
    return RunFiles(run).slurm / "report.txt"


def write(run: Path, stage: Stage) -> str:
    """Write the report on the launches of a stage; returns its text, with a warning where the disk is full."""
    found = launches(run, stage)[-_LAST:]
    last = found[-1].end if found else None
    lines = [f"{stage_words(stage)} has ended: {last.reason if last else 'it was never launched'}"]
    lines += [f"  {_line(launch)}" for launch in found]
    if last is not None and last.node is not None:
        lines.append(f"first failure: rank {last.rank} on {last.node}; its log is in {run / found[-1].logs}")
    lines.append(f"`pipeline logs {run} --first-error` shows it; submit the run again when the cause is fixed")
    text = "\n".join(lines)
    try:
        storage.put(report_file(run), f"{text}\n".encode())
    except OSError as error:
        text += f"\nwarning: {report_file(run)} cannot be written ({error.strerror})"
    return text


def _line(launch: Launch) -> str:
    nodes = ",".join(launch.nodes) or launch.host
    which = f"{when(launch.time)} job {launch.job}.{launch.restarts} launch {launch.number}"
    text = f"{which} on {nodes}, from step {launch.checkpoint}: "
    return text + (f"{launch.end.reason}" if launch.end else "no end was recorded (killed, or its node was lost)")
