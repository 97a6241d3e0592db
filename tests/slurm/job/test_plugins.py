"""Plug-ins of an installed package in jobs: all stages of a run, on a real scheduler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.train.run.folder import read_metrics
from slurm.devcluster import DevCluster
from tests.plugins.test_installed import install, write_file
from tests.slurm.training import Run

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_a_run_with_plugins(cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(install(tmp_path)), os.environ.get("PYTHONPATH")]))
    )
    keys = {"profile": "devcluster", "nodes": 1, "processes_per_node": 2, "doctor": "false"}
    run = Run(cluster, write_file(tmp_path), "run", *(f"slurm.{key}={value}" for key, value in keys.items()))
    run.submit(command="run")
    run.until_over()
    rows = [row for row in read_metrics(run.folder) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4], run.story()
    lines = [f"{row['step']} loss={row['loss']} grad_norm={row['grad_norm']}" for row in rows]
    assert (run.folder / "lines.txt").read_text().splitlines() == lines
    assert list((run.folder / "eval").glob("step-*.json")), run.story()
