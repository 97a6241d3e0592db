"""The check of nodes: what one finds out by itself, and what follows from the reports of several."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest
import torch

from pipeline.common import storage
from pipeline.common.errors import EXIT_UNHEALTHY, UserError
from pipeline.common.versions import versions
from pipeline.config.load import load
from pipeline.train.host import nvidia_smi as nvidia_smi_module
from pipeline.train.host.nvidia_smi import GpuAnswer
from slurm.devcluster import DevCluster
from slurm.doctor.command import doctor_command
from slurm.doctor.gpu import devices, driver_views, judge_driver_views, parse_driver_views, products, wrong_elements
from slurm.doctor.network import RendezvousFailed, rendezvous
from slurm.doctor.node import NodeRank, disks, objects, software, space
from slurm.doctor.report import (
    Network,
    NodeCheck,
    NodeVerdict,
    Report,
    compare,
    parse_report,
    read_reports,
    report_file,
)
from tests.common.objects.web import web
from tests.tiny import pipeline, write_run
from tests.train.distributed.ranks import free_port

_FILE_LIMIT_KIB = 512
"""Less than what the check writes into the run folder, more than its report has."""


def test_a_healthy_node(tmp_path: Path) -> None:
    done = pipeline("doctor", write_run(tmp_path))
    assert done.returncode == 0, done.stderr
    for words in ("matrix product", "space of run.dir", "write in run.dir", "memory", "fit for training"):
        assert words in done.stdout
    assert "warning: " in done.stdout and "has `pipeline preprocess` been run?" in done.stdout
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".*")), "it leaves no trace"


def test_objects_of_sources(tmp_path: Path) -> None:
    with web() as server:
        server.objects["x.txt"] = b"1"
        config = load(write_run(tmp_path), [f"data.sources.0.paths=[{server.url('x.txt')}]"])
        (found,) = objects(config)
        assert found.ok and found.value == "readable"
        server.objects.clear()
        (found,) = objects(config)
    assert not found.ok and found.severity == "warning"
    assert "data.sources.0.paths" in found.message and "no such object" in found.message


@pytest.mark.slow
def test_an_unfit_node_is_told_with_all_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    changes = {"run.dir": "/proc/none/run", "data.dir": str(tmp_path / "file")}
    done = pipeline("doctor", write_run(tmp_path, changes), "--json")
    assert done.returncode == EXIT_UNHEALTHY, done.stderr
    for words in ("not fit for training", "run.dir (/proc/none/run)", f"data.dir ({tmp_path}/file)"):
        assert words in done.stderr
    found = orjson.loads(done.stdout)
    assert found["ok"] is False
    assert [len(why) for why in found["unhealthy"].values()] == [2]
    assert {check["name"] for report in found["nodes"].values() for check in report["checks"] if not check["ok"]} == {
        "write in run.dir",
        "data.dir",
    }


@pytest.mark.guard
def test_a_run_that_needs_gpus_where_there_are_none(tmp_path: Path) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has some")
    done = pipeline("doctor", write_run(tmp_path, {"launch.device": "cuda"}))
    assert done.returncode == EXIT_UNHEALTHY
    assert "GPUs: torch sees 0, 1 are expected" in done.stderr


@pytest.mark.slow
def test_several_nodes_on_the_command_line() -> None:
    codes, output = _nodes(lambda _: [sys.executable, "-m", "pipeline", "doctor"], 2)
    assert codes == [0, 0], output
    assert "2 nodes, all fit for training" in output[0] and "4 MiB in" in output[0]
    assert output[1] == "", "rank 0 tells of all"


@pytest.mark.guard
def test_nodes_of_a_launch(tmp_path: Path) -> None:
    """One may write small files only; the others must not suffer from it."""
    run_file, out = _ready(tmp_path), tmp_path / "out"
    command = [sys.executable, *doctor_command(run_file, out, gpus=0)]

    def of_node(rank: int) -> list[str]:
        return command if rank < 2 else _limited(command)

    codes, output = _nodes(of_node, 3)
    assert codes == [0, 0, EXIT_UNHEALTHY], output
    _assert_n3_cannot_write(compare(read_reports(out, ["n1", "n2", "n3"])), tmp_path)
    assert output[2].startswith(f"n3: run.dir ({tmp_path}/run)")
    for node in ("n1", "n2", "n3"):
        found = _read(out, node)
        assert (found.at, found.network.state, found.network.nodes) == ("", "ok", 3)

    _change(out, "n1", products={"CPU": 100 * _read(out, "n1").products["CPU"]})
    _change(out, "n2", facts={**_read(out, "n2").facts, "torch": "1.0"})
    after = compare(read_reports(out, ["n1", "n2", "n3", "n4"])).unhealthy
    assert after["n1"][0].startswith("slow: CPU takes ")
    assert after["n2"] == [f"torch: it has 1.0, other nodes have {torch.__version__}"]
    assert after["n4"] == ["it did not answer: the check could not start there, or left no report"]


@pytest.mark.slurm
def test_nodes_of_a_cluster(cluster: DevCluster, tmp_path: Path) -> None:
    run_file, out = _ready(tmp_path), tmp_path / "out"
    command = [sys.executable, *doctor_command(run_file, out, gpus=0)]
    programs = tmp_path / "programs"
    programs.write_text(f"0 {shlex.join(command)}\n1 {shlex.join(_limited(command))}\n")
    nodes = cluster.nodes[:2]
    step = ["srun", "--job-name=test-doctor", f"--nodelist={','.join(nodes)}", "--nodes=2", "--ntasks=2"]
    more = ["--ntasks-per-node=1", "--time=5", "--kill-on-bad-exit=0", "--multi-prog", str(programs)]
    place = {"MASTER_ADDR": nodes[0], "MASTER_PORT": str(free_port())}
    done = subprocess.run([*step, *more], env=os.environ | place, capture_output=True, text=True, timeout=300)
    assert done.returncode == EXIT_UNHEALTHY, done.stderr
    found = compare(read_reports(out, nodes))
    assert list(found.unhealthy) == [nodes[1]], found
    assert "run.dir" in found.unhealthy[nodes[1]][0]
    assert _read(out, nodes[0]).network.nodes == 2


def test_a_check_that_hangs_is_ended() -> None:
    program = "import time; from slurm.doctor.command import _limited\nwith _limited(0.5): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (EXIT_UNHEALTHY, "")
    assert "did not end within" in done.stderr


def test_nodes_that_do_not_come_in_time() -> None:
    first = NodeRank(0, 3, "127.0.0.1", free_port())
    other = replace(first, rank=1, serves=False)
    with pytest.raises(RendezvousFailed) as nobody:
        rendezvous(other, gpus=0, seconds=0.2)
    assert nobody.value.network.state == "unreached"
    meeting = rendezvous(first, gpus=0, seconds=0.2)
    assert meeting.all_reduce() == Network("ok", nodes=1, missing=(1, 2), backend="gloo")
    with pytest.raises(RendezvousFailed, match="it is slow to start") as slow:
        rendezvous(other, gpus=0, seconds=0.2)
    assert slow.value.network.state == "late"
    with pytest.raises(RendezvousFailed, match="in use") as taken:
        rendezvous(first, gpus=0, seconds=0.2)
    assert taken.value.network.state == "closed"


def test_the_place_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert NodeRank.of_environment() == NodeRank(), "each for itself"
    monkeypatch.setenv("MASTER_ADDR", "n1")
    monkeypatch.setenv("MASTER_PORT", "20000")
    assert NodeRank.of_environment() == NodeRank(1, 2, "n1", 20_000, serves=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert NodeRank.of_environment() == NodeRank(0, 4, "n1", 20_000, serves=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE is above 1"):
        NodeRank.of_environment()
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UserError, match="RANK=4, WORLD_SIZE=4"):
        NodeRank.of_environment()


def test_products_that_are_wrong_are_seen() -> None:
    checks, times = products()
    assert [check.ok for check in checks] == [True] and times
    for size in (12, 96):
        pattern = torch.tensor([[(i + j) % 3 - 1 for j in range(size)] for i in range(size)], dtype=torch.float32)
        right = pattern.double() @ pattern.double()
        assert wrong_elements(right.float()) == ""
        assert wrong_elements(right.bfloat16()) == ""
        right[5, 7] += 1
        assert wrong_elements(right.float()).startswith(f"1 of {size * size} elements, like ")


def test_what_nvidia_smi_says() -> None:
    text = "0, 550.54.15, 0, No\n1, 550.54.15, 3, Yes\n2, 550.54.15, [N/A], [N/A]\n"
    views = parse_driver_views(GpuAnswer(0, text).rows)
    assert [(view.index, view.driver, view.uncorrected, view.retiring) for view in views] == [
        ("0", "550.54.15", 0, False),
        ("1", "550.54.15", 3, True),
        ("2", "550.54.15", 0, False),
    ]
    broken, retiring = judge_driver_views(views)
    assert (broken.severity, broken.value) == ("error", "GPU 1: 3")
    assert (retiring.severity, retiring.value) == ("warning", "GPU 1")
    assert [check.ok for check in judge_driver_views([views[0], views[2]])] == [True]


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, script: str | None = None) -> None:
    """A program of that name that prints what a real one did, or none; and torch sees some GPUs."""
    if script is not None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "script", "seen", "checks"),
    [
        (1, "echo '0, 550.54.15, 0, No'", ["550.54.15"], [("ECC", True, "error")]),
        # A GPU without ECC, and one that retires rows and not pages.
        (
            2,
            "printf '0, 570.86.15, [N/A], [N/A]\\n1, 570.86.15, 2, [N/A]\\n'",
            ["570.86.15"] * 2,
            [("ECC", False, "error")],
        ),
        (
            *(1, "echo 'NVIDIA-SMI has failed because it couldn\\'t communicate with the NVIDIA driver.'; exit 9"),
            *([], [("nvidia-smi", False, "error")]),
        ),
        (
            *(1, "echo 'Field \"retired_pages.pending\" is not a valid field to query.'; exit 2"),
            *([], [("nvidia-smi", False, "warning")]),
        ),
        (1, None, [], [("nvidia-smi", False, "warning")]),
        (0, None, [], []),
    ],
)
def test_nvidia_smi_as_it_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    script: str | None,
    seen: list[str],
    checks: list[tuple[str, bool, str]],
) -> None:
    nvidia_smi(tmp_path, monkeypatch, gpus, script)
    views, found = driver_views()
    assert [view.driver for view in views] == seen
    assert [(check.name, check.ok, check.severity) for check in found] == checks


def test_nvidia_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, 1, "while true; do :; done")
    monkeypatch.setattr(nvidia_smi_module, "PATIENCE", 0.1)
    views, (check,) = driver_views()
    assert not views and (check.value, check.severity) == ("no answer", "error")


def test_rocm_has_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch was built for AMD's GPUs, which it calls cuda too."""
    nvidia_smi(tmp_path, monkeypatch, 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    _, (check,) = driver_views()
    assert check.severity == "warning" and "amd-smi" in check.message
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "AMD Instinct MI300X")
    assert devices(1, 0) == NodeCheck("GPUs", True, "1 x AMD Instinct MI300X")
    assert "built without" not in devices(2, 0).message
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert software("")["hip"] == versions()["hip"] == "6.4.43484"


