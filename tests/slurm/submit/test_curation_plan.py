"""Jobs of a curation on paper: an array per pass, each after the one before, and one that ends the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.slurm import SiteConfig
from slurm.jobs import StageName
from slurm.submit.job_plan import plan
from tests.data.curate.runs import curate_config

ALL = {"exact": "text", "near": {}, "lines": {}}


def planned(tmp_path: Path, duplicates: dict[str, Any], *stages: StageName, backend: Any = "slurm") -> list[Any]:
    config: Config = curate_config(tmp_path, tmp_path, {"duplicates": duplicates})
    return plan(config, SiteConfig(), stages, backend, units=9)


@pytest.mark.parametrize(
    ("duplicates", "passes"),
    [
        ({}, ["measure", "excerpts", "decide"]),
        ({"exact": "text"}, ["measure", "match", "join", "rank", "choose", "excerpts", "decide"]),
        ({"lines": {}}, ["measure", "rank", "kept", "lines", "excerpts", "decide"]),
        (ALL, ["measure", "match", "join", "shingles", "rank", "choose", "kept", "lines", "excerpts", "decide"]),
    ],
)
def test_an_array_for_each_pass(tmp_path: Path, duplicates: dict[str, Any], passes: list[str]) -> None:
    *arrays, last = planned(tmp_path, duplicates, "curate")
    assert [job.name.rpartition("-")[2] for job in arrays] == passes
    assert {job.command for job in arrays} == {("curate", "--units")}
    assert [job.tasks for job in arrays] == [1 if name == "join" else 4 for name in passes]
    for before, job in zip([None, *arrays], [*arrays, last], strict=False):
        assert [(after.job, after.kind) for after in job.after] == ([(before, "afterany")] if before else [])
    assert (last.stage, last.command, last.tasks) == ("decide", ("curate",), 1)
    assert len({job.name.replace("-", "") for job in [*arrays, last]}) == len(passes) + 1
    assert last.name.endswith("-curate-end")


def test_preprocess_waits_for_the_decisions(tmp_path: Path) -> None:
    jobs = planned(tmp_path, {}, "curate", "preprocess")
    decide = next(job for job in jobs if job.stage == "decide")
    array = next(job for job in jobs if job.stage == "preprocess")
    assert [(after.job, after.kind) for after in array.after] == [(decide, "afterok")]


def test_on_this_machine_it_is_one_process(tmp_path: Path) -> None:
    (job,) = planned(tmp_path, ALL, "curate", backend="local")
    assert (job.stage, job.command) == ("decide", ("curate",))
