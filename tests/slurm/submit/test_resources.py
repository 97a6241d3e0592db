"""What profile, run file and shell add to a job: memory, GPUs, accounts, variables, modules."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.slurm import ResourcesConfig, SiteConfig
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.doctor import command as doctor
from slurm.job.srun_step import SrunStep
from slurm.jobs import StageName
from slurm.record.planned_job import PlannedJob
from slurm.record.submission import Submission
from slurm.site import sbatch_env
from slurm.site.site_profile import site_of
from slurm.submit import preflight, submitit_backend
from slurm.submit.batch_script import SETUP_LINES
from slurm.submit.dry_run import jobs_table
from slurm.submit.job_plan import plan
from slurm.submit.submit import submit
from tests import tiny
from tests.slurm.submit.test_submit import CODE, config_of, options, script_of


def test_no_memory_in_gb_is_all_memory_of_a_node(tmp_path: Path) -> None:
    for given, asked in ((0, "--mem=0"), (0.0001, "--mem=1M"), (2, "--mem=2G")):
        assert asked in options(script_of(config_of(tmp_path, {"slurm.train": {"mem_gb": given}})))
    job = PlannedJob("train", ("train",), ResourcesConfig(time=5, mem_gb=0), name="name")
    memory = next(each for each in jobs_table([job], "slurm").columns if "memory" in str(each.header))
    assert list(memory.cells) == ["all"]


def step(folder: Path, *, stage: Any = "train", nodes: tuple[str, ...] = ("n1",), **site: Any) -> SrunStep:
    """A step of two processes that write what they have of the environment."""
    submission = Submission(
        stage,
        ("train",),
        ResourcesConfig(),
        run=folder,
        where="slurm",
        run_file=folder,
        code=None,
        site=SiteConfig(**site),
    )
    words = ("-c", "import os; print(os.environ.get('MASTER_ADDR'), os.environ['SLURM_PROCID'])")
    return SrunStep(submission, words, nodes, 2, folder, {"MASTER_ADDR": "here"})


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
    assert sorted((tmp_path / "node-0000.log").read_text().splitlines()) == ["0: here 0", "1: here 1"]


def in_bash(lines: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The lines of a script as bash runs them where nothing but the path is set."""
    given = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, env=given)


def setup_of(script: str) -> list[str]:
    lines = script.splitlines()
    return lines[lines.index(SETUP_LINES) + 1 : lines.index("# What is run is what was submitted.")]


