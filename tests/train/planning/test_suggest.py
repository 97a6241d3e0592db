from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.distributed.layout import resolve
from pipeline.train.host.devices import DEVICES
from pipeline.train.parallel.pipeline_schedules import SCHEDULES, play
from pipeline.train.parallel.step_shapes import step_shapes
from pipeline.train.planning.bounds import least_bubble, least_bytes
from pipeline.train.planning.candidates import candidates, differences, overridden
from pipeline.train.planning.memory import memory
from pipeline.train.planning.plan import plan
from pipeline.train.planning.suggest import as_arguments, suggest
from pipeline.train.rules.layout_check import planned_spec
from pipeline.train.torch_compat import pipeline_stage

H100 = DEVICES["h100"]
SMALL = (
    "model.layers=4",
    "train.batch_size=16",
    "train.duration=100 steps",
    "parallel.dp_replicate=1",
    "parallel.dp_shard=-1",
    "train.recompute.mode=none",
)


def small(*overrides: str) -> Config:
    """Four layers of Llama 3 8B: the search is the same, and its space small."""
    return load(Path("models/llama3-8b.yaml"), [*SMALL, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_best_of_all(devices: int) -> None:
    """Every candidate priced one by one."""
    config, device = small("train.batch_size=2"), H100
    best: float | None = None
    for overrides in candidates(config, planned_spec(config), devices, 8):
        try:
            found = plan(overridden(config, overrides), device, devices)
        except UserError:
            continue
        if found.fits and (best is None or found.hours < best):
            best = found.hours
    assert best is not None
    suggested = suggest(config, device, devices, best=1)
    assert suggested[0][1].hours == pytest.approx(best, rel=0.01)


@pytest.mark.guard
def test_suggestions_hold_on_the_command_line() -> None:
    config = small("train.batch_size=4")
    found = suggest(config, H100, 2, best=2)
    assert 0 < len(found) <= 2
    assert [each.hours for _, each in found] == sorted(each.hours for _, each in found)
    for overrides, priced in found:
        assert priced.fits
        pasted = plan(small("train.batch_size=4", *as_arguments(overrides)), H100, 2)
        assert (pasted.layout, pasted.hours, pasted.peak_bytes) == (priced.layout, priced.hours, priced.peak_bytes)
        assert differences(config, overrides) == overrides
    assert [each for each, _ in found] == [each for each, _ in suggest(config, H100, 2, best=2)]


def test_no_schedule_is_tried_that_torch_cannot_train_with(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("train.batch_size=4")
    for works in (True, False):
        monkeypatch.setattr(pipeline_stage, "SPLITS_BACKWARD", works)
        found = {each["parallel.pipeline.schedule"] for each in candidates(config, planned_spec(config), 2, 8)}
        wanted = {"zbv", "interleaved_zero_bubble"} if works else set()
        assert found == {"1f1b", "interleaved_1f1b"} | wanted


def test_degrees_of_ep_divide_experts_and_the_processes_of_their_weights() -> None:
    experts = '{"count": 12, "top_k": 2, "ffn_dim": 512}'
    config = small("train.batch_size=16", "model.mlp=experts", f"model.experts={experts}")
    found = {
        (each["parallel.tp"] * each["parallel.pp"], each["parallel.dp_replicate"], each["parallel.ep"])
        for each in candidates(config, planned_spec(config), 8, 8)
    }
    assert {ep for model, replicas, ep in found if (model, replicas) == (1, 1)} == {1, 2, 4}
    assert {ep for _, _, ep in found} == {1, 2, 4}
    dense = small("train.batch_size=16")
    assert {each["parallel.ep"] for each in candidates(dense, planned_spec(dense), 8, 8)} == {1}


def test_nothing_fits() -> None:
    with pytest.raises(UserError, match=r"no layout over 1 device \(h100\) fits: the nearest .* of 75\.7 GiB"):
        suggest(load(Path("models/llama3-70b.yaml")), H100, 1)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "gpipe"])
def test_bounds_of_pipelines(schedule: str) -> None:
    """No schedule waits less than its bound, and the first rank keeps as many micro-batches as there are ranks."""
    facts = SCHEDULES[schedule]  # type: ignore[index]
    for pp, rounds in ((2, 2), (4, 3)):
        played = play(schedule, pp, facts.default_stages, pp * rounds)  # type: ignore[arg-type]
        bound = least_bubble(schedule, pp, facts.default_stages, pp * rounds)  # type: ignore[arg-type]
        assert bound <= played.bubble + 1e-9
        assert played.activations[0] / facts.default_stages >= pp - 1e-9


@pytest.mark.guard
def test_the_least_memory_of_a_pipeline_is_less_than_its_memory() -> None:
    """Whole gradients are there in a pipeline, and do not count where they add up in shards."""
    least = {}
    for reduce in ("each", "last"):
        config = small(
            "train.batch_size=32", "train.micro_batch_size=1", "parallel.pp=2", f"parallel.overlap.reduce={reduce}"
        )
        layout, spec = resolve(config.parallel, 16), planned_spec(config)
        (shape,) = step_shapes(config, layout.dp)
        least[reduce] = least_bytes(config, layout, spec, shape)
        assert least[reduce] <= max(rank.total for rank in memory(config, layout, spec, shape))
    parameters = 10**9  # about what a stage has
    assert least["last"] - least["each"] > 3 * parameters


@pytest.mark.slow
def test_an_8b_on_a_node_is_sharded() -> None:
    overrides, priced = suggest(load(Path("models/llama3-8b.yaml")), H100, 8, best=1)[0]
    assert (priced.layout.pp, priced.layout.tp) == (1, 1), overrides
    assert priced.layout.dp_shard == 8


@pytest.mark.slow
def test_a_405b_needs_tensor_and_pipeline_parallelism() -> None:
    found = suggest(load(Path("models/llama3-405b.yaml")), H100, 16_384, best=2)
    assert all(priced.fits and priced.layout.tp > 1 and priced.layout.pp > 1 for _, priced in found)
