"""Measured shares: times follow from them exactly, and every plan says where its shares come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.slurm import SiteConfig
from pipeline.train.host import shares
from pipeline.train.host.devices import DEVICES, Device, calibrated, device_of_driver, find_device
from pipeline.train.model.flops import extra_flops, num_parameters
from pipeline.train.planning.bounds import least_seconds, micro_batch
from pipeline.train.planning.plan import mean_mfu, plan
from pipeline.train.planning.published import LEAST, MOST, TYPICAL
from pipeline.train.planning.timing import assumptions, rank_parameters, step_time
from slurm.submit.course import forecast
from tests.slurm.submit.test_course import job
from tests.train.planning.test_timing import LAYOUTS, LLAMA_8B, Case, train

ENTRY: dict[str, Any] = {
    "driver": "NVIDIA H200",
    "date": "2001-02-03T04:05:06Z",
    "commit": "0123456789ab",
    "torch": "2.11.0",
    "shares": {
        "products": 0.5,
        "fp8": {"tensorwise": 0.25},
        "attention": 0.75,
        "attention_backward": 3.0,
        "memory": 0.4,
        "update": 0.2,
    },
}
SOURCE = "measured on NVIDIA H200 on 2001-02-03 with torch 2.11.0, commit 0123456789ab"
ASSUMED = "nothing was measured on"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Device]:
    """Makes a file of measured shares, by default with an entry of the H200, and gives the H200 as commands see it."""

    def write(**entries: Any) -> Device:
        file = tmp_path / "measured.json"
        file.write_text(json.dumps(entries or {"h200": ENTRY}))
        monkeypatch.setattr(shares, "FILE", file)
        return find_device("h200")

    return write


def test_a_step_follows_from_measured_shares(tmp_path: Path, given: Callable[..., Device]) -> None:
    h200, case = given(), Case(tmp_path, 1, LLAMA_8B, train(8192, 4, 2))
    found, assumed, tokens = case.time(h200).seconds, case.time(DEVICES["h200"]).seconds, 4 * 8192
    weights = num_parameters(case.spec) - 128256 * 4096 - 65 * 4096
    assert found.products == pytest.approx(6 * tokens * weights / (0.5 * 989e12), rel=1e-12)
    forward = 32 * tokens * extra_flops(case.spec.layers[0], 8192, causal=True)
    assert found.attention == pytest.approx((1 + 3) * forward / (0.5 * 0.75 * 989e12), rel=1e-12)
    assert found.elementwise == pytest.approx(assumed.elementwise * 0.8 / 0.4, rel=1e-12)
    assert found.optimizer == pytest.approx(40 * num_parameters(case.spec) / (0.2 * 4.8e12), rel=1e-12)
    bf16 = Case(tmp_path, 1, LLAMA_8B, train(8192, 4, 2, ", optimizer: {states: bf16}")).time(h200).seconds
    assert bf16.optimizer == pytest.approx(112 * num_parameters(case.spec) / (0.4 * 4.8e12), rel=1e-12)


@pytest.mark.parametrize(
    ("fp8", "share"),
    [("{}", 0.25), ("{backend: te}", 0.25), ("{recipe: rowwise}", 0.5), ("{backend: te, recipe: mxfp8}", 0.5)],
)
def test_recipes_of_fp8_without_a_figure_reach_what_bf16_does(
    tmp_path: Path, given: Callable[..., Device], fp8: str, share: float
) -> None:
    case = Case(tmp_path, 1, LLAMA_8B, train(8192, 4, 2, f", precision: {{fp8: {fp8}}}, compile: false"))
    head = 128256 * 4096
    layers = num_parameters(case.spec) - 2 * head - 65 * 4096
    expected = 6 * 4 * 8192 * (layers / (share * 1979e12) + head / (0.5 * 989e12))
    assert case.time(given()).seconds.products == pytest.approx(expected, rel=1e-12)


SECONDS = [
    ("h100", 8, "parallel={dp_shard: -1}", train(8192, 16, 2), 1.7451256637468833),
    (
        "h200",
        8,
        "parallel={tp: 2, pp: 2, dp_shard: -1}",
        train(8192, 64, 1, ", recompute: {mode: full}, precision: {fp8: {}}"),
        7.042763651274737,
    ),
    (
        "a100",
        1,
        "parallel={}",
        train(8192, 4, 2, ", compile: false, optimizer: {type: muon, states: bf16}, ema: {}"),
        12.50662676738607,
    ),
    (
        "b200",
        64,
        "parallel={tp: 4, cp: 2, dp_shard: -1}",
        train(8192, 64, 1, ", precision: {fp8: {recipe: rowwise}}"),
        1.700718765485714,
    ),
]
"""Steps by assumed shares, as they were before shares could be measured."""


@pytest.mark.parametrize(("name", "world", "parallel", "values", "seconds"), SECONDS)
def test_without_measured_shares_times_are_as_before(
    tmp_path: Path, given: Callable[..., Device], name: str, world: int, parallel: str, values: str, seconds: float
) -> None:
    given(other=ENTRY)
    assert calibrated(DEVICES[name]) == DEVICES[name]
    # `sum` rounds otherwise from Python 3.12 on.
    total = Case(tmp_path, world, LLAMA_8B, parallel, values).time(find_device(name)).seconds.total
    assert total == pytest.approx(seconds, rel=1e-14)


def test_only_the_device_itself_is_calibrated(given: Callable[..., Device]) -> None:
    a100 = {**ENTRY, "driver": "NVIDIA A100-SXM4-80GB"}
    h200 = given(h200=ENTRY, a100=a100, h100={**ENTRY, "driver": "NVIDIA H100 PCIe"})
    assert h200.measured is not None and asdict(h200.measured) == ENTRY
    assert find_device("H100").measured is None, "its figures are those of another card"
    drivers = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200")
    found = [device_of_driver(name) for name in drivers]
    assert [device is not None and device.measured is not None for device in found] == [True, True, False, False, False]


def test_text_and_json_name_the_source(
    given: Callable[..., Device],
    run_file: Path,
    call: Callable[..., tuple[int, str, str]],
) -> None:
    given()
    for device, source in (("h200", SOURCE), ("h100", f"{ASSUMED} h100")):
        code, text, _ = call(run_file, "--device", device, "launch.processes=1")
        assert code == 0 and source in text, text
        code, text, _ = call(run_file, "--device", device, "launch.processes=1", "--json")
        found = json.loads(text)
        assert source in found["assumptions"][0]
        assert found["device"]["measured"] == (ENTRY if device == "h200" else None)
    assert found["device"]["shares"] == {
        **{"products": 0.6, "fp8": {}, "attention": 0.6, "attention_backward": 2.5, "memory": 0.8, "update": 0.8}
    }


def test_a_plan_says_what_of_fp8_was_measured(tmp_path: Path, given: Callable[..., Device]) -> None:
    def said(recipe: str) -> str:
        config = Case(tmp_path, 1, LLAMA_8B, train(8192, 1, 1, f", precision: {{fp8: {{recipe: {recipe}}}}}")).config
        return assumptions(given(), config.train.precision.fp8)[1]

    assert "products in fp8 reach 25 % of their own peak" in said("tensorwise")
    assert "products in fp8 reach the same 50 % of their own peak" in said("rowwise")


def test_suggestions_name_the_source(
    given: Callable[..., Device],
    run_file: Path,
    call: Callable[..., tuple[int, str, str]],
) -> None:
    given()
    one = [run_file, "launch.processes=1", "train.batch_size=1", "parallel.tp=3", "--suggest", "--device", "h200"]
    code, text, _ = call(*one)
    assert code == 2 and text.startswith("refused: ") and f"fastest first (shares of the peaks are {SOURCE}):" in text
    code, text, _ = call(*one, "--json")
    assert json.loads(text)["device"]["measured"] == ENTRY


def test_the_forecast_of_a_job_uses_them(tmp_path: Path, given: Callable[..., Device]) -> None:
    config = Case(tmp_path, 8, "train.duration=100 steps", "parallel={tp: 2, dp_shard: -1}").config
    site = SiteConfig(gpus_per_node=8, gpu_type="h200")
    eight = job(nodes=1, processes_per_node=8, gpus_per_node=8)
    given(other=ENTRY)
    assumed = forecast(config, site, eight)
    h200 = given()
    ahead = forecast(config, site, eight)
    mfu = mean_mfu(config, h200, 8)
    assert mfu == pytest.approx(plan(config, h200, 8).main.mfu, rel=1e-12)
    assert assumed.seconds is not None and ahead.seconds is not None
    h100 = mean_mfu(config, replace(h200, measured=None), 8)
    assert ahead.seconds == pytest.approx(assumed.seconds / TYPICAL * h100 / mfu, rel=1e-12)
    assert ahead.how.endswith(f"of 989 TFLOP/s, {SOURCE}") and assumed.how.endswith("as in published runs")
    assert ahead.bounds == (ahead.seconds * LEAST, ahead.seconds * MOST)


@pytest.mark.parametrize(
    ("parallel", "world"),
    [*LAYOUTS, ("parallel={pp: 4, pipeline: {schedule: zbv}}", 8), ("parallel={pp: 2, pipeline: {schedule: 1f1b}}", 2)],
)
def test_bounds_stay_below_times(tmp_path: Path, given: Callable[..., Device], parallel: str, world: int) -> None:
    h200 = given()
    measured = h200.measured
    assert measured is not None
    swift = replace(measured.shares, attention=1.5, attention_backward=1.0, memory=0.9, products=0.9)
    for mode, fp8 in (("none", ""), ("full", ", precision: {fp8: {}}")):
        values = train(8192, 256, 1, f", recompute: {{mode: {mode}}}{fp8}, compile: false")
        case = Case(tmp_path, world, LLAMA_8B, parallel, values)
        for device in (h200, replace(h200, measured=replace(measured, shares=swift))):
            cost = micro_batch(case.config, case.layout, case.spec, case.shape, device)
            least = least_seconds(case.config, case.layout, case.spec, case.shape, cost)
            parameters = rank_parameters(case.config, case.layout, case.spec)
            time = step_time(case.config, case.layout, case.spec, case.shape, device, parameters)
            assert 0 < least <= time.seconds.total


def test_the_file_that_ships_can_be_read() -> None:
    for name in json.loads(shares.FILE.read_text()):
        found = calibrated(DEVICES[name]).measured
        assert found is not None and 0 < found.shares.products <= 1
