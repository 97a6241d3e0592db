"""Jobs that follow one another: links of a chain, and the stages of a run."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from tests import tiny
from tests.slurm.training import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(("slurm.chain=singleton", "slurm.links=3"), marks=pytest.mark.slow),
        ("slurm.chain=afterany", "slurm.links=3", "slurm.train.partition=cancel"),
    ],
    indirect=True,
)
def test_a_chain_of_links(train: Run, whole: Path) -> None:
    """For sites without requeue, or where a preempted job is cancelled: the next job resumes, and those that are not
    needed leave the queue."""
    first, second, third = train.submit()
    train.until_step(12)
    cancels = "slurm.train.partition=cancel" in train.overrides
    if cancels:
        train.preempt()
    else:
        scheduler.ask(["scancel", "--signal=USR2", first])
    train.until_over()
    train.check(whole)
    one, two = train.launches()
    assert (one.job, one.link, two.job, two.link) == (first, 1, second, 2)
    assert one.end is not None and (one.end.code, one.end.next) == (75, "scheduler" if cancels else "next link")
    assert two.checkpoint >= 12, "it has saved, where it is preempted within KillWait"
    states = scheduler.jobs([first, second, third])
    ends = ["PREEMPTED" if cancels else "COMPLETED", "COMPLETED", "CANCELLED"]
    assert [states[job].state for job in (first, second, third)] == ends


def test_a_whole_run(cluster: DevCluster, run_file: Path, whole: Path, tmp_path: Path) -> None:
    """Preprocess as an array, train, evaluate permanent checkpoints on the way and the last one at the end."""
    data = tmp_path / "data"
    keys = ["train.checkpoint.keep_every=40", "eval.every_checkpoint=true", f"data.dir={data}", "slurm.array.tasks=2"]
    run = Run(cluster, run_file, str(tmp_path / "all"), *keys)
    done = tiny.pipeline("run", run_file, *run.overrides, "--slurm")
    assert done.returncode == 0, done.stderr
    again = tiny.pipeline("run", run_file, *run.overrides, "--slurm")
    assert again.returncode == 0 and "already" in again.stdout, "a second submission attaches"
    run.until_over()
    run.until_over()  # evaluations that were sent on the way
    run.check(whole)
    stages = [job.stage for job in jobs.sent(run.folder)]
    assert sorted(set(stages)) == ["eval", "finish", "preprocess", "train"]
    assert {job.step for job in jobs.sent(run.folder) if job.stage == "eval"} >= {40, 80}
    table = orjson.loads(tiny.pipeline("eval", run_file, *run.overrides, "--table", "--json").stdout)
    assert [row["step"] for row in table["evaluations"]] == [40, 80, 100], table
    states = run.until_accounted()
    assert {state.state for state in states.values()} == {"COMPLETED"}, states
    again = tiny.pipeline("run", run_file, *run.overrides, "--slurm")
    assert again.returncode == 0 and "nothing to submit" in again.stdout, again.stdout + again.stderr
    assert len(jobs.sent(run.folder)) == len(stages)
