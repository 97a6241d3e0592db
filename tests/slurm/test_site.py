"""What profile, run file and shell add to a job: memory, GPUs, accounts, variables, modules."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.slurm import ResourcesConfig, SiteConfig
from slurm import scheduler
from slurm.devcluster import DevCluster
from slurm.paper import job_lines
from slurm.plan import PlannedJob
from slurm.step import Step
from slurm.submission import Submission
from tests.slurm.test_submit import config_of, options, script_of


def test_no_memory_in_gb_is_all_memory_of_a_node(tmp_path: Path) -> None:
    for given, asked in ((0, "--mem=0"), (0.0001, "--mem=1M"), (2, "--mem=2G")):
        assert asked in options(script_of(config_of(tmp_path, {"slurm.train": {"mem_gb": given}})))
    job = PlannedJob("train", "name", ("train",), ResourcesConfig(time=5, mem_gb=0))
    assert "all memory of each node" in "\n".join(job_lines(1, job, "slurm"))


def step(folder: Path, *, stage: Any = "train", nodes: tuple[str, ...] = ("n1",), **site: Any) -> Step:
    """A step of two processes that write what they have of the environment."""
    submission = Submission(folder, stage, "slurm", ("train",), folder, None, SiteConfig(**site), ResourcesConfig())
    words = ("-c", "import os; print(os.environ.get('MASTER_ADDR'), os.environ['SLURM_PROCID'])")
    return Step(submission, words, nodes, 2, folder, {"MASTER_ADDR": "here"})


@pytest.mark.slurm
def test_processes_have_variables_in_a_job_without_any(cluster: DevCluster, tmp_path: Path) -> None:
    """Of `sbatch --export=NONE`: there srun takes none along, unless it is told to."""
    command = step(tmp_path, nodes=(cluster.nodes[0],)).command()
    (tmp_path / "job.py").write_text(
        "import os, subprocess\n"
        f"open({str(tmp_path / 'job')!r}, 'w').write(os.environ.get('SLURM_EXPORT_ENV', ''))\n"
        f"subprocess.run({command!r}, env={{**os.environ, 'MASTER_ADDR': 'here'}})\n"
    )
    wrapped = f"{sys.executable} {tmp_path / 'job.py'}"
    asked = ["--parsable", "--export=NONE", "--mem=0", "--ntasks=2", f"--nodelist={cluster.nodes[0]}", "--time=2"]
    number = scheduler.ask(["sbatch", *asked, f"--output={tmp_path / 'log'}", f"--wrap={wrapped}"]).strip()
    end = time.monotonic() + 120
    while any(state.waits or state.runs for state in scheduler.jobs([number]).values()):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert (tmp_path / "job").read_text() == "NONE", (tmp_path / "log").read_text()
    assert [file.read_text() for file in sorted(tmp_path.glob("rank-*.log"))] == ["here 0\n", "here 1\n"]
