"""The load on a site: calls of SLURM's programs and files of a training on 64 nodes, by docs/shared-clusters.md."""

from __future__ import annotations

import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.config.load import load
from pipeline.train.run.folder import make_writable
from slurm import jobs
from slurm.job.batch_main import run_submission
from slurm.job.srun_step import SrunStep
from slurm.record import integrity
from slurm.site.site_profile import load_site
from slurm.status.command import show_status
from slurm.submit import code_snapshot
from slurm.submit.job_plan import plan
from slurm.submit.submit import send_all
from tests import tiny
from tests.clock import set_time
from tests.repository import ROOT
from tests.slurm.training import Run

NODES, PROCESSES = 64, 8
PER_LAUNCH = 2
"""Files of a launch beside one per node."""
PROGRAMS = {
    "sbatch": 'echo "Submitted batch job $(grep -c ^sbatch "$log")"',
    "scontrol": f"case $2 in hostnames) seq -f n%g {NODES};; job) echo JobId=1 JobState=RUNNING NodeList=n;; esac",
    "sinfo": "",
    "srun": "",
    "squeue": 'for job in 2 3 4; do echo "$job|PENDING|Priority||N/A|N/A|"; done',
}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Counter[str]]]:
    """SLURM's programs, which do nothing; returns how often each was called since it was asked before."""
    folder = tmp_path / "programs"
    folder.mkdir()
    log = folder / "log"
    for name, does in PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/bash\nlog="{log}"\necho "{name} $1 $2" >> "$log"\n{does}\n')
        (folder / name).chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    seen = 0

    def since() -> Counter[str]:
        nonlocal seen
        lines = log.read_text().splitlines()
        new, seen = lines[seen:], len(lines)
        return Counter(" ".join(each.split()[:1]) for each in new if "hostnames" not in each)

    yield since


def documented() -> dict[str, tuple[str, str]]:
    """Calls and files by what happens, from the page."""
    page = (ROOT / "docs" / "shared-clusters.md").read_text()
    table = page.partition("<!-- load: counted by a test -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {what: (asked, files) for what, asked, files in rows}


def said(found: Counter[str]) -> str:
    return ", ".join(f"{number} `{name}`" for name, number in sorted(found.items())) or "none"


def files_in(folder: Path) -> int:
    return sum(not each.is_dir() for each in folder.rglob("*"))


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("every", [False, True])
def test_the_table_of_the_load_is_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Callable[[], Counter[str]], every: bool
) -> None:
    keys = {
        "slurm": {"nodes": NODES, "processes_per_node": PROCESSES, "doctor": False},
        "train.batch_size": NODES * PROCESSES,
        "train.checkpoint.keep_every": 1,
        "eval.every_checkpoint": every,
        "launch.device": "cpu",
    }
    config = load(tiny.write_run(tmp_path, keys))
    run, site = config.run.dir, load_site("generic")
    make_writable(run)
    code = code_snapshot.take(run)
    rows = {"the code of a run is copied": (said(calls()), str(files_in(code.parent)))}
    folders = (run / "slurm" / jobs.SUBMISSIONS, jobs.jobs_folder(run))
    (job,) = send_all(run, config, site, plan(config, site, ["train"], "slurm"), "slurm", code)
    job.log(run).touch()  # as SLURM does
    rows["a job is submitted"] = said(calls()), str(sum(files_in(folder) for folder in folders) - 1)  # a lock
    clock = [1e6]
    set_time(monkeypatch, monotonic=lambda: clock[0], sleep=lambda seconds: None)

    def srun(step: SrunStep, on_poll: Callable[[], None], on_start: Any) -> int:
        rows["a launch begins"] = said(calls()), str(NODES + PER_LAUNCH)
        for step_number in (1, 2, 3):
            path = run / "checkpoints" / f"step-{step_number:08d}"
            path.mkdir(parents=True)
            about: dict[str, Any] = {"step": step_number, "time": time.time(), "files": {}, "attempt": 1}
            storage.put_json(path / "COMMIT", about)
        on_poll()
        assert calls()["sbatch"] == 3 * every
        before = files_in(run)
        for _ in range(360):
            clock[0] += 10.1
            on_poll()
        what = ", with evaluations in the queue (`eval.every_checkpoint`)" if every else ""
        rows[f"an hour of training passes{what}"] = said(calls()), str(files_in(run) - before)
        storage.put_json(run / "exit.json", {"attempt": 1, "code": 0, "reason": "", "agreed": True, "step": 3})
        return 0

    monkeypatch.setattr(SrunStep, "run", srun)
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n", "SLURM_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    file = run / job.submission
    run_submission(str(file), 1, integrity.sha256(file.read_bytes()))
    if not every:
        rows["a launch ends"] = said(calls()), "0"
    assert rows.items() <= documented().items()


def test_an_hour_of_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Callable[[], Counter[str]]
) -> None:
    run = tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    jobs.note(run, jobs.new_job("train", "2", "slurm", "train", "none.json"))
    clock, real = [1e6], time.sleep

    def sleep(seconds: float) -> None:
        if seconds < 1:  # for the end of a program
            real(seconds)
            return
        clock[0] += seconds
        if clock[0] >= 1e6 + 3600:
            raise KeyboardInterrupt

    set_time(monkeypatch, monotonic=lambda: clock[0], sleep=sleep)
    pictures = io.StringIO()
    show_status([run], Console(file=pictures), watch=True, as_json=True)
    assert len(pictures.getvalue().splitlines()) == 720
    assert documented()["an hour of `pipeline status --watch`"] == (said(calls()), "0")


@pytest.mark.slurm
def test_files_of_a_launch(train: Run, whole: Path) -> None:
    train.submit()
    train.until_over()
    train.check(whole)
    (launch,) = train.launches()
    found = sorted(each.name for each in (train.folder / launch.logs).iterdir())
    assert len(found) == len(launch.nodes) + PER_LAUNCH, found
    code, batch = train.folder / "slurm" / "code", (train.folder / "slurm" / "jobs").glob("*")
    assert files_in(code) == 1 and len(list(batch)) == 4
