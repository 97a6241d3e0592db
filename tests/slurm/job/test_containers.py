"""Stages whose processes start in a container: a namespace of mounts with folders that are empty stands for one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import orjson
import pytest

from pipeline.config.load import load
from pipeline.eval.reports import report_path
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from tests import tiny
from tests.slurm.training import LONG, Run, curve, profile_with

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

ROOT = Path(__file__).parents[3]


def test_all_stages_start_where_neither_the_installed_code_nor_the_scheduler_is(
    cluster: DevCluster, tmp_path: Path
) -> None:
    attempt = ["bash", "-c", f"unshare --mount mount -t tmpfs none {tmp_path}"]
    if subprocess.run(attempt, capture_output=True).returncode:
        pytest.skip("this user may not mount a folder in a namespace of its own")
    hidden = [ROOT / "pipeline", ROOT / "slurm", Path(cluster.environment["SLURM_CONF"]).parent]
    inside = tmp_path / "inside"
    script = " && ".join(
        [*(f"mount -t tmpfs none {folder}" for folder in hidden), f'echo "$*" >>{inside}', 'exec "$@"']
    )
    profile = profile_with(tmp_path, f"exec unshare --mount bash -c '{script}' container \"$@\"")
    file = tiny.write_run(tmp_path, {"slurm": {"nodes": 2, "array": {"tasks": 2}}, "launch.device": "cpu"})
    run = Run(cluster, file, "run", f"slurm.profile={profile}")
    run.submit(command="run")
    sent = jobs.sent(run.folder)
    numbers = [number for job in sent for number in job.numbers]
    try:
        run.until_over(seconds=LONG * len(sent))  # one after the other
    finally:
        scheduler.cancel(numbers)
    # The controller may have forgotten the first ones, but then the last one would not have been started.
    assert {state.state for state in scheduler.jobs(numbers).values()} == {"COMPLETED"}, run.story()
    started = inside.read_text()
    for stage in ("preprocess", "train", "eval", "doctor"):
        assert f"srun_task {stage}" in started, started
    other = [f"run.dir={tmp_path / 'other'}", f"data.dir={tmp_path / 'other-data'}", "launch.processes=2"]
    done = tiny.pipeline("run", file, *other, timeout=LONG * len(sent))
    assert done.returncode == 0, done.stderr
    assert curve(run.folder) == curve(tmp_path / "other")
    reports = [orjson.loads(report_path(load(file, words), 8).read_bytes()) for words in (run.overrides, other)]
    assert reports[0]["blended"] == reports[1]["blended"]