def test_gpus_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices(2, 2) == NodeCheck("GPUs", True, "2 x NVIDIA H200")
    assert "nvidia-smi sees 8; look at CUDA_VISIBLE_DEVICES" in devices(8, 8).message
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices(3, 3).value == "NVIDIA H100 80GB HBM3, NVIDIA H200"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA and without ROCm" in devices(4, 0).message


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(check.ok for check in disks(tmp_path / "new" / "run", tmp_path, data_needed=True))
    missing = [check for check in disks(None, tmp_path / "data", data_needed=True) if not check.ok]
    assert [(check.name, check.severity) for check in missing] == [("data.dir", "error")]
    found = os.statvfs(tmp_path)
    monkeypatch.setattr("slurm.doctor.node._FREE_BYTES", found.f_bavail * found.f_frsize * 2)
    monkeypatch.setattr("slurm.doctor.node._FREE_INODES", found.f_favail * 2)
    full = space("run.dir", tmp_path)
    assert not full.ok and "inodes (files) are free" in full.message and "GiB are needed" in full.message


def test_reports_survive_the_disk(tmp_path: Path) -> None:
    report = Report(
        "n1", "disks", (NodeCheck("GPUs", True, "none"),), {"CPU": 0.1}, {"torch": "2"}, Network("ok", missing=(1,))
    )
    storage.put_json(report_file(tmp_path, "n1"), asdict(report))
    assert _read(tmp_path, "n1") == report
    report_file(tmp_path, "n2").write_text('{"node": "n2"}')
    report_file(tmp_path, "n3").write_text("{")
    assert set(compare(read_reports(tmp_path, ["n2", "n3"])).unhealthy) == {"n2", "n3"}


