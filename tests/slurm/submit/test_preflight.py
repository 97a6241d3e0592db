"""What is wrong with a run is told before it is sent, all at once. Real folders, datasets, and a real scheduler."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import slurm_commands
from pipeline.common.errors import EXIT_OTHER, UserError
from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.slurm import SiteConfig
from slurm import scheduler
from slurm.devcluster import DevCluster
from slurm.jobs import Backend, StageName, user
from slurm.local import stages as local
from slurm.scheduler import Partition
from slurm.submit.course import Disk, Forecast
from slurm.submit.job_plan import plan
from slurm.submit.preflight import _check_room, check
from slurm.submit.preflight_cluster import gpus_of
from tests import tiny


def found(
    config: Config,
    *stages: StageName,
    backend: Backend = "local",
    site: SiteConfig | None = None,
    **changes: Any,
) -> tuple[list[str], str]:
    """Warnings, and the message of the problems ("" without any); `changes` are made to each job of the plan."""
    site = site or SiteConfig()
    jobs = [replace(job, **changes) for job in plan(config, site, stages or ["train"], backend)]
    try:
        return check(config, site, jobs, backend), ""
    except UserError as error:
        return [], str(error)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run that was preprocessed."""
    file = tiny.write_run(tmp_path_factory.mktemp("checks"))
    local.preprocess(load(file))
    return file


