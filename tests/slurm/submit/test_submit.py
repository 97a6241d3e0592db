"""Submitting a run: the script of a job, what is sent once and only once, refusals of the scheduler, the background."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from rich.console import Console

from pipeline.common import trust
from pipeline.common.errors import MachineError, UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.curate.stage import curate
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.work.frozen_plan import make_data_dir
from pipeline.data.work.leases import Lease, LeaseWatch, take
from pipeline.train.run.folder import make_writable
from pipeline.train.run.lock import Lock
from slurm import jobs, scheduler
from slurm.devcluster import DevCluster
from slurm.local import stages
from slurm.record.submission import read_submission
from slurm.scheduler import SchedulerError
from slurm.site.site_profile import load_site
from slurm.submit import code_snapshot, job_plan, permissions, submitit_backend
from slurm.submit import submit as submit_module
from slurm.submit.complete_stages import missing_stages
from slurm.submit.stop_lead_time import signal_seconds
from slurm.submit.submit import submit
from tests import tiny
from tests.waiting import until

PATIENCE = 120.0
"""Seconds until a test gives up waiting."""


CODE = Path("/snapshot"), "0123"
"""A copy of the code, and the digest of its list."""


def config_of(root: Path, changes: dict[str, Any] | None = None, **site: Any) -> Config:
    """A run that uses a profile with these keys."""
    file = root / "site.yaml"
    file.write_text(yaml.safe_dump(site))
    slurm = {"slurm.profile": str(file)}
    return load(tiny.write_run(root, {"launch.device": "cpu", **slurm, **(changes or {})}))


def script_of(config: Config, stage: jobs.StageName = "train") -> str:
    site = load_site(config.slurm.profile)
    job = job_plan.plan(config, site, [stage], "slurm")[0]
    return submitit_backend.script(config.run.dir, job, site, CODE, config, "slurm")


def options(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE))


def test_the_script_asks_for_what_run_file_and_profile_say(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {
            "slurm.nodes": 2,
            "slurm.spare_nodes": 1,
            "slurm.train": {"time": "1-12:00:00", "mem_gb": 1.5, "options": {"reservation": "night", "hold": ""}},
        },
        defaults={"partition": "gpu,urgent", "account": "project", "cpus_per_task": 6, "exclude": "n[1,7-9]"},
        train={"qos": "long", "constraint": "a100&ib", "exclusive": True},
        gpus_per_node=4,
        gpu_type="a100",
        modules=["cuda/12.8"],
        setup=["ulimit -n 65536"],
        environment={"NCCL_DEBUG": "it's $HOME"},
    )
    script = script_of(config)
    given = options(script)
    assert given >= {
        *("--partition=gpu,urgent", "--account=project", "--qos=long", "--constraint='a100&ib'"),
        *("--exclude='n[1,7-9]'", "--time=2160", "--nodes=3", "--ntasks-per-node=4", "--cpus-per-task=6"),
        *("--mem=1536M", "--exclusive", "--gres=gpu:a100:4", "--reservation=night", "--hold", "--requeue"),
        *("--no-kill", "--kill-on-invalid-dep=yes", "--signal=USR2@120", "--open-mode=append"),
        f"--output={config.run.dir}/slurm/jobs/%j_0_log.out",
    }
    assert not [each for each in given if each.startswith(("--wckey", "--error", "--array"))]
    lines = script.splitlines()
    setup = lines[lines.index("# setup") + 1 : lines.index("# command") - 1]
    setup = setup[next(n for n, line in enumerate(setup) if line.startswith("module load cuda/12.8 || ")) :]
    assert setup[setup.index("# What is run is what was submitted.") :][5:7] == [
        "pipeline_code=/snapshot",
        "pipeline_digest=0123",
    ]
    assert setup[1 : setup.index("# What is run is what was submitted.")] == [
        "ulimit -n 65536",
        """export NCCL_DEBUG='it'"'"'s $HOME'""",
        "export PYTHONSAFEPATH=1",
        "export SRUN_CPUS_PER_TASK=6",
        "export PYTHONPATH=/snapshot${PYTHONPATH:+:$PYTHONPATH}",
    ]
    (command,) = [line for line in lines if " -m slurm.job.batch_entry 1" in line]
    assert "srun" not in command and command.endswith(' -m slurm.job.batch_entry 1 "$@"')
    assert lines[lines.index(command) - 1] == "set -- TIME-train.json DIGEST"


def test_consent_to_files_of_others_goes_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    assert trust.TRUSTED not in script_of(config)
    monkeypatch.setenv(trust.TRUSTED, "root,group:root")
    assert f"export {trust.TRUSTED}=root,group:root" in script_of(config).splitlines()


def test_a_job_ends_where_its_module_cannot_be_loaded(tmp_path: Path) -> None:
    script = script_of(config_of(tmp_path, modules=["cuda/12.8"]))
    line = next(line for line in script.splitlines() if line.startswith("module load"))
    shell = f"module() {{ return 1; }}\n{line}\necho went on"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("module load cuda/12.8 failed on ")


def test_the_script_of_other_sites(tmp_path: Path) -> None:
    site = {"gpus_by": "gpus-per-node", "gpus_per_node": 2, "wckey": "key", "has_requeue": False}
    config = config_of(tmp_path, {"slurm.chain": "singleton", "slurm.array.tasks": 3}, **site)
    given = options(script_of(config))
    assert {"--gpus-per-node=2", "--wckey=key", "--no-requeue", "--time=60"} <= given
    given = options(script_of(config, "preprocess"))
    assert {"--array=0-2%3", f"--output={config.run.dir}/slurm/jobs/%A_%a_0_log.out"} <= given
    assert not [each for each in given if "gpu" in each]


def test_all_tasks_of_a_large_array_may_run_at_a_time(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"slurm.array.tasks": 500})
    assert "--array=0-499%500" in options(script_of(config, "preprocess"))


@pytest.mark.parametrize(
    ("option", "todo"),
    [("time", "set time"), ("partition", "set partition"), ("output", "leave it out"), ("--mem", "without dashes")],
)
def test_options_that_other_keys_decide_are_refused(tmp_path: Path, option: str, todo: str) -> None:
    config = config_of(tmp_path, {"slurm.train": {"options": {option: "1"}}})
    with pytest.raises(UserError, match=f"options has {option}.*{todo}"):
        submit(config, ["train"], "slurm", Console(), dry_run=True)


@pytest.mark.parametrize("name", ["comment=x --output", "a b", "x\ty", "ä"])
def test_names_of_options_are_words(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, {"slurm.train": {"options": {name: "1"}}} if "\t" not in name else None)
    site = load_site(config.slurm.profile)
    (job,) = job_plan.plan(config, site, ["train"], "slurm")
    resources = job.resources.model_copy(update={"options": {name: "1"}})
    with pytest.raises(UserError, match="write the long name"):
        submitit_backend.refuse_derived_options(replace(job, resources=resources), site)


@pytest.mark.parametrize("odd", ["%j", "100%", "a\\b"])
@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_a_folder_whose_name_slurm_would_replace_is_refused(tmp_path: Path, odd: str, backend: jobs.Backend) -> None:
    config = config_of(tmp_path, {"run.dir": str(tmp_path / odd)})
    with pytest.raises(UserError, match=r"run.dir = .*SLURM replaces.*set run.dir to another one"):
        submit(config, ["train"], backend, Console(), dry_run=True)
    with pytest.raises(UserError, match=r"run.dir = .*SLURM replaces"):
        submitit_backend.send(
            config.run.dir,
            job_plan.plan(config, load_site("generic"), ["train"], backend)[0],
            [tmp_path],
            backend=backend,
        )
    assert not config.run.dir.exists()


@pytest.mark.parametrize("key", ["partition", "qos", "comment"])
def test_what_is_not_one_line_reaches_no_script(tmp_path: Path, key: str) -> None:
    """The last look before a script is written, whatever came before it."""
    config = config_of(tmp_path)
    site = load_site(config.slurm.profile)
    (job,) = job_plan.plan(config, site, ["train"], "slurm")
    bad = {key: "a\n#SBATCH --wrap=id"}
    resources = job.resources.model_copy(update={"options": bad} if key == "comment" else bad)
    with pytest.raises(UserError, match=rf"{key}: must be one line.*'\\n'"):
        submitit_backend.script(config.run.dir, replace(job, resources=resources), site, CODE, config, "slurm")


def test_gres_of_options_does_not_take_the_place_of_gpus(tmp_path: Path) -> None:
    options = {"slurm.train": {"options": {"gres": "nvme:1"}}}
    with pytest.raises(UserError, match="options has gres.* 4 GPUs .*gpus_by"):
        submit(config_of(tmp_path, options, gpus_per_node=4), ["train"], "slurm", Console(), dry_run=True)
    given = script_of(config_of(tmp_path, options, gpus_per_node=4, gpus_by="gpus-per-node")).splitlines()
    assert {"#SBATCH --gres=nvme:1", "#SBATCH --gpus-per-node=4"} <= set(given)


def test_processes_that_do_not_fit_the_layout(tmp_path: Path) -> None:
    for degrees, needs in ({"tp": 2}, "a multiple of 2; "), ({"tp": 2, "dp_shard": 1}, "needs 2; "):
        config = config_of(tmp_path, {"slurm.nodes": 3, "parallel": degrees})
        with pytest.raises(UserError) as refused:
            job_plan.train_processes(config, load_site(config.slurm.profile), "slurm")
        message = str(refused.value)
        assert message.startswith("slurm.nodes=3 with 1 process on each node (one per node without GPUs) are 3 in all")
        assert needs in message and "change slurm.nodes, slurm.processes_per_node" in message


def test_a_dry_run_needs_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = io.StringIO()
    submit(config_of(tmp_path), ["preprocess", "train"], "slurm", Console(file=out, width=200), dry_run=True)
    assert "warning: no SLURM here: partition, account, limits were not checked" in out.getvalue()
    assert "singleton" not in out.getvalue() and "the same job is queued again" in out.getvalue()


def test_finished_data_gets_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def shown(*stages: jobs.StageName) -> str:
        out = io.StringIO()
        submit(config, stages, "slurm", Console(file=out, width=200), dry_run=True)
        return out.getvalue()

    config = config_of(tmp_path)
    assert "pipeline preprocess" in shown("preprocess", "train", "eval")
    preprocess(config)
    text = shown("preprocess", "train", "eval")
    assert "preprocess: complete, so no job is sent for it" in text
    assert "pipeline preprocess" not in text and "pipeline train" in text and "pipeline eval" in text
    assert "pipeline preprocess" in shown("preprocess"), "asked for by name"


def test_a_complete_training_and_evaluation_get_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    whole: list[jobs.StageName] = ["preprocess", "train", "eval"]
    stages.preprocess(config)
    stages.train(config)
    monkeypatch.setenv("PATH", str(tmp_path))

    def sent(*overrides: str, only: Sequence[jobs.StageName] = whole) -> tuple[set[str], str]:
        """Stages whose jobs a dry run shows, and its text."""
        out = io.StringIO()
        submit(load(tmp_path / "run.yaml", overrides), only, "slurm", Console(file=out, width=200), dry_run=True)
        return {stage for stage in whole if f"pipeline {stage} " in out.getvalue()}, out.getvalue()

    shown, text = sent()
    assert shown == {"eval"} and "train: complete at step 8, so no job is sent for it" in text
    for more in ("train.duration=9 steps", "resume.from=3", "train.checkpoint.export.every_steps=4"):
        assert sent(more)[0] == {"train", "eval"}, more
    assert sent(only=["train"])[0] == {"train"}, "asked for by name"
    stages.evaluate(config)
    shown, text = sent()
    assert not shown and text.splitlines()[-1] == f"nothing to submit: all stages of {config.run.dir} are complete"
    assert sent("eval.stride=8")[0] == {"eval"}
    for other in ("model.layers=3", "model.dim=64"):
        found = missing_stages(load(tmp_path / "run.yaml", [other]), whole, Console(quiet=True))
        assert found == ["train", "eval"], "it differs from its checkpoint, of which the checks tell"
    state = config.run.dir / "exit.json"
    state.write_bytes(orjson.dumps({**orjson.loads(state.read_bytes()), "code": 1}))
    assert sent()[0] == {"train", "eval"}, "it did not end well"


def test_a_refused_submission_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, has_sacct=False)
    stages.preprocess(config)
    commands = {"sbatch": "echo 'sbatch: error: Invalid account' >&2; exit 1", "scontrol": "", "squeue": ""}
    commands["sinfo"] = "echo 'cpu*|up|infinite|1-infinite|0/2/0/2|(null)|(null)'"
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with pytest.raises(SchedulerError, match="Invalid account"):
        submit(config, ["train"], "slurm", Console(quiet=True))
    refusal = jobs.refusal(config.run.dir)
    assert refusal is not None and refusal.stage == "train" and "Invalid account" in refusal.why
    assert jobs.sent(config.run.dir) == []


def test_a_dry_run_here_shows_the_command_with_its_run_file(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (job,) = job_plan.plan(config, load_site(config.slurm.profile), ["train"], "local")
    text = submitit_backend.script(config.run.dir, job, load_site(config.slurm.profile), CODE, config, "local")
    assert text.endswith(f" -m pipeline train {config.run.dir}/slurm/submissions/TIME-train.yaml")


def test_the_signal_comes_early_enough_for_a_step_and_a_save(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert signal_seconds(config, 60) == 120
    assert signal_seconds(config, 4) == 60
    config.run.dir.mkdir()

    def measured(*rows: dict[str, float]) -> int:
        (config.run.dir / "metrics.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
        return signal_seconds(config, 60)

    assert measured({"step": 1, "step_seconds": 0.5}) == 60
    # The first step of an attempt takes long once.
    assert measured({"step_seconds": 500}, {"step_seconds": 20}, {"step_seconds": 20.2, "save_seconds": 79.9}) == 201
    assert measured({"step_seconds": 20, "save_seconds": 5000}) == 15 * 60


def test_the_group_and_its_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        group = str(os.getgid())
        config = config_of(tmp_path, {"slurm.umask": "0002", "slurm.group": group})
        with pytest.raises(UserError, match=f"slurm.group = {group}: there is no such Unix group"):
            permissions.apply_permissions(config)
        import grp

        permissions.apply_permissions(
            config_of(tmp_path, {"slurm.umask": "0007", "slurm.group": grp.getgrgid(os.getgid()).gr_name})
        )
        (config.run.dir / "new").mkdir()
        assert (config.run.dir.stat().st_mode & 0o7777) == 0o2775
        assert ((config.run.dir / "new").stat().st_mode & 0o7777) == 0o2770
        os.umask(0o077)
        permissions.apply_permissions(config_of(tmp_path))
        assert os.umask(0o022) == 0o077
    finally:
        os.umask(before)


def test_without_slurm_one_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    site = load_site(config.slurm.profile)
    monkeypatch.setenv("PATH", str(tmp_path))
    config.run.dir.mkdir()
    with pytest.raises(SchedulerError, match=r"`sbatch` failed: sbatch is not on the path\nRun this on a login node"):
        send_all(config.run.dir, config, site, job_plan.plan(config, site, ["train"], "slurm"), "slurm", None)


@pytest.mark.guard
@pytest.mark.usefixtures("hangup")
def test_a_local_run_outlives_its_shell_and_is_not_started_twice(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, {"launch.device": "cpu"})
    # It cannot be over before it is looked at.
    source = load(file).data_dir / "sea"
    source.mkdir(parents=True)
    held = take(source, "plan", LeaseWatch())
    assert isinstance(held, Lease)
    with held:
        # A rank's environment does not reach it, the GPUs that the user chose do.
        environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "3"}
        shell = subprocess.Popen(
            ["bash", "-c", '"$@"; sleep 100', "bash", *tiny.command("preprocess", file, "--local")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert shell.stdout
        told = shell.stdout.readline()
        assert shell.stdout.readline().startswith("next: pipeline status")
        os.killpg(shell.pid, signal.SIGHUP)
        assert shell.stdout.read() == ""  # nothing holds the terminal any more
        shell.wait()

        run = tmp_path / "run"
        (job,) = jobs.sent(run)
        assert told == f"preprocess: process {job.job}\n"
        seen = Path(f"/proc/{job.job}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=3" in seen and not [
            each for each in seen if each.startswith((b"RANK=", b"WORLD_"))
        ]
        again = tiny.pipeline("preprocess", file, "--local")
        assert again.returncode == 0 and f"preprocess: process {job.job} on" in again.stdout
        assert jobs.sent(run) == [job]
    until(lambda: not jobs.is_alive(run, job))
    assert job.log(run).read_text().endswith(" done\n")
    assert "done" in tiny.pipeline("preprocess", file, "--status").stdout


HELD = {"options": {"hold": ""}}
"""Jobs that stay in the queue, where they can be looked at."""


@pytest.fixture
def clean(cluster: DevCluster, tmp_path: Path) -> Iterator[Path]:
    """A folder for runs whose jobs do not outlive the test."""
    yield tmp_path
    for run in tmp_path.glob("*/slurm/jobs.jsonl"):
        scheduler.cancel([job.job for job in jobs.sent(run.parents[1]) if job.where == "slurm"])


def send(config: Config, stages: Sequence[jobs.StageName], step: int | None = None) -> tuple[list[jobs.Job], str]:
    """Submit, and what was told."""
    console = Console(file=io.StringIO(), width=200)
    found = submit(config, stages, "slurm", console, step=step)
    assert isinstance(console.file, io.StringIO)
    return found, console.file.getvalue()


def send_all(run: Path, config: Config, *more: Any) -> list[jobs.Job]:
    """`slurm.submit.submit.send_all` with the folders that `submit` makes before."""
    make_writable(run)
    make_data_dir(config)
    return submit_module.send_all(run, config, *more)


def held(root: Path, changes: dict[str, Any] | None = None) -> Config:
    return config_of(root, changes, defaults={"partition": "train", "time": 10, **HELD})


def details(job: jobs.Job) -> dict[str, str]:
    return scheduler.details(job.job)


@pytest.mark.slurm
def test_stages_wait_for_each_other_and_are_sent_once(clean: Path) -> None:
    config = held(clean, {"slurm.nodes": 2, "slurm.spare_nodes": 1, "slurm.array.tasks": 99})
    sent, told = send(config, ["preprocess", "train", "eval"])
    array, finish, train, _ = sent
    assert array.tasks == 2 and jobs.sent(config.run.dir) == sent  # of two sources, each of one unit
    assert [job.after for job in sent] == [(), (array.job,), (finish.job,), (train.job,)]
    assert re.match(f"afterany:{array.job}_\\*", details(finish)["Dependency"])
    assert details(train)["Dependency"].startswith(f"afterok:{finish.job}(")
    assert (details(train)["NumNodes"], details(train)["Requeue"]) == ("3-3", "1")
    assert f"train: job {train.job}, after {finish.job}" in told and f"pipeline cancel {config.run.dir}" in told
    submission = read_submission(config.run.dir / train.submission)
    assert submission.config() == config and submission.command == ("train",)
    assert submission.code == code_snapshot.place(config.run.dir)[0]
    # Nothing is unpickled by a job.
    assert not list(jobs.jobs_folder(config.run.dir).glob("*.pkl"))

    again, told = send(config, ["preprocess", "train", "eval"])
    assert again == sent == jobs.sent(config.run.dir)
    assert "already submitted, so nothing was sent" in told and f"train: job {train.job} (PENDING, " in told
    with pytest.raises(UserError, match=r"(?s)another config.*train.duration: \"8 steps\" there, \"9 steps\" here"):
        send(load(clean / "run.yaml", ["train.duration=9 steps"]), ["train"])
    with pytest.raises(UserError, match="These keys differ:") as refused:
        send(load(clean / "run.yaml", ["slurm.train.options={comment: x}"]), ["train"])
    assert "slurm.train.options" in str(refused.value) and "options: " not in str(refused.value), refused.value
    assert jobs.sent(config.run.dir) == sent


@pytest.mark.slurm
def test_a_run_that_was_cancelled_starts_again_when_its_jobs_have_ended(clean: Path) -> None:
    config = held(clean)
    run = config.run.dir
    site = load_site(config.slurm.profile)
    (job,) = send_all(run, config, site, job_plan.plan(config, site, ["train"], "slurm"), "slurm", None)
    jobs.note_cancelled(run, now=False)
    with pytest.raises(UserError, match=f"has cancelled the run, and train: job {job.job} .* has not ended yet"):
        send(config, ["preprocess"])
    assert jobs.cancelled(run) and jobs.sent(run) == [job]
    scheduler.cancel([job.job])
    _, told = send(config, ["preprocess"])
    assert jobs.cancelled(run) is None and "it may start again now" in told


@pytest.mark.slurm
def test_of_two_commands_at_the_same_moment_one_sends(clean: Path) -> None:
    config = held(clean)
    words = tiny.command("preprocess", clean / "run.yaml", "--slurm")
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = sorted(each.communicate(timeout=PATIENCE)[0] for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert told[0].startswith("preprocess: array of 2 jobs") and told[1].startswith("the run is already submitted")
    assert [job.stage for job in jobs.sent(config.run.dir)] == ["preprocess", "finish"]


@pytest.mark.slurm
@pytest.mark.parametrize("chain", ["singleton", pytest.param("afterany", marks=pytest.mark.slow)])
def test_links_of_a_chain_wait_in_the_queue(clean: Path, chain: str) -> None:
    config = held(clean, {"slurm.chain": chain, "slurm.links": 3})
    site = load_site(config.slurm.profile)
    planned = job_plan.plan(config, site, ["train", "eval"], "slurm")
    *links, evaluation = send_all(config.run.dir, config, site, planned, "slurm", None)
    assert [job.link for job in links] == [1, 2, 3] and len({job.name for job in links}) == 1
    waits = [re.sub(r"\(.*?\)", "", details(job)["Dependency"]) for job in links]
    before = [f"afterany:{job.job}" for job in links[:2]]
    assert waits == (["singleton"] * 3 if chain == "singleton" else ["", *before])
    assert details(evaluation)["Dependency"].startswith(f"afterany:{links[2].job}(")
    assert {details(job)["Requeue"] for job in links} == {"0"}


@pytest.mark.first(2)
@pytest.mark.slurm
@pytest.mark.parametrize(
    ("resources", "said", "hint"),
    [
        ({"partition": "nowhere"}, "invalid partition specified: nowhere", "`sinfo` shows"),
        ({"account": "nobody"}, "Invalid account", "sacctmgr show assoc"),
        ({"qos": "none"}, "Invalid qos", "sacctmgr show assoc"),
        ({"partition": "short", "time": "1h"}, "time limit is invalid", "partition that allows it"),
        ({"constraint": "a100"}, "Invalid feature", "sinfo --format"),
        ({"options": {"nonsense": "1"}}, "unrecognized option", "sbatch --help"),
    ],
)
def test_what_sbatch_refuses_is_one_message(clean: Path, resources: dict[str, Any], said: str, hint: str) -> None:
    config = held(clean, {"slurm.train": resources})
    site = load_site(config.slurm.profile)
    with pytest.raises(SchedulerError) as refused:
        send_all(config.run.dir, config, site, job_plan.plan(config, site, ["train"], "slurm"), "slurm", None)
    folder = jobs.jobs_folder(config.run.dir)
    (script,) = folder.glob("*.sh")
    assert str(refused.value).startswith(f"`sbatch {script}` failed: sbatch: ")
    assert said in str(refused.value) and hint in str(refused.value).splitlines()[-1]
    assert "#SBATCH --signal=USR2@" in script.read_text()
    assert jobs.sent(config.run.dir) == []


@pytest.mark.slurm
def test_an_array_that_is_too_large(clean: Path) -> None:
    config = held(clean, {"slurm.array.tasks": 5000})
    site = load_site(config.slurm.profile)
    with pytest.raises(SchedulerError, match=r"(?s)Invalid job array.*Lower slurm.array.tasks"):
        send_all(config.run.dir, config, site, job_plan.plan(config, site, ["preprocess"], "slurm"), "slurm", None)


@pytest.mark.slurm
def test_if_one_is_refused_those_before_it_leave_the_queue(clean: Path) -> None:
    config = held(clean, {"slurm.chain": "singleton", "slurm.links": 3, "slurm.train": {"qos": "tiny"}})
    site = load_site(config.slurm.profile)
    with pytest.raises(MachineError) as refused:
        send_all(config.run.dir, config, site, job_plan.plan(config, site, ["train"], "slurm"), "slurm", None)
    assert jobs.sent(config.run.dir) == []
    message = str(refused.value)
    found = re.search(r"Nothing of it stays in the queue: what was sent before it \((\d+)\) was cancelled", message)
    assert found, message
    assert "QOSMaxSubmitJobPerUserLimit" in message and "lower slurm.links" in message
    until(lambda: scheduler.details(found[1])["JobState"] == "CANCELLED")


@pytest.mark.slurm
def test_what_was_sent_before_an_interrupt_leaves_the_queue(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = held(clean)
    site = load_site(config.slurm.profile)
    sent: list[str] = []

    def note(run: Path, job: jobs.Job) -> None:
        sent.append(job.job)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "note", note)
    with pytest.raises(KeyboardInterrupt):
        send_all(config.run.dir, config, site, job_plan.plan(config, site, ["train"], "slurm"), "slurm", None)
    until(lambda: scheduler.details(sent[0])["JobState"] == "CANCELLED")


@pytest.mark.slurm
def test_where_somebody_trains_by_hand_nothing_is_sent(clean: Path) -> None:
    assert tiny.pipeline("preprocess", tiny.write_run(clean)).returncode == 0
    config = held(clean)
    config.run.dir.mkdir(exist_ok=True)
    lock = Lock.take(config.run.dir)
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        send(config, ["train"])
    lock.release()
    (config.run.dir / "stop").touch()
    (job,), told = send(config, ["train"])
    assert f"removed {config.run.dir / 'stop'}" in told and not (config.run.dir / "stop").exists()
    assert details(job)["JobState"] == "PENDING"


@pytest.mark.slurm
def test_a_folder_with_blanks_quotes_and_signs(clean: Path) -> None:
    config = config_of(
        clean,
        {"run.dir": str(clean / 'it\'s `touch evil` $(touch evil) $HOME "ü 漢" ;#'), "slurm.array.tasks": 1},
        defaults={"partition": "train", "time": 10},
    )
    site = load_site(config.slurm.profile)
    config.run.dir.mkdir(parents=True, exist_ok=True)
    code = code_snapshot.take(config.run.dir)
    job = send_all(
        config.run.dir, config, site, job_plan.plan(config, site, ["preprocess"], "slurm")[:1], "slurm", code
    )[0]
    until(lambda: all(state.state == "COMPLETED" for state in scheduler.jobs([job.job]).values()))
    assert job.log(config.run.dir).read_text().endswith(" done\n")
    assert not [*Path.cwd().glob("evil*"), *clean.glob("evil*")]


@pytest.mark.slurm
def test_a_job_can_be_submitted_from_inside_of_one(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9", "SBATCH_PARTITION": "nowhere", "SLURM_MEM_PER_NODE": "5"}
    ranks = {"RANK": "3", "WORLD_SIZE": "9", "LOCAL_RANK": "3", "MASTER_ADDR": "gone", "PIPELINE_LOGS": "/gone"}
    ranks |= {"PMIX_RANK": "3", "OMPI_COMM_WORLD_RANK": "3"}
    for name, value in {**inherited, **ranks, "MINE": "kept", "OMPI_MCA_btl": "tcp"}.items():
        monkeypatch.setenv(name, value)
    config = config_of(
        clean,
        defaults={"partition": "train", "time": 10, "cpus_per_task": 1},
        setup=[f"env > {clean}/$SLURM_JOB_ID.env"],
    )
    site = load_site(config.slurm.profile)
    finish = job_plan.plan(config, site, ["preprocess"], "slurm")[0]
    config.run.dir.mkdir(parents=True, exist_ok=True)
    code = code_snapshot.take(config.run.dir)
    (array,) = send_all(config.run.dir, config, site, [finish], "slurm", code)
    assert os.environ["RANK"] == "3" and os.environ["SLURM_NTASKS"] == "9"
    until(lambda: all(state.state == "COMPLETED" for state in scheduler.jobs([array.job]).values()))
    seen = [dict(line.partition("=")[::2] for line in file.read_text().splitlines()) for file in clean.glob("*.env")]
    assert len(seen) == array.tasks
    for each in seen:
        assert each["MINE"] == "kept" and each["OMPI_MCA_btl"] == "tcp"
        assert not set(each) & (set(ranks) | {"SBATCH_PARTITION", "SLURM_MEM_PER_NODE"})
    assert array.log(config.run.dir, 1).read_text().endswith(" done\n")


@pytest.mark.guard
def test_curation_that_observes_is_left_out_when_it_is_done(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    preprocess(config)
    observed = load(tmp_path / "run.yaml", ["data.curate={rules: {gopher_quality: {min_words: 5}}}"])
    whole: list[jobs.StageName] = ["curate", "preprocess", "train"]
    assert missing_stages(observed, whole, Console(quiet=True)) == ["curate", "train"]
    curate(observed)
    assert missing_stages(observed, whole, Console(quiet=True)) == ["train"]
    others = load(tmp_path / "run.yaml", ["data.curate={rules: {gopher_quality: {min_words: 6}}}"])
    assert missing_stages(others, whole, Console(quiet=True)) == ["curate", "train"]