def test_where_a_node_hung_or_was_killed() -> None:
    found = compare({"n1": Report("n1", "matrix product"), "n2": _report("n2", 1)})
    assert found.unhealthy == {"n1": ["it did not get past this check: matrix product; it hung there, or was killed"]}


def test_slow_devices() -> None:
    reports = {f"n{number}": Report(f"n{number}", products={"GPU 0": 0.010, "GPU 1": 0.011}) for number in range(2)}
    assert compare(reports) == NodeVerdict()
    slow = compare({**reports, "n2": Report("n2", products={"GPU 0": 0.010, "GPU 1": 0.030})})
    assert slow.unhealthy == {
        "n2": ["slow: GPU 1 takes 30.0 ms for a matrix product, 3.0 times as long as is usual here (10.0 ms)"]
    }
    two = compare({"n1": Report("n1", products={"CPU": 0.01}), "n2": Report("n2", products={"CPU": 0.03})})
    assert not two.unhealthy and two.warnings[0].startswith("n2: slow: CPU")


def test_versions_that_differ() -> None:
    def of(*versions: str, fact: str = "torch") -> NodeVerdict:
        return compare({f"n{i}": Report(f"n{i}", facts={fact: version}) for i, version in enumerate(versions, 1)})

    assert of("2", "2", "2") == NodeVerdict()
    assert of("2", "3", "2").unhealthy == {"n2": ["torch: it has 3, other nodes have 2"]}
    assert set(of("2", "3").unhealthy) == {"n1", "n2"}, "nobody knows which one is right"
    assert of("2", "3", "2", fact="driver").warnings == ["n2: driver: it has 3, other nodes have 2"]