def test_a_good_run_has_no_problem_and_nothing_is_written(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    assert found(config, "preprocess", "train", "eval") == ([], "")
    assert sorted(tmp_path.rglob("*")) == before


def test_all_problems_are_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    changes = {"run.dir": str(tmp_path / "file" / "run"), "eval.every_checkpoint": True, "parallel.tp": 3}
    _, message = found(load(tiny.write_run(tmp_path, changes)), "train", "eval")
    lines = message.splitlines()
    assert lines[0].startswith("nothing was sent: there are ") and lines[0].endswith(" problems:")
    for part in (
        f"run.dir={tmp_path}/file/run: {tmp_path}/file is a file; set run.dir to",
        "model.heads=2 cannot be cut over parallel.tp=3",
        "eval.every_checkpoint=true",
        "train.checkpoint.keep_every",
        str(tmp_path / "data" / "sea"),
    ):
        assert part in message, part
    assert len([line for line in lines if line.startswith("- ")]) == int(lines[0].split()[5])


def test_the_data_are_looked_at_as_training_does(run: Path, tmp_path: Path) -> None:
    assert found(load(run), "train", "eval") == ([], "")
    part = next((load(run).data_dir / "sea" / "train" / "parts").rglob("*.bin"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    try:
        _, message = found(load(run))
        assert str(part) in message and "bytes; expected:" in message
        assert not found(load(run), "preprocess", "train")[1]  # which mends it
    finally:
        part.write_bytes(whole)
    for changes, part_of_message in (
        ({"data.dir": str(tmp_path / "none")}, "none/sea/train"),
        ({"train.schedule.warmup": "9 steps"}, "warmup 9 steps lasts"),
        ({"resume": {"from": "latest"}}, "train first"),
        ({"data.splits": {"heldout": 0.3}}, "made with other settings"),
    ):
        _, message = found(load(tiny.write_run(run.parent, changes, name="other.yaml")))
        assert part_of_message in message


def test_sources_must_be_there_where_they_are_preprocessed(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path))
    for file in (tmp_path / "sea").iterdir():
        file.unlink()
    _, message = found(config, "preprocess", "train")
    assert "data.sources.0.paths" in message and "matches no file" in message


def test_nothing_held_out_is_no_evaluation(tmp_path: Path) -> None:
    changes = {"data.splits": {"heldout": 0}, "train.validation.samples": 0}
    file = tiny.write_run(tmp_path, changes)
    assert "nothing is held out" in found(load(file), "preprocess", "train", "eval")[1]
    local.preprocess(load(file))
    assert "nothing is held out" in found(load(file), "train", "eval")[1]
    assert found(load(file), "train") == ([], "")


def test_an_evaluation_alone_needs_a_checkpoint(run: Path) -> None:
    assert "does not have a checkpoint" in found(load(run), "eval")[1]


@contextmanager
def nobody() -> Iterator[None]:
    """As a user without rights, where this is root."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_folder_of_others(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder)
        config = load(tiny.write_run(tmp_path, {"run.dir": str(theirs / "run"), "data.dir": str(theirs / "data")}))
        theirs.chmod(0o555)
        with nobody():
            _, message = found(config, "preprocess")
    for key in ("run", "data"):
        assert f"{key}.dir={theirs / key}: this user cannot write to {theirs} (dr-xr-xr-x)" in message


def test_a_checkpoint_must_fit_on_the_disk(tmp_path: Path) -> None:
    # 12 bytes a parameter: some 600 TB.
    giant = {"model.layers": 1000, "model.dim": 65536, "model.heads": 512}
    _, message = found(load(tiny.write_run(tmp_path, giant)), "preprocess", "train")
    assert "TB; make room" in message and "a checkpoint needs" in message


@pytest.mark.parametrize(("free", "word"), [(100, "less than"), (500, "not much more"), (600, "")])
def test_a_tight_disk_is_a_warning(tmp_path: Path, free: int, word: str) -> None:
    findings = Problems()
    disk = Disk(each=100, there=1, most=4, free=free, files_free=None)
    _check_room(load(tiny.write_run(tmp_path)), Forecast(None, None, "", None, disk), findings)
    assert not findings.problems
    assert [word in line for line in findings.warnings] == ([True] if word else [])


def test_exports_need_room_besides_checkpoints(tmp_path: Path) -> None:
    findings = Problems()
    disk = Disk(each=100, there=1, most=4, free=900, files_free=None, exports=250)
    config = load(tiny.write_run(tmp_path, {"train.checkpoint.export": {"every_steps": 4}}))
    _check_room(config, Forecast(None, None, "", None, disk), findings)
    (line,) = findings.warnings
    assert "550 bytes that checkpoints and exports still take" in line or "550 B that checkpoints and exports" in line
    assert "lower train.checkpoint.export.keep" in line


def test_problems_of_the_machine_alone_are_no_mistake_of_the_user() -> None:
    findings = Problems()
    with findings.collecting():
        scheduler.ask(["false"])
    with pytest.raises(UserError) as machine:
        findings.raise_problems()
    findings.problem("key=value is wrong\nin two lines")
    with pytest.raises(UserError, match="there are 2 problems:\n- `false` failed.*\n- key=value is.*\n  in") as both:
        findings.raise_problems()
    assert (machine.value.exit_code, both.value.exit_code) == (EXIT_OTHER, 2)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("gpu:8", 8),
        ("gpu:h100:4(S:0-1),nvme:1", 4),
        ("gpu:a100:2(S:0,1),gpu:t4:1", 3),
        ("gpu", 1),
        ("gpuram:40", 0),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: int) -> None:
    assert gpus_of(Partition("p", True, "up", None, None, 2, 2, ("(null)", gres))) == gpus


def test_without_slurm_it_says_where_to_go(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    _, message = found(load(run), backend="slurm")
    assert "sbatch is not on the path" in message and "--local" in message


def test_a_shell_without_slurm_conf(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "sinfo: error: fetch_config: DNS SRV lookup failed\nsinfo: fatal: Could not establish a configuration source"
    message = str(scheduler.SchedulerError(["sinfo"], said))
    assert message.startswith("`sinfo` failed: no SLURM is configured for this shell: ") and "\n" not in message
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(scheduler.SchedulerError, match=r"squeue is not on the path\nRun this on a login node[^-]*$"):
        scheduler.jobs(["1"])


def test_processes_and_time_of_a_job(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    overrides = ["slurm.processes_per_node=4", "slurm.nodes=2", "slurm.train.time=30", "train.batch_size=8"]
    site = SiteConfig(gpus_per_node=2)
    config = load(run, [*overrides, "launch.stop_before_end_seconds=900"])
    _, message = found(config, backend="slurm", site=site)
    assert "a node has 2 GPUs" in message and "slurm.processes_per_node=2 and slurm.nodes=4" in message
    assert "slurm.train.time is 30 min" in message and "at least 31 min" in message
    _, message = found(load(run, ["launch.device=cuda"]), backend="slurm")
    assert "launch.device=cuda needs GPUs, but jobs ask for none (gpus_per_node of the profile generic is 0)" in message


@pytest.mark.parametrize(
    ("keys", "is_warned"),
    [
        (["slurm.processes_per_node=4"], True),
        ([], False),
        (["slurm.processes_per_node=4", "slurm.train.cpus_per_task=2"], False),
        (["slurm.processes_per_node=4", "slurm.train.exclusive=true"], False),
        (["slurm.processes_per_node=4", "slurm.train.options={cpus-per-gpu: '8'}"], False),
    ],
)
def test_processes_that_would_share_no_cpus_but_one_each(
    run: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], is_warned: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config, site = load(run, [*keys, "train.batch_size=8"]), SiteConfig()
    warnings = check(config, site, plan(config, site, ["train"], "slurm"), "slurm", dry_run=True)
    assert any("cpus_per_task is not set" in each for each in warnings) == is_warned


QOS = "normal|cancel||00:00:00\nslow|cancel||00:01:00\ntop|cancel||00:00:00\nhigh|cluster|normal,slow|00:00:00\n"
PARTITIONS = """\
PartitionName=train Default=YES GraceTime=0 PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=grace Default=NO GraceTime=10 PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=back Default=NO GraceTime=0 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Default=NO GraceTime=0 PriorityTier=10 PreemptMode=CANCEL State=UP
"""


@pytest.mark.parametrize(
    ("kind", "keys", "warned"),
    [
        ("partition_prio", "", "partition train has PreemptMode=CANCEL"),
        ("partition_prio", "slurm.train.partition=grace", ""),
        ("partition_prio", "slurm.train.partition=back,train", "partition train has"),
        ("partition_prio", "slurm.train.partition=urgent", ""),
        ("partition_prio", "slurm.chain=afterany", ""),
        ("none", "", ""),
        ("qos", "", "qos normal has PreemptMode=CANCEL"),
        ("qos", "slurm.train.qos=slow", ""),
        ("qos", "slurm.train.qos=top", ""),
    ],
)
def test_jobs_that_are_cancelled_when_they_are_preempted(
    run: Path, monkeypatch: pytest.MonkeyPatch, kind: str, keys: str, warned: str
) -> None:
    """From what the commands of a real cluster answered."""
    names = ("train*", "grace", "back", "urgent")
    answers = {
        "sinfo": "".join(f"{name}|up|1-00:00:00|1-infinite|0/3/0/3|(null)|(null)\n" for name in names),
        "scontrol show config": f"PreemptMode             = REQUEUE\nPreemptType             = preempt/{kind}\n",
        "scontrol show partition": PARTITIONS,
        "sacctmgr --noheader --parsable2 show qos": QOS,
        "sacctmgr --noheader --parsable2 show associations": "dev||high,normal,slow,top|normal\n",
    }
    monkeypatch.setattr(scheduler, "here", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    for module in (scheduler, slurm_commands):
        monkeypatch.setattr(
            module,
            "ask",
            lambda words, *_, **__: next(answers[key] for key in answers if " ".join(words).startswith(key)),
        )
    warnings, message = found(load(run, keys.split()), backend="slurm")
    assert not message
    assert [line.partition(": ")[2].startswith(warned) and "slurm.chain=afterany" in line for line in warnings] == (
        [True] if warned else []
    ), warnings


SIZES = """\
small*|up|infinite|1-infinite|0/3/0/3|(null)|(null)|16|64000
mixed|up|infinite|1-infinite|0/2/0/2|(null)|(null)|16|64000
mixed|up|infinite|1-infinite|0/1/0/1|(null)|(null)|64|32000
old|up|infinite|1-infinite|0/3/0/3|(null)|(null)|16+|64000
"""


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ("slurm.train={cpus_per_task: 4, mem_gb: 62}", ""),
        ("slurm.train={cpus_per_task: 5}", "slurm.train: 4 processes x 5 CPUs = 20 CPUs per node on 1 node is more"),
        ("slurm.train={mem_gb: 63}", "slurm.train: 63 GB per node on 1 node is more than partition small has"),
        ("slurm.train={mem_gb: 0}", ""),
        ("slurm.train={cpus_per_task: 5,partition: mixed}", ""),
        ("slurm.train={cpus_per_task: 5,mem_gb: 40,partition: mixed}", "40 GB per node on 1 node"),
        ("slurm.nodes=2 slurm.train={cpus_per_task: 5,partition: mixed}", "20 CPUs per node on 2 nodes"),
        ("slurm.train={cpus_per_task: 5,partition: old}", ""),
        ("slurm.train={cpus_per_task: 5,options: {overcommit: ''}}", ""),
    ],
)
def test_jobs_that_no_node_can_hold(run: Path, monkeypatch: pytest.MonkeyPatch, keys: str, part: str) -> None:
    answers = {"sinfo": SIZES, "scontrol show config": "", "scontrol show partition": "", "sacctmgr": ""}
    monkeypatch.setattr(scheduler, "here", lambda: True)
    for module in (scheduler, slurm_commands):
        monkeypatch.setattr(
            module,
            "ask",
            lambda words, *_, **__: next(answers[key] for key in answers if " ".join(words).startswith(key)),
        )
    words = keys.replace(" slurm.", "|slurm.").split("|")
    config = load(run, [*words, "slurm.processes_per_node=4", "train.batch_size=16"])
    _, message = found(config, backend="slurm", site=SiteConfig(has_sacct=False))
    assert part in message and bool(message) == bool(part), message


slurm = pytest.mark.slurm


@slurm
def test_a_run_that_the_cluster_takes(cluster: DevCluster, run: Path) -> None:
    assert found(load(run, ["slurm.train.time=1d", "slurm.train.partition=train,grace"]), backend="slurm") == ([], "")
    assert found(load(run, ["slurm.train.account=DEV", "slurm.train.qos=normal"]), backend="slurm") == ([], "")
    everything: tuple[StageName, ...] = ("preprocess", "train", "eval")
    assert found(load(run), *everything, backend="slurm", tasks=101) == ([], "")


@slurm
def test_what_the_cluster_would_refuse(cluster: DevCluster, run: Path) -> None:
    cases = {
        "slurm.train.partition=trane": ["there is no partition 'trane'", "train, grace, cancel, short, eval, urgent"],
        "slurm.train={partition: short, time: 1h}": ["slurm.train.time is 1 h", "allows 5 min", "at most that"],
        "slurm.train={partition: 'train,short', time: 1h}": ["partition short allows 5 min"],  # EnforcePartLimits=ALL
        "slurm.nodes=3 slurm.spare_nodes=1": ["slurm.nodes=3 + slurm.spare_nodes=1 is more than the 3 nodes"],
        "slurm.train.account=theirs": ["slurm.train.account=theirs is not an account of the user", "one of: ", "dev"],
        "slurm.train.qos=express": ["slurm.train.qos=express is not open", "normal"],
        "slurm.nodes=30 slurm.train={account: theirs, time: 9d, constraint: 'a100|ib*2'}": [
            *("there are 4 problems", "is more than the 3 nodes", "slurm.train.time is 9 d", "is not an account"),
            "slurm.train.constraint=a100|ib*2: no node here has the feature a100 or ib; leave it out",
        ],
        "slurm.train={account: theirs, qos: express}": ["is not an account", "slurm.train.qos=express is not open"],
    }
    for overrides, parts in cases.items():
        words = overrides.split(" slurm.")
        config = load(run, [words[0], *(f"slurm.{word}" for word in words[1:]), "train.batch_size=60"])
        _, message = found(config, backend="slurm")
        for part in parts:
            assert part in message, message
    _, message = found(load(run), "preprocess", backend="slurm", tasks=102)
    assert "slurm.array.tasks=102, but this cluster allows arrays of 101 tasks" in message


@slurm
def test_what_the_cluster_may_refuse(cluster: DevCluster, run: Path) -> None:
    warnings, message = found(load(run), backend="slurm", site=SiteConfig(gpus_per_node=1))
    assert not message and any("have none (gres: (null))" in line for line in warnings)
    # A quality of service may pass over the limits of a partition.
    config = load(run, ["slurm.train={partition: short, time: 1h, qos: normal}"])
    warnings, message = found(config, backend="slurm")
    assert not message and any("allows 5 min" in line for line in warnings)
    (warning,), message = found(load(run, ["slurm.train.partition=cancel"]), backend="slurm")
    assert not message and "partition cancel has PreemptMode=CANCEL without GraceTime" in warning
    assert scheduler.qualities()["normal"].mode == "cluster"


@slurm
def test_the_cluster_is_read_as_it_was_configured(cluster: DevCluster) -> None:
    partitions = scheduler.partitions()
    assert [name for name, partition in partitions.items() if partition.default] == ["train"]
    assert (partitions["train"].minutes, partitions["short"].minutes) == (24 * 60, 5)
    assert {partition.nodes for partition in partitions.values()} == {3}
    assert scheduler.configuration()["MaxArraySize"] == "101"
    mine = scheduler.associations(user())
    assert {row.account for row in mine} >= {"dev"} and all("normal" in row.qos for row in mine)
    assert scheduler.associations("somebody-else") == []


def test_room_that_the_check_of_the_nodes_would_miss_is_missed_before(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same limit, and not where nothing checks the nodes."""
    real = os.statvfs

    def small(path: Any) -> os.statvfs_result:
        values = list(real(path))
        return os.statvfs_result([*values[:4], 6_000_000 // values[1], *values[5:]])

    monkeypatch.setattr(scheduler, "here", lambda: False)
    assert "1.0 GiB are needed" not in found(load(run), backend="slurm")[1]
    monkeypatch.setattr(os, "statvfs", small)
    message = found(load(run), backend="slurm")[1]
    assert f"run.dir ({load(run).run.dir}): 0.0 GiB are free, 1.0 GiB are needed" in message
    assert "slurm.doctor=false" in message
    assert "are needed" not in found(load(run, ["slurm.doctor=false"]), backend="slurm")[1]
    assert "are needed" not in found(load(run))[1]
