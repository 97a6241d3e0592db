"""Counters of hardware errors, from files and a program as a node has them."""

import io
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import storage
from pipeline.common.console import Console
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.rank import Processes
from pipeline.train.host import nvidia_smi
from pipeline.train.loop.step_metrics import StepMetrics
from pipeline.train.loop.trainer import train
from pipeline.train.monitor import hardware
from pipeline.train.monitor.hardware import HardwareWatch, NodeCounters, Rise, read_rises, rises_text
from pipeline.train.run.folder import RunFolder, read_metrics
from tests import tiny
from tests.waiting import until

NVIDIA_SMI = """#!/bin/sh
[ -e "{folder}/broken" ] && {{ echo "Unable to determine the device handle for GPU0: GPU is lost"; exit 15; }}
case "$1" in
*power_brake*) echo 'Field "clocks_throttle_reasons.hw_power_brake_slowdown" is not a valid field to query.'; exit 2;;
*) cat "{folder}/ecc";;
esac
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up node: its /sys, a kernel's log, and an nvidia-smi that knows no clocks."""
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "3",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "1000",
        "sys/class/infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err": "7",
        "sys/class/net/eth0/device/vendor": "0x15b3",
        "sys/class/net/eth0/statistics/rx_errors": "0",
        "sys/class/net/eth0/carrier_down_count": "1",
        "sys/class/net/lo/carrier_down_count": "1",
        "sys/devices/system/edac/mc/mc0/ue_count": "0",
        "sys/devices/system/edac/mc/mc0/ce_count": "12",
        "sys/class/drm/card0/device/ras/umc_err_count": "ue: 0\nce: 1\n",
        "kmsg": "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 31, from before\n",
        "ecc": "0, 0, [N/A]\n1, 2, 5\n",
        "bin/nvidia-smi": NVIDIA_SMI.format(folder=tmp_path),
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(hardware, "_KERNEL_LOG", tmp_path / "kmsg")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def fail(node: Path) -> None:
    """Let one counter of each kind rise; some others rise that are no errors."""
    sys = node / "sys"
    write(sys / "class/infiniband/mlx5_0/ports/1/counters/link_downed", "5")
    write(sys / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "2000")
    write(sys / "class/infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err", "8")
    write(sys / "class/net/eth0/carrier_down_count", "2")
    write(sys / "class/net/lo/carrier_down_count", "2")
    write(sys / "devices/system/edac/mc/mc0/ce_count", "13")
    write(sys / "class/drm/card0/device/ras/umc_err_count", "ue: 1\nce: 1\n")
    write(sys / "class/infiniband/mlx5_9/ports/1/counters/link_downed", "40")  # a card that comes later
    write(node / "ecc", "0, 0, [N/A]\n1, 3, 5\n")
    with (node / "kmsg").open("a") as log:
        log.write("4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")


def test_counters_that_rise_are_named_by_device(node: Path) -> None:
    counters = NodeCounters()
    assert counters.rises() == counters.rises() == {}
    fail(node)
    assert counters.rises() == {
        "mlx5_0 port 1: link_downed": 2,
        "mlx5_0 port 1: packet_seq_err": 1,
        "eth0: carrier_down_count": 1,
        "memory controller mc0: corrected memory errors": 1,
        "GPU card0 umc: uncorrected memory errors": 1,
        "GPU 1: uncorrected memory errors": 1,
        "GPU 0000:3b:00: Xid 79": 1,
    }
    write(node / "ecc", "0, 0, [N/A]\n1, 0, 0\n")  # a reset is no rise
    assert counters.rises() == {}
    counters.close()


def test_a_gpu_that_is_lost_is_noted_once(node: Path) -> None:
    counters = NodeCounters()
    assert counters.rises() == {}
    (node / "broken").touch()
    (name,) = counters.rises()
    assert "GPU is lost" in name
    assert counters.rises() == {}
    counters.close()