@pytest.mark.parametrize(
    ("clocks", "unhealthy", "warned"),
    [
        ((100.0, 101.0, 101.5), [], []),
        ((100.0, 110.0, 100.1), [], ["n2"]),
        ((100.0, 200.0, 100.1), ["n2"], []),
        ((100.0, 200.0), ["n1", "n2"], []),
        ((100.0, None, 110.0), [], ["n1", "n3"]),
    ],
)
def test_clocks(clocks: tuple[float | None, ...], unhealthy: list[str], warned: list[str]) -> None:
    found = compare({f"n{i}": _report(f"n{i}", i - 1, clock=clock) for i, clock in enumerate(clocks, 1)})
    assert list(found.unhealthy) == unhealthy
    assert [warning.partition(":")[0] for warning in found.warnings] == warned


@pytest.mark.parametrize(
    ("states", "unhealthy"),
    [
        pytest.param(["ok", "ok", "unreached"], ["n3"], id="one does not reach the first"),
        pytest.param(["ok", "unreached", "unreached"], ["n1"], id="nobody reaches the first"),
        pytest.param(["ok", "unreached"], ["n1", "n2"], id="two that do not reach each other"),
        pytest.param([None, "unreached", "unreached"], ["n1"], id="the first is lost"),
        pytest.param(["closed", "unreached", "pending"], [], id="the port is taken"),
        pytest.param(["ok", "ok", "late"], ["n3"], id="one is late"),
        pytest.param(["failed", "failed", None], ["n3"], id="one is lost in the all-reduce"),
        pytest.param(["ok", "ok", "failed"], ["n3"], id="one gets wrong sums"),
        pytest.param(["failed", "pending", "failed"], ["n1", "n2", "n3"], id="who knows"),
    ],
)
def test_whose_fault_the_network_is(states: list[str | None], unhealthy: list[str]) -> None:
    reports = {
        f"n{i}": None if state is None else _report(f"n{i}", i - 1, state=state) for i, state in enumerate(states, 1)
    }
    assert sorted(compare(reports).unhealthy) == unhealthy


def _report(node: str, rank: int, *, state: str = "ok", clock: float | None = None) -> Report:
    at = "all-reduce with the other nodes" if state == "pending" else ""
    return Report(node, at, network=Network(state, rank, message=f"network: {state}", clock=clock))  # type: ignore[arg-type]


def _read(folder: Path, node: str) -> Report:
    return parse_report(report_file(folder, node).read_bytes())


def _change(folder: Path, node: str, **values: dict[str, float] | dict[str, str]) -> None:
    """What another machine would have written."""
    storage.put_json(report_file(folder, node), asdict(_read(folder, node)) | values)


def _ready(folder: Path) -> Path:
    """A run file whose folders are there."""
    for name in ("run", "data"):
        (folder / name).mkdir()
    return write_run(folder)


def _limited(command: list[str]) -> list[str]:
    return ["bash", "-c", f"ulimit -f {_FILE_LIMIT_KIB} && exec {shlex.join(command)}"]


def _assert_n3_cannot_write(found: NodeVerdict, folder: Path) -> None:
    assert list(found.unhealthy) == ["n3"], found
    assert found.unhealthy["n3"] == [
        f"run.dir ({folder}/run): a file of 1 MiB cannot be written and read (File too large)"
    ]


def _nodes(command: Callable[[int], list[str]], number: int) -> tuple[list[int], list[str]]:
    """Run a command as the processes of several nodes; exit codes and what they say."""
    port = str(free_port())
    started = []
    for rank in range(number):
        place = {"RANK": str(rank), "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # Without GPUs: nodes that are one machine cannot share one in NCCL.
        environment = os.environ | place | {"SLURMD_NODENAME": f"n{rank + 1}", "CUDA_VISIBLE_DEVICES": ""}
        started.append(
            subprocess.Popen(
                command(rank), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        output = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], output
