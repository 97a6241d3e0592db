"""The item `rates` on a CPU, the calibration of plans from its lines, and plans for items to compare with."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.load import load
from pipeline.train.distributed.process_group import destroy
from pipeline.train.host import shares
from pipeline.train.host.devices import DEVICES, find_device
from pipeline.train.planning.plan import plan

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

import gpu_evidence  # noqa: E402
from evidence import calibrate, rates  # noqa: E402
from evidence.catalog import ITEMS  # noqa: E402
from train_gpu_variants import planned  # noqa: E402

ITEM = next(item for item in ITEMS if item.name == "rates")
H200 = DEVICES["h200"]
RATES: dict[str, Any] = {
    "products_tflops": 0.5 * 989,
    "fp8_tflops": {"tensorwise": 0.4 * 1979},
    "attention_tflops": 0.25 * 989,
    "attention_backward": 2.25,
    "memory_gb_per_s": 0.75 * 4800,
    "update_gb_per_s": 0.6 * 4800,
}
SHARES = {
    "products": 0.5,
    "fp8": {"tensorwise": 0.4},
    "attention": 0.5,
    "attention_backward": 2.25,
    "memory": 0.75,
    "update": 0.6,
}


def line(**other: Any) -> dict[str, Any]:
    """A line of results, measured on an H200."""
    about = {"item": "rates", "status": "ok", "rehearsal": False, "device": {"name": "NVIDIA H200"}, "commit": "c"}
    return {**about, "date": "2001-01-02T00:00:00Z", "versions": {"torch": "2.11.0"}, "result": RATES, **other}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several would wait for each other where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_the_rehearsal_has_all_rates(tmp_path: Path) -> None:
    shapes = {**ITEM.rehearsal, "seconds": 0.0}
    found = json.loads(json.dumps(rates.measure("cpu", tmp_path, **shapes)))
    by_name = {row["rate"]: row for row in found["rates"]}
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in found["rates"])

    def mean(amounts: dict[str, float]) -> float:
        """The rate of amounts at their rates, one after the other."""
        return sum(amounts.values()) / sum(amount / by_name[name]["median"] for name, amount in amounts.items())

    parts = ("forward", "gradient of input", "gradient of weight")
    layer = {name: (rows * columns, 2 * count) for name, (rows, columns, count) in shapes["layer"].items()}
    matrices = {**layer, "head": (512 * 128, 1)}
    products = {f"bf16: {name}: {part}": size * count for name, (size, count) in matrices.items() for part in parts}
    assert found["products_tflops"] == pytest.approx(mean(products), rel=1e-3)
    for recipe in ("tensorwise", "rowwise"):
        if f"fp8 {recipe}" not in found["left_out"]:
            rounded = {
                f"fp8 {recipe}: {name}: {part}": size * count for name, (size, count) in layer.items() for part in parts
            }
            assert found["fp8_tflops"][recipe] == pytest.approx(mean(rounded), rel=1e-3)
    assert found["attention_kernel"].startswith("sdpa")
    # Both lengths have as many tokens, and each token meets half of its window.
    forward, backward = (
        {f"attention: {length}: {part}": length * share for length in (256, 128)}
        for part, share in (("forward", 1), ("backward", 2))
    )
    assert found["attention_tflops"] == pytest.approx(mean(forward), rel=1e-3)
    assert found["attention_backward"] == pytest.approx(2 * mean(forward) / mean(backward), rel=1e-3)
    assert found["memory_gb_per_s"] == pytest.approx(mean({"memory: copy": 2, "memory: add": 3}), rel=1e-3)
    update = {"update: norm": 4.0, "update: clip": 8.0, "update: adamw": 28.0}
    assert found["update_gb_per_s"] == pytest.approx(mean(update), rel=1e-3)
    assert 0 < found["launch_us"] <= found["launch_done_us"] * 1.01
    assert {"copy: host to device", "copy: device to host", "square: 256: forward"} <= by_name.keys()


def test_a_rate_is_the_median_with_quartiles() -> None:
    assert rates._rate("a", "GB/s", 12e9, [1.0, 2.0, 3.0, 4.0, 6.0]) == {
        **{"rate": "a", "unit": "GB/s", "median": 4.0, "low": 3.0, "high": 6.0}
    }


def test_rates_become_shares_of_stated_peaks() -> None:
    assert asdict(calibrate.shares(RATES, H200)) == SHARES
    found = rates.judged(RATES, H200)
    assert found["shares"] == SHARES and all(found["checks"].values())
    assert {name.partition(",")[0]: each["met"] for name, each in found["goals"].items()} == {
        **{"products": False, "attention": False, "memory": False, "update": False}
    }
    for nonsense in (
        {"memory_gb_per_s": 4810.0},
        {"update_gb_per_s": math.nan},
        {"fp8_tflops": {"rowwise": 2000.0}},
        {"products_tflops": 0.0},
        {"attention_backward": 0.0},
    ):
        bad = {**RATES, **nonsense}
        assert not all(rates.judged(bad, H200)["checks"].values()), nonsense
        assert calibrate.measured([line(result=bad)]) == "{}\n", nonsense
    assert calibrate.shares(RATES, DEVICES["a100"]).fp8 == {}


def test_the_newest_line_of_each_device_counts() -> None:
    newer = {**RATES, "memory_gb_per_s": 0.7 * 4800}
    lines = [
        line(date="2001-01-03T00:00:00Z", result=newer),
        line(),
        line(date="2002-01-01T00:00:00Z", rehearsal=True),
        line(date="2002-01-01T00:00:00Z", status="failed"),
        line(date="2002-01-01T00:00:00Z", item="tests"),
        line(device={"name": "NVIDIA A100-PCIE-40GB"}),
        line(device={"name": "NVIDIA H200 MIG 1g.18gb"}),
    ]
    assert json.loads(calibrate.measured(lines)) == {
        "h200": {
            "driver": "NVIDIA H200",
            "date": "2001-01-03T00:00:00Z",
            "commit": "c",
            "torch": "2.11.0",
            "shares": {**SHARES, "memory": 0.7},
        }
    }


def test_the_option_writes_what_plans_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, file = tmp_path / "results.jsonl", tmp_path / "measured.json"
    gpu_evidence.append(results, line())
    monkeypatch.setattr(gpu_evidence, "RESULTS", results)
    monkeypatch.setattr(calibrate, "FILE", file)
    monkeypatch.setattr(shares, "FILE", file)
    monkeypatch.setattr(sys, "argv", ["gpu_evidence.py", "--calibrate"])
    gpu_evidence.main()
    found = shares.measured("h200")
    assert found is not None and asdict(found.shares) == SHARES
    assert shares.measured("h100") is None


def test_the_file_that_ships_is_what_the_results_give() -> None:
    assert shares.FILE.read_text() == calibrate.measured(gpu_evidence.read(gpu_evidence.RESULTS))


def test_plans_for_items() -> None:
    destroy()  # tests of a whole run may have come before
    steps = "train={duration: 10 steps, sequence_length: 2048, batch_size: 4, micro_batch_size: 2}"
    config = load(Path("models/llama3-8b.yaml"), ["model.layers=2", "parallel.dp_shard=-1", steps])
    found, expected = planned(config, 1, "NVIDIA H200"), plan(config, find_device("h200"), 1)
    assert found["planned_gb"] == pytest.approx(expected.peak_bytes / 1e9, abs=0.01)
    assert found["planned_s"] == pytest.approx(expected.main.seconds.total, abs=1e-5)
    assert found["planned_from"] == "shares of the peaks are assumed: nothing was measured on h200"
    assert set(planned(config, 1, "AMD EPYC").values()) == {None}
