"""Preprocessing as an array of jobs on a real scheduler: the same bytes as here, whatever happens to its tasks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.jobs import Job
from slurm.record.launch_log import Launch, launches
from slurm.status.command import status
from tests import tiny
from tests.data.runs import datasets, make_config, write_jsonl
from tests.data.stage import left_by_living_nodes, receipts, write_run_file
from tests.waiting import until

pytestmark = pytest.mark.slurm

TASKS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "lines.jsonl", 15_000, words=120)


def config_of(root: Path, corpus: Path, shuffle: str, workers: int = 1) -> Config:
    """A hundred units; its tokenizer takes a moment to train."""
    return make_config(
        root,
        [{"name": "lines", "type": "jsonl", "paths": [str(corpus)]}],
        tokenizer={"train": {"vocab_size": 400, "max_bytes": 200_000}},
        preprocess={"workers": workers, "unit_bytes": 60_000, "shuffle": shuffle},
    )


@pytest.fixture(scope="module", params=["unit"])
def done(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of one command on this machine."""
    config = config_of(tmp_path_factory.mktemp("done"), corpus, request.param, workers=2)
    preprocess(config)
    return config


@pytest.fixture
def sent(cluster: DevCluster, corpus: Path, done: Config, tmp_path: Path) -> tuple[Config, Job, Job]:
    """A run whose array starts now, each task on a node of its own: config, array, and the job that finishes."""
    config, array, finish = send(config_of(tmp_path, corpus, done.data.preprocess.shuffle), tmp_path)
    for job in (array, finish):
        scheduler.update(job.job, {"StartTime": "now"})
    return config, array, finish


def send(config: Config, tmp_path: Path) -> tuple[Config, Job, Job]:
    """Send the array and the job that finishes, which start in an hour."""
    file = write_run_file(config, tmp_path / "run.yaml")
    words = ["slurm.profile=devcluster", f"slurm.array.tasks={TASKS}", "slurm.preprocess.exclusive=true"]
    # It waits until it is looked at: what sends it may take longer to end than the array to work.
    words += ["slurm.preprocess.options={begin: now+1hour}"]
    said = tiny.pipeline("preprocess", file, *words, "--slurm")
    assert said.returncode == 0, said.stderr
    array, finish = jobs.sent(config.run.dir)
    assert (array.stage, array.tasks, finish.stage, finish.after) == ("preprocess", TASKS, "finish", (array.job,))
    return config, array, finish


def is_over(job: Job) -> bool:
    states = scheduler.jobs([job.job]).values()
    return not any(state.waits or state.runs for state in states)


def nodes_of(job: Job) -> dict[str, str]:
    """The node of each task that runs."""
    return {number: state.nodes for number, state in scheduler.jobs([job.job]).items() if state.state == "RUNNING"}


def logs(config: Config) -> str:
    """All that was said, for a failure."""
    files = sorted([*jobs.jobs_folder(config.run.dir).glob("*.out"), *config.run.dir.glob("logs/*/*.log")])
    return "\n".join(f"== {file}\n{file.read_text()}" for file in files)


def check_finished(config: Config, done: Config, finish: Job) -> list[Launch]:
    """The same bytes as of one command, and the second pass is the finish's alone; returns the array's launches."""
    until(lambda: is_over(finish))
    found = launches(config.run.dir)
    last = found[-1]
    assert (last.stage, last.job) == ("finish", finish.job), logs(config)
    assert last.end is not None, logs(config)
    assert last.end.code == 0, logs(config)
    assert datasets(config) == datasets(done)
    assert verify(config.data_dir).problems == []
    assert left_by_living_nodes(config) == []
    said = (config.run.dir / last.logs / "rank-0000.log").read_text()
    assert ("shuffling" in said) == (config.data.preprocess.shuffle == "global")
    return [launch for launch in found if launch.stage == "preprocess"]


def test_an_array_gives_the_same_bytes(sent: tuple[Config, Job, Job], done: Config) -> None:
    config, array, finish = sent
    tasks = check_finished(config, done, finish)
    assert sorted(task.job for task in tasks) == array.numbers
    assert len({task.nodes for task in tasks}) == TASKS
    assert [task.end.code for task in tasks if task.end] == [0] * TASKS
    said = [(config.run.dir / task.logs / "rank-0000.log").read_text() for task in tasks]
    assert all(re.search("units? made|units are complete", text) and "shuffling" not in text for text in said), said


@pytest.mark.parametrize("done", ["global"], indirect=True)
def test_tasks_that_are_lost_in_the_middle(sent: tuple[Config, Job, Job], done: Config, cluster: DevCluster) -> None:
    """One is cancelled, the node of one is lost, one is at the end of its time: the others, they themselves when they
    start again, and the finish make what is missing."""
    config, array, finish = sent
    cancelled, lost, stopped = array.numbers
    node = until(lambda: len(nodes := nodes_of(array)) == TASKS and nodes)[lost]
    until(lambda: receipts(config) >= 5)
    scheduler.cancel([cancelled])
    scheduler.ask(["scancel", "--signal=USR2", stopped])  # as the scheduler does: to the steps alone
    cluster.kill_node(node)
    try:
        assert receipts(config) < receipts(done) - 2 * TASKS, "there was nothing left to do"
        until(lambda: any(launch.restarts for launch in launches(config.run.dir, "preprocess")))
        tasks = check_finished(config, done, finish)
    finally:
        cluster.start_node(node)
    ends = {(task.job, task.restarts): task.end and (task.end.code, task.end.next) for task in tasks}
    assert ends[cancelled, 0] == (75, "scheduler")
    assert ends[stopped, 0] == (75, "requeue")
    assert ends[stopped, 1] == (0, "done")
    assert ends[lost, 0] is None
    assert ends[lost, 1] == (0, "done")
    assert not any("shuffling" in (config.run.dir / task.logs / "rank-0000.log").read_text() for task in tasks)


@pytest.mark.slow
def test_an_array_that_somebody_cancels(cluster: DevCluster, corpus: Path, tmp_path: Path) -> None:
    """Nobody wants what is left: the finish does not make it alone, and the training that waits for it never starts."""
    config, array, finish = send(config_of(tmp_path, corpus, "unit"), tmp_path)
    run = config.run.dir
    words = ["sbatch", "--parsable", "--output=/dev/null", f"--dependency=afterok:{finish.job}"]
    train = scheduler.ask([*words, "--kill-on-invalid-dep=yes", "--wrap=sleep 600"]).strip()
    jobs.note(run, jobs.new_job("train", train, "slurm", "name", "none.json", after=(finish.job,)))
    scheduler.cancel([array.job])
    scheduler.update(finish.job, {"StartTime": "now"})
    until(lambda: is_over(finish))
    assert scheduler.jobs([finish.job])[finish.job].state == "FAILED", logs(config)
    (launch,) = launches(run)
    assert launch.end is not None and (launch.stage, launch.end.code, launch.end.next) == ("finish", 75, "end")
    assert f"array {array.job} was cancelled (3 of 3 tasks)" in launch.end.reason and "submit" in launch.end.reason
    assert not receipts(config)
    until(lambda: scheduler.jobs([train])[train].state == "CANCELLED")
    (found,) = status({run: None})
    assert (found.state, found.stage, found.why) == ("stopped", "preprocess", launch.end.reason)
    # The same from accounting, once the controller has forgotten.
    until(lambda: scheduler.accounting(array.numbers).keys() == set(array.numbers))
    assert all(each.state.startswith("CANCELLED by ") for each in scheduler.accounting(array.numbers).values())