def test_modules_are_loaded_by_a_shell_that_does_not_know_them(tmp_path: Path) -> None:
    """The shell of a job is no login shell; where `module` is defined is tried out or said by the profile."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text('module() { echo "$@ after $PLACE"; }\n')
    site = {"modules": ["cuda/12.8"], "setup": ["echo setup"], "environment": {"X": "1"}}
    lines = setup_of(script_of(config_of(tmp_path, **site)))
    done = in_bash(lines, MODULESHOME=str(tmp_path), PLACE="home")
    assert (done.returncode, done.stdout) == (0, "load cuda/12.8 after home\nsetup\n")
    done = in_bash(lines)
    assert done.returncode == 2 and "before_modules" in done.stderr and "no command 'module' on " in done.stderr
    before = [f"export PLACE=before\n. {tmp_path}/init/bash", "module use /shared"]
    done = in_bash(setup_of(script_of(config_of(tmp_path, **site, before_modules=before))))
    assert (done.returncode, done.stdout) == (0, "use /shared after before\nload cuda/12.8 after before\nsetup\n")
    assert "module" not in "\n".join(setup_of(script_of(config_of(tmp_path))))


def test_places_of_processes_are_named_to_the_srun_of_a_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must begin with block"):
        SiteConfig(distribution="cyclic")
    site = {"distribution": "block:block", "cpu_bind": "cores", "srun_options": ["--cpu-bind=none"]}
    asked = ["--distribution=block:block", "--cpu-bind=cores", "--cpu-bind=none"]

    def places(command: list[str]) -> list[str]:
        return [word for word in command if word.startswith(("--distribution", "--cpu-bind"))]

    training = step(tmp_path, **site)
    assert places(training.command()) == asked  # of two, the last one counts
    assert places(step(tmp_path).command()) == ["--distribution=block"]
    for other in (step(tmp_path, stage="eval", **site), replace(training, together=False)):
        assert places(other.command()) == asked[2:]
    assert places(training.command(outside=True)) == asked[2:]  # what looks after the job


def looked_at(config: Config, environment: dict[str, str], *stages: StageName) -> tuple[list[str], list[str]]:
    """Problems and warnings that variables of the shell are for the jobs of a run."""
    found, site = Problems(), site_of(config, "slurm", environment)
    sbatch_env.check(environment, site, plan(config, site, stages or ["train"], "slurm"), found)
    return found.problems, found.warnings


def test_the_shell_says_who_pays_where_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"ACCOUNT": "mine", "PARTITION": "a,b", "QOS": "night", "CONSTRAINT": "x&y", "TIMELIMIT": "1-00:00:00"}
    for name, value in mine.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("PIPELINE_VERBOSE", "1")
    out = io.StringIO()
    with pytest.raises(UserError, match="sea"):  # there are no data, which is not what this is about
        submit(config_of(tmp_path), ["train"], "slurm", Console(file=out, width=200), dry_run=True)
    asked = {"--account=mine", "--partition=a,b", "--qos=night", "--constraint='x&y'", "--time=1440"}
    assert asked <= options(out.getvalue())
    assert "account mine, qos night, constraint x&y" in out.getvalue()
    # Run file, the profile's stage and its defaults come before it; an empty value is none.
    config = config_of(
        tmp_path,
        {"slurm.train": {"account": "run", "time": "5min"}},
        defaults={"partition": "default"},
        train={"qos": "stage"},
    )
    (job,) = plan(config, site_of(config, "slurm", {**os.environ, "SBATCH_CONSTRAINT": ""}), ["train"], "slurm")
    asked_for = job.resources
    assert (asked_for.account, asked_for.partition, asked_for.qos) == ("run", "default", "stage")
    assert (asked_for.constraint, asked_for.time) == (None, 5)
    for name, value, words in (
        ("SBATCH_TIMELIMIT", "soon", "must be a time.*set time in the profile, or unset SBATCH_TIMELIMIT"),
        ("SBATCH_ACCOUNT", "a\nb", "one line"),
    ):
        with pytest.raises(UserError, match=f"^{name}=.*{words}"):
            site_of(config_of(tmp_path), "slurm", {name: value})
    # What nothing needs is not looked at: jobs of this machine, and where all stages have a time.
    assert site_of(config_of(tmp_path), "local", {"SBATCH_TIMELIMIT": "soon"}).defaults.time is None
    times = {f"slurm.{stage}": {"time": 5} for stage in ("preprocess", "train", "eval")}
    assert site_of(config_of(tmp_path, times), "slurm", {"SBATCH_TIMELIMIT": "soon"}).defaults.time is None
    assert site_of(config_of(tmp_path), "slurm", {"SBATCH_TIMELIMIT": "2-12"}).defaults.time == 60 * 60


def test_other_variables_of_the_shell_are_not_passed_over(tmp_path: Path) -> None:
    refused = {"SBATCH_RESERVATION": "night", "SBATCH_EXCLUSIVE": "", "SBATCH_MEM_PER_NODE": "8G", "SBATCH_GRES": "gpu"}
    problems, warnings = looked_at(config_of(tmp_path), {**refused, "SBATCH_HINT": "nomultithread"}, "train", "eval")
    where = "is set in this shell, but jobs do not get it; set"
    assert problems == [
        f"SBATCH_EXCLUSIVE= {where} slurm.train.exclusive and slurm.eval.exclusive (or exclusive in the profile), or "
        "unset SBATCH_EXCLUSIVE",
        f"SBATCH_GRES=gpu {where} slurm.gpus_per_node (or gpus_per_node in the profile), or unset SBATCH_GRES",
        f"SBATCH_MEM_PER_NODE=8G {where} slurm.train.mem_gb and slurm.eval.mem_gb (or mem_gb in the profile), or "
        "unset SBATCH_MEM_PER_NODE",
        f"SBATCH_RESERVATION=night {where} slurm.train.options.reservation and slurm.eval.options.reservation (or "
        "options.reservation in the profile), or unset SBATCH_RESERVATION",
    ]
    (warning,) = warnings
    assert warning.startswith("SBATCH_HINT=nomultithread") and "slurm.train.options.hint" in warning
    # The same option of run file or profile takes its place; and what jobs need as it is, is nobody's choice.
    decided = {"exclusive": False, "mem_gb": 4, "options": {"reservation": "day", "hint": "compute_bound"}}
    theirs = {"SBATCH_OUTPUT": "x", "SBATCH_EXPORT": "NONE", "SBATCH_OVERCOMMIT": "no", "SBATCH_SOMETHING": "1"}
    config = config_of(tmp_path, {"slurm.train": decided}, gpus_per_node=1)
    assert looked_at(config, {**refused, **theirs, "SBATCH_HINT": "x"}) == ([], [])
    assert looked_at(config_of(tmp_path), {"SBATCH_GPUS": "2"}, "preprocess") == ([], [])
    (problem,) = looked_at(config_of(tmp_path), {"SBATCH_CLUSTERS": "far"})[0]
    assert problem.endswith("; unset SBATCH_CLUSTERS")


@pytest.mark.slurm
def test_a_job_is_sent_with_what_the_shell_says(
    cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from inside of another job, in which sbatch sets none of these itself."""
    monkeypatch.setenv("SBATCH_PARTITION", "short")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "somebody")
    for account in {row.account for row in scheduler.associations(jobs.user())}:
        (tmp_path / account).mkdir()
        monkeypatch.setenv("SBATCH_ACCOUNT", account)
        config = config_of(tmp_path / account, defaults={"time": 5, "options": {"hold": ""}})
        sent = submit(config, ["preprocess"], "slurm", Console(file=io.StringIO()))
        shown = [scheduler.details(job.job) for job in sent]
        scheduler.cancel([job.job for job in sent])
        assert {(each["Account"], each["Partition"]) for each in shown} == {(account, "short")}
    monkeypatch.setenv("SBATCH_ACCOUNT", "nobody")
    with pytest.raises(UserError, match="account=nobody is not an account.*or the variable SBATCH_ACCOUNT"):
        submit(config_of(tmp_path), ["preprocess"], "slurm", Console(), dry_run=True)


