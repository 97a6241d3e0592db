"""`pipeline init --profile` on sites whose commands are imitated, in the form of SLURM 22.05, and on a real one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from slurm.devcluster import DevCluster
from slurm.site.site_init import write_profile
from slurm.site.site_profile import load_site
from tests import tiny

CONFIG = "ClusterName = marsh\nAccountingStorageType   = accounting_storage/slurmdbd\nJobRequeue              = 1\n"
GPU = "gpu:h100:8(S:0-1),nvme:1"


def site(folder: Path, monkeypatch: pytest.MonkeyPatch, partitions: str, kinds: str, **more: str | None) -> None:
    """Commands of SLURM that give these answers; None fails."""
    answers = {"sacctmgr": "", "scontrol": CONFIG, "sacct": "", **more}
    (folder / "bin").mkdir()
    (folder / "parts").write_text(partitions)
    (folder / "kinds").write_text(kinds)
    scripts = {"sinfo": f'case "$*" in *--partition*) cat {folder}/kinds;; *) cat {folder}/parts;; esac'}
    for name, answer in answers.items():
        scripts[name] = "exit 1" if answer is None else f"printf %s {json.dumps(answer)!s}".replace("\\n", "\n")
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)


def test_a_site_that_says_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = f"gpu*|up|2-00:00:00|1-infinite|8/2/0/10|{GPU}|ib\ncpu|up|infinite|1-infinite|8/2/0/10|(null)|(null)\n"
    site(tmp_path, monkeypatch, parts, f"10|96|{GPU}\n", sacctmgr="vision||normal|\nvision|gpu|long|\n")
    done = CliRunner().invoke(app, ["init", str(tmp_path / "new"), "--profile"])
    assert done.exit_code == 0, done.output
    file = tmp_path / "new" / "site.yaml"
    assert f"slurm: {{profile: {file}}}" in done.output
    found = load_site(str(file))
    assert found.description == "marsh"
    assert (found.defaults.partition, found.defaults.account, found.defaults.time) == ("gpu", "vision", 24 * 60)
    assert (found.preprocess.partition, found.preprocess.time, found.eval.time) == ("cpu", 4 * 60, 2 * 60)
    assert (found.gpus_per_node, found.gpus_by, found.gpu_type) == (8, "gres", "h100")
    assert (found.train.cpus_per_task, found.eval.cpus_per_task, found.preprocess.cpus_per_task) == (12, 12, 8)
    assert found.has_sacct and found.has_requeue
    text = file.read_text()
    assert "#   cpu: 10 nodes, no time limit, no gres\n" in text
    assert "# network_interface: ib0" in text
    with pytest.raises(UserError, match="site.yaml exists and is not overwritten"):
        write_profile(tmp_path / "new")
    assert file.read_text() == text


def test_training_without_gpus_gets_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = "cpu*|up|infinite|1-infinite|8/2/0/10|(null)|(null)\n"
    site(tmp_path, monkeypatch, parts, "8|64|(null)\n2|6|(null)\n")
    found = load_site(str(write_profile(tmp_path)))
    assert (found.train.cpus_per_task, found.eval.cpus_per_task, found.preprocess.cpus_per_task) == (6, 6, 6)
    assert found.gpus_per_node == 0


CLOSED = "PartitionName=closed AllowGroups=nobody-here AllowAccounts=ALL\nPartitionName=dark Hidden=YES\n"


def test_the_partition_with_gpus_is_found_beside_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["cpu*|up|1:00:00|(null)|8", "big|up|3:00:00|(null)|80", f"small|up|8:00:00|{GPU}|2"]
    rows += [
        f"{name}|{state}|infinite|{GPU}|90" for name, state in (("gone", "down"), ("closed", "up"), ("dark", "up"))
    ]
    cells = [row.split("|") for row in [*rows, f"gpu|up|5:00:00|{GPU}|10"]]
    parts = "".join(f"{a}|{b}|{c}|1-infinite|{n}/0/0/{n}|{gres}|(null)\n" for a, b, c, gres, n in cells)
    site(tmp_path, monkeypatch, parts, f"10|96|{GPU}\n", sacctmgr="vision||normal|\n", scontrol=CONFIG + CLOSED)
    file = write_profile(tmp_path)
    found = load_site(str(file))
    assert (found.defaults.partition, found.defaults.time, found.gpus_per_node) == ("gpu", 5 * 60, 8)
    assert (found.preprocess.partition, found.preprocess.time) == ("cpu", 60)
    assert found.eval.time == 2 * 60 and found.eval.partition is None
    assert "the one with GPUs that has the most nodes" in file.read_text()


def test_what_is_unknown_is_left_to_fill_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = "".join(f"{name}|up|infinite|1-4|8/2/0/10|(null)|(null)\n" for name in ("a", "b: {c}"))
    site(tmp_path, monkeypatch, parts, "", sacctmgr="one|||\ntwo|||\n", scontrol=None)
    file = write_profile(tmp_path)
    with pytest.raises(UserError) as refused:
        load_site(str(file))
    for key in ("description", "defaults.partition", "defaults.account", "gpus_per_node"):
        assert f"{key} = ???: fill in a value here" in str(refused.value)
    text = file.read_text()
    assert "no partition is the default; one of a, b: {c}" in text and "CHANGE: one of one, two" in text
    file.write_text(text.replace("gpus_per_node: ???", "gpus_per_node: 0").replace("???", "filled"))
    assert load_site(str(file)).defaults.account == "filled"


def test_nodes_of_several_kinds_and_a_site_without_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = "2|64|gpu:a100:4\n2|96|gpu:8\n"
    more = {
        "sacctmgr": None,
        "scontrol": "ClusterName = x\nJobRequeue = 0\nAccountingStorageType = accounting_storage/none\n",
    }
    site(tmp_path, monkeypatch, "only|up|30:00|1|0/4/0/4|gpu:a100:4|(null)\n", kinds, **more)
    file = write_profile(tmp_path)
    text = file.read_text()
    assert "2 nodes with 64 CPUs, gpu:a100:4; 2 nodes with 96 CPUs, gpu:8" in text
    file.write_text(text.replace("gpus_per_node: ???", "gpus_per_node: 4"))
    found = load_site(str(file))
    assert (found.defaults.partition, found.defaults.time, found.defaults.account) == ("only", 30, None)
    assert (found.has_sacct, found.has_requeue) == (False, False)


def test_without_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sinfo is not on the path\nRun this on a login node"):
        write_profile(tmp_path)
    assert not (tmp_path / "site.yaml").exists()


@pytest.mark.slurm
def test_a_real_site(cluster: DevCluster, run_file: Path, tmp_path: Path) -> None:
    """Its user has two accounts; a job of it would be taken."""
    file = write_profile(tmp_path)
    assert 'partition: "train"' in file.read_text()
    file.write_text(file.read_text().replace("???", "dev"))
    found = load_site(str(file))
    assert (found.defaults.time, found.gpus_per_node) == (24 * 60, 0) and found.has_sacct and found.has_requeue
    words = [f"run.dir={tmp_path / 'run'}", f"slurm.profile={file}", "--slurm", "--dry-run", "--verbose"]
    done = tiny.pipeline("train", run_file, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--account=dev" in done.stdout and "--partition=train" in done.stdout, done.stdout
