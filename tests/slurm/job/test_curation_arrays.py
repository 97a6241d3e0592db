"""Curation as arrays of jobs on a real scheduler: the same bytes as here, also when a node is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.data.curate.passes.names import pass_names
from pipeline.data.curate.stage import curate
from pipeline.data.provenance.excerpts import ExcerptReader
from slurm import jobs
from slurm.devcluster import DevCluster
from slurm.jobs import Job
from slurm.record.launch_log import launches
from tests import tiny
from tests.data.curate.runs import curate_config, results, write_corpus
from tests.data.stage import left_by_living_nodes, write_run_file
from tests.slurm.job.test_preprocess_array import is_over, logs, nodes_of
from tests.waiting import until

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 1500)


@pytest.fixture(scope="module")
def done(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of one command on this machine."""
    config = curate_config(tmp_path_factory.mktemp("done"), corpus)
    curate(config, read_texts=ExcerptReader(config.data.curate))
    return config


def send(config: Config, tmp_path: Path) -> list[Job]:
    file = write_run_file(config, tmp_path / "run.yaml")
    words = ["slurm.profile=devcluster", "slurm.array.tasks=2", "slurm.preprocess.exclusive=true"]
    said = tiny.pipeline("curate", file, *words, "--slurm")
    assert said.returncode == 0, said.stderr
    sent = jobs.sent(config.run.dir)
    assert [job.stage for job in sent] == ["curate"] * 11 + ["decide"]
    return sent


def check_finished(config: Config, done: Config, last: Job) -> None:
    until(lambda: is_over(last), seconds=1500)
    end = launches(config.run.dir)[-1]
    assert (end.stage, end.job) == ("decide", last.job), logs(config)
    assert end.end is not None and end.end.code == 0, logs(config)
    assert results(config) == results(done)
    assert left_by_living_nodes(config) == []


@pytest.mark.slow
def test_arrays_give_the_same_bytes(cluster: DevCluster, corpus: Path, done: Config, tmp_path: Path) -> None:
    config = curate_config(tmp_path, corpus)
    check_finished(config, done, send(config, tmp_path)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["measure", "match", "join", "decide"])
def test_a_node_is_lost(name: str, cluster: DevCluster, corpus: Path, done: Config, tmp_path: Path) -> None:
    config = curate_config(tmp_path, corpus)
    assert config.data.curate is not None
    sent = send(config, tmp_path)
    array = sent[list(pass_names(config.data.curate)).index(name)]
    node = next(iter(until(lambda: nodes_of(array), seconds=300).values()))
    cluster.kill_node(node)
    try:
        check_finished(config, done, sent[-1])
    finally:
        cluster.start_node(node)