def test_gpus_are_asked_for_by_the_run_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, {"launch.device": "cuda", "slurm.gpus_per_node": 4, "eval.processes": 2})
    site = site_of(config)
    train, evaluation = plan(config, site, ["train", "eval"], "slurm")
    assert (train.processes_per_node, train.gpus_per_node, evaluation.gpus_per_node) == (4, 4, 2)
    assert "--gres=gpu:4" in options(submitit_backend.script(config.run.dir, train, site, CODE, config, "slurm"))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert doctor._gpus(config) == 4
    uneven = config_of(tmp_path, {"slurm.gpus_per_node": 4, "eval.processes": 6}, gpus_per_node=6)
    with pytest.raises(UserError, match=r"nodes of 4 processes each \(slurm.gpus_per_node\)"):
        plan(uneven, site_of(uneven), ["eval"], "slurm")
    none = config_of(tmp_path, {"slurm.gpus_per_node": 0}, gpus_per_node=8)
    (job,) = plan(none, site_of(none), ["train"], "slurm")
    assert (job.processes_per_node, job.gpus_per_node) == (1, 0)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("launch.device", "cuda", "launch.device=cuda"),
        ("train.attention.backend", "flex", "train.attention.backend=flex"),
        ("train.precision.fp8", {"min_size": 16}, "train.precision.fp8.backend=torchao"),
    ],
)
def test_a_run_that_needs_gpus_is_not_sent_without(tmp_path: Path, key: str, value: Any, shown: str) -> None:
    def problems(stage: StageName = "train", **more: Any) -> list[Any]:
        config = config_of(tmp_path, {"launch.device": "auto", key: value, **more})
        return list(preflight._needs_gpus(config, plan(config, site_of(config), [stage], "slurm")))

    with pytest.raises(UserError) as refused:
        submit(config_of(tmp_path, {"launch.device": "auto", key: value}), ["train"], "slurm", Console())
    (problem,) = [line[2:] for line in str(refused.value).splitlines() if " needs GPUs" in line]
    assert problem.startswith(f"{shown} needs GPUs, but jobs ask for none (gpus_per_node of the profile {tmp_path}")
    assert "is 0); set slurm.gpus_per_node, or gpus_per_node in the profile, or " in problem
    assert bool(problems("eval")) == (key == "launch.device") and not problems("preprocess")
    assert not problems(**{"slurm.gpus_per_node": 1})
    assert not problems(**{"slurm.train": {"options": {"gres": "gpu:a100:1"}}})
    assert not problems(**{key: "auto" if key != "train.precision.fp8" else None})


def test_a_training_is_shown_before_its_data_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What speaks against sending it comes after that, with the exit code that sending it would have."""
    run = tiny.write_run(tmp_path, {"launch.device": "cpu"})
    monkeypatch.setenv("PATH", str(tmp_path))

    def shown(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", *words, str(run), "--slurm", "--dry-run"])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), *capsys.readouterr()

    code, out, error = shown("train")
    assert "#SBATCH" not in out and "length: " in out and str(tmp_path / "run" / "slurm" / "jobs") in out
    assert "nothing was" not in out, "the verdict is the error"
    assert code == 2 and error.startswith("error: nothing was sent: ") and "pipeline preprocess" in error
    code, out, error = shown("run")
    assert (code, error) == (0, "") and out.splitlines()[-1].startswith("no problem was found; nothing was sent")
    assert out.count("┡") == 1, "one table"
    for command in ("run", "train", "eval"):
        code, out, _ = shown(command, "--verbose")
        assert "--- script of run-" in out and "#SBATCH --requeue" in out
    monkeypatch.delenv("PIPELINE_VERBOSE")