def test_what_fails_at_the_first_look_is_noted(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (node / "broken").touch()
    counters = NodeCounters()
    assert list(counters.rises()) == ["nvidia-smi: Unable to determine the device handle for GPU0: GPU is lost"]
    counters.close()
    monkeypatch.setattr(nvidia_smi, "PATIENCE", 0.1)
    write(node / "bin/nvidia-smi", "#!/bin/sh\nexec sleep 600\n")
    counters = NodeCounters()
    assert counters.rises() == {"nvidia-smi: no answer": 1} and counters.rises() == {}
    counters.close()


def test_xids_of_a_node_without_any_counter(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_SYS", node / "none")
    monkeypatch.setenv("PATH", str(node / "none"))
    counters = NodeCounters()
    assert counters.rises() == {}
    fail(node)
    assert counters.rises() == {"GPU 0000:3b:00: Xid 79": 1}
    counters.close()


def test_files_that_are_none_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    os.mkfifo(tmp_path / "hardware/node-0000.jsonl")
    with (tmp_path / "hardware/node-0001.jsonl").open("wb") as sparse:
        sparse.truncate(2**38)
    assert read_rises(tmp_path) == []


def test_a_node_without_any_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SYS", "_KERNEL_LOG"):
        monkeypatch.setattr(hardware, name, tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    counters = NodeCounters()
    assert counters.rises() == counters.rises() == {}
    counters.close()


def test_rank_0_collects_the_notes_of_all_nodes(node: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    old = {"time": 1.0, "attempt": 1, "host": "b", "counter": "mlx5_0 port 1: link_downed", "by": 1, "minor": False}
    for row in (old, {"attempt": "x"}):
        (run / "hardware").mkdir(exist_ok=True)
        storage.add_json_line(run / "hardware/node-0001.jsonl", row)
    folder = RunFolder(run, 2)
    with (
        HardwareWatch(folder, Processes(0, 4, 0, 2), 0.01) as first,
        HardwareWatch(folder, Processes(1, 4, 1, 2), 0.01) as quiet,
        HardwareWatch(folder, Processes(2, 4, 0, 2), 0.01) as second,
    ):
        until(lambda: first.ready.is_set() and second.ready.is_set())
        fail(node)
        found: list[Rise] = []
        until(lambda: len(found) >= 14 or found.extend(first.take()))
    assert not quiet.take() and not second.take()
    assert {rise.attempt for rise in found} == {2}
    assert sum(rise.minor for rise in found) == 4
    assert read_rises(run)[0].host == "b" and len(read_rises(run)) == 15
    assert rises_text(found).endswith("and 9 other counters")


def test_nothing_is_written_where_nothing_is_looked_at(node: Path, tmp_path: Path) -> None:
    with HardwareWatch(RunFolder(tmp_path, 1), Processes(0, 1, 0, 1), None) as watch:
        fail(node)
    assert watch.take() == [] and not (tmp_path / "hardware").exists()


def test_rows_of_steps_have_the_sums_and_a_warning_names_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rises(counters: NodeCounters) -> dict[str, int]:
        return {"mlx5_0 port 1: link_downed": 2, "mlx5_0 port 1: packet_seq_err": 1}

    monkeypatch.setattr(NodeCounters, "rises", rises)
    trained = StepMetrics.trained

    def late(rows: StepMetrics, *of_step: Any) -> dict[str, Any]:
        until(lambda: rows.hardware._found)
        return trained(rows, *of_step)

    monkeypatch.setattr(StepMetrics, "trained", late)
    config = load(tiny.write_run(tmp_path, {"train.metrics.hardware_seconds": 0.05}))
    preprocess(config)
    output = io.StringIO()
    train(config, Console(file=output, width=200))
    rows = [row for row in read_metrics(config.run.dir) if "hardware_errors" in row]
    noted = read_rises(config.run.dir)
    assert rows and sum(row["hardware_errors"] for row in rows) <= sum(rise.by for rise in noted if not rise.minor)
    assert all(row["hardware_errors"] % 2 == 0 for row in rows) and any(row["hardware_corrected"] for row in rows)
    assert "mlx5_0 port 1: link_downed +2" in output.getvalue()
