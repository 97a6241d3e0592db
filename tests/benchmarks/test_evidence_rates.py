"""The item `rates` on a CPU, the calibration of plans from its lines, and plans for items to compare with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.load import load
from pipeline.train.planning import shares
from pipeline.train.planning.devices import DEVICES, find_device
from pipeline.train.planning.plan import plan

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

import gpu_evidence  # noqa: E402
from evidence import calibrate, rates  # noqa: E402
from evidence.catalog import ITEMS  # noqa: E402
from evidence.planned import planned  # noqa: E402

ITEM = next(item for item in ITEMS if item.name == "rates")
H200 = DEVICES["h200"]
RATES: dict[str, Any] = {
    "products": {"per_s": 0.5 * 989e12},
    "fp8": {"tensorwise": {"per_s": 0.4 * 1979e12}, "rowwise": {"left_out": "no kernel"}},
    "attention": {"per_s": 0.25 * 989e12, "backward_to_forward": 2.25},
    "memory": {"per_s": 0.75 * 4.8e12},
    "update": {"per_s": 0.6 * 4.8e12},
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


def harmonic(parts: list[tuple[float, float]]) -> float:
    """The rate of amounts at their rates, one after the other."""
    return sum(amount for amount, _ in parts) / sum(amount / rate for amount, rate in parts)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several would wait for each other where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_rehearsal_has_all_rates(tmp_path: Path) -> None:
    assert ITEM.full.keys() == ITEM.rehearsal.keys()
    shapes = {**ITEM.rehearsal, "seconds": 0.0}
    found = json.loads(json.dumps(rates.measure("cpu", tmp_path, **shapes)))
    assert found.keys() == {"square", "products", "fp8", "attention", "memory", "update", "launch", "copies"}
    matrices = {name: (*sides, 2 * count) for name, (*sides, count) in shapes["layer"].items()} | {
        "head": (512, 128, 1)
    }
    measured = found["products"]["matrices"]
    assert measured.keys() == matrices.keys()
    parts = [
        (2.0 * count * 256 * rows * columns, measured[name][part]["per_s"])
        for name, (rows, columns, count) in matrices.items()
        for part in ("forward", "grad_input", "grad_weight")
    ]
    assert found["products"]["per_s"] == pytest.approx(harmonic(parts), rel=1e-3)
    for part in measured["q, o"].values():
        low, high = part["quartiles"]
        assert 0 < low <= part["per_s"] <= high
    for recipe in found["fp8"].values():
        assert "left_out" in recipe or recipe["matrices"].keys() == shapes["layer"].keys()
    attention = found["attention"]
    assert attention["kernel"].startswith("sdpa") and attention["lengths"].keys() == {"256", "128"}
    # 4 heads of 32, the triangle: 2 products of 2 FLOPs for each pair of tokens, in 256 tokens of one or two windows.
    pairs = {"256": 256 * 128, "128": 256 * 64}
    of_lengths = [(4.0 * 4 * 32 * pairs[name], each["forward"]["per_s"]) for name, each in attention["lengths"].items()]
    assert attention["per_s"] == pytest.approx(harmonic(of_lengths), rel=1e-3)
    for each in attention["lengths"].values():
        ratio = 2 * each["forward"]["per_s"] / each["backward"]["per_s"]
        assert each["backward_to_forward"] == pytest.approx(ratio, rel=1e-3)
    memory = found["memory"]
    assert memory["per_s"] == pytest.approx(harmonic([(2, memory["copy"]["per_s"]), (3, memory["add"]["per_s"])]), 1e-3)
    update = found["update"]
    assert update["parameters"] == 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128
    assert update["per_s"] == pytest.approx(
        harmonic([(count, update[name]["per_s"]) for name, count in (("norm", 4), ("clip", 8), ("adamw", 28))]),
        rel=1e-3,
    )
    assert 0 < found["launch"]["host_us"] <= found["launch"]["done_us"] * 1.01
    assert found["copies"]["pinned"] is False and found["copies"]["host_to_device"]["per_s"] > 0


def test_products_that_the_device_lacks_are_left_out_with_the_reason() -> None:
    def lacking(*_: object) -> Any:
        raise RuntimeError("needs compute\n capability 9.0")

    found = rates._all_products("cpu", 16, {"q": (16, 16, 1)}, lacking, 0.0)
    assert found == {"left_out": "needs compute capability 9.0"}


def test_rates_become_shares_of_stated_peaks() -> None:
    assert calibrate.shares(RATES, H200).to_json() == SHARES
    found = rates.judged(RATES, H200)
    assert found["shares"] == SHARES and all(found["checks"].values())
    assert {name.partition(",")[0]: each["met"] for name, each in found["goals"].items()} == {
        **{"products": False, "attention": False, "memory": False, "update": False}
    }
    faster = {**RATES, "memory": {"per_s": 4.81e12}}
    assert not all(rates.judged(faster, H200)["checks"].values())
    assert calibrate.shares(RATES, DEVICES["a100"]).fp8 == {}


def test_the_newest_line_of_each_device_counts() -> None:
    newer = {**RATES, "memory": {"per_s": 0.7 * 4.8e12}}
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
    assert found is not None and found.shares.to_json() == SHARES
    assert shares.measured("h100") is None


def test_the_file_that_ships_is_what_the_results_give() -> None:
    assert shares.FILE.read_text() == calibrate.measured(gpu_evidence.read(gpu_evidence.RESULTS))


def test_plans_for_items(tmp_path: Path) -> None:
    steps = "train={duration: 10 steps, sequence_length: 2048, batch_size: 4, micro_batch_size: 2}"
    config = load(Path("models/llama3-8b.yaml"), ["model.layers=2", "parallel.dp_shard=-1", steps])
    found, expected = planned(config, 1, "NVIDIA H200"), plan(config, find_device("h200"), 1)
    assert found["planned_gb"] == pytest.approx(expected.peak_bytes / 1e9, abs=0.01)
    assert found["planned_s"] == pytest.approx(expected.step_seconds, abs=1e-5)
    assert planned(config, 1, "AMD EPYC") == {"planned_gb": None, "planned_s": None}
