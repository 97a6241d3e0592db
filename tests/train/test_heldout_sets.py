"""Named held-out sets while training: nothing else changes, on every layout, and the best checkpoints stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.policy import best
from pipeline.train.export.commands import rows
from pipeline.train.rules.layout import check_layout
from tests import tiny
from tests.heldout_sets import write
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.runs import exact, start, train, weights_hash


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    preprocess(load(write(root)))
    return root


def losses(run: Path) -> dict[int, dict[str, Any]]:
    """By step, what the metrics have of the sets."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["validation"] for row in rows if "validation" in row}


@pytest.mark.slow
def test_training_is_the_same_with_and_without_sets(folder: Path) -> None:
    plain = train(folder, "plain", "heldout_sets={}", "data.heldout_sources=[]")
    sets = train(folder, "with-sets")
    assert exact(sets) == exact(plain)
    assert weights_hash(sets) == weights_hash(plain)
    assert losses(plain) == {} and list(losses(sets)) == [2, 4, 6, 8]


@pytest.mark.slow
def test_a_resumed_run_scores_the_sets_at_the_same_steps(folder: Path) -> None:
    constant = "train.schedule={type: constant, warmup: 2 steps}"
    expected = losses(train(folder, "straight", constant))
    train(folder, "resumed", constant, "train.duration=3 steps")
    found = losses(train(folder, "resumed", constant))
    assert {step: found[step] for step in expected} == expected
    assert list(found) == [2, 3, 4, 6, 8], "its end was at step 3, first"
    assert found[3].keys() == {"waters", "far"} and found[2].keys() == found[6].keys() == {"waters"}


@pytest.mark.guard
@pytest.mark.parametrize("of", ["waters", None])
def test_the_best_checkpoints_stay(folder: Path, of: str | None) -> None:
    name = f"best-of-{of}"
    rules = {"every_steps": 4, "keep": 1, "keep_best": 1, "best_of": of, "async_save": False}
    values = [f"train.checkpoint={orjson.dumps(rules).decode()}", "train.duration=16 steps", "train.optimizer.lr=3"]
    values.append("train.schedule={type: constant, warmup: 8 steps}")
    run = train(folder, name, *values)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {
        row["step"]: row["validation_loss"] if of is None else row["validation"][of]["loss"]
        for row in metrics
        if row["step"] % 4 == 0 and ("validation_loss" in row if of is None else of in row.get("validation", {}))
    }
    assert list(measured) == [4, 8, 12, 16]
    # What is best is known so far at each save; the last one stays anyway.
    left = [each.step for each in Checkpoints.of_run(run).all()]
    kept = min(measured, key=lambda step: measured[step])
    assert left == sorted({kept, 16}) and kept < 16
    listed = rows(Checkpoints.of_run(run), CheckpointConfig.model_validate(rules))
    assert [(row.step, row.best) for row in listed] == [(kept, True), (16, False)]


@pytest.mark.guard
def test_the_best_cannot_be_told_where_nothing_is_held_out(tmp_path: Path) -> None:
    rules = {"every_steps": 4, "keep_best": 1}
    file = tiny.write_run(tmp_path, {"data.splits": {"heldout": 0}, "train.checkpoint": rules})
    preprocess(load(file))
    code, out = start(tmp_path, "run", file=file.name)
    assert code == 2 and "train.checkpoint.keep_best: the split 'heldout' of train.validation has no documents" in out


def test_best_of_losses() -> None:
    rules = CheckpointConfig(keep_best=2)
    assert best(rules, {1: 3.0, 2: 2.0, 3: None, 4: float("nan"), 5: 2.0, 6: 1.0}) == [6, 2]
    assert best(CheckpointConfig(), {1: 3.0}) == []


def test_a_length_that_a_layout_cannot_cut_is_refused(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, {"heldout_sets": {"far": {"sources": ["sea"], "sequence_length": 48}}})

    def told(*values: str) -> str:
        with pytest.raises(UserError) as caught:
            check_layout(load(file, list(values)), 2)
        return str(caught.value)

    far = "heldout_sets.far.sequence_length"
    assert f"{far}=46 cannot be cut" in told("parallel.cp=2", f"{far}=46")
    assert f"{far}=47 cannot be cut" in told("parallel.tp=2", f"{far}=47")
    check_layout(load(file, ["parallel.cp=2"]), 2)


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2},
        {"cp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "cp_method": "ulysses"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_has_the_losses_of_one_process(
    folder: Path, parallel: dict[str, Any], processes: Callable[[int], Ranks]
) -> None:
    one, name = folder / "one", "-".join(map(str, parallel.values()))
    values = ["train.duration=4 steps", "train.micro_batch_size=2"]
    if not one.exists():
        train(folder, "one", *values)
    run = folder / f"on-{'-'.join(parallel)}-{name}"
    values += [f"run.dir={run}", f"parallel={orjson.dumps(parallel).decode()}"]
    processes(2).call(layouts.train, folder / "run.yaml", values)
    expected = losses(one)
    assert list(losses(run)) == list(expected) == [2, 4]
    for step, sets in losses(run).items():
        assert sets.keys() == expected[step].keys()
        for of, found in sets.items():
            assert found["loss"] == pytest.approx(expected[step][of]["loss"], rel=1e-5)
            assert found["loss_by_source"] == pytest.approx(expected[step][of]["loss_by_source"], rel=1e-5)
