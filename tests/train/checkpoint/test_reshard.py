"""A checkpoint of any layout loads under any other one: every bit arrives, and training goes on as it would have.

A run trains some steps, saves, passes over some, saves again, and trains three more. Another one begins with the first
checkpoint under another layout: what it saves after the steps that are passed over is what it has loaded, and the three
that it trains must be those of the first run.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.distributed.layout import Layout
from pipeline.train.loop import trainer
from pipeline.train.parallel.tested import Combination
from pipeline.train.run.folder import read_metrics
from tests import tiny
from tests.train.distributed.ranks import Ranks
from tests.train.parallel import layouts
from tests.train.runs import exact, weights_hash

pytestmark = pytest.mark.parallel

Processes = Callable[[int], Ranks]

SAVED, MOVED, LAST = 3, 6, 9
"""Steps after which the first layout has saved, the other one saves what it has loaded, and both end."""
LAYERS = 4
LAYOUTS: dict[str, Combination] = {
    "one": Combination(Layout()),
    "tp2-dp2": Combination(Layout(tp=2, dp_shard=2)),
    "pp2-dp2": Combination(Layout(pp=2, dp_shard=2)),
    "dp4": Combination(Layout(dp_shard=4)),
    "interleaved": Combination(Layout(pp=2), "interleaved_1f1b"),
    "zbv": Combination(Layout(pp=2), "zbv"),
    "2x2x2": Combination(Layout(pp=2, dp_shard=2, tp=2)),
    "cp2-dp2": Combination(Layout(dp_shard=2, cp=2)),
}
QUICK = (
    ("one", "one"),
    ("one", "tp2-dp2"),
    ("tp2-dp2", "pp2-dp2"),
    ("pp2-dp2", "dp4"),
    ("dp4", "zbv"),
    ("zbv", "one"),
)
"""Data, tensor and pipeline axes once on either side."""
GUARD = (("tp2-dp2", "pp2-dp2"), ("tp2-dp2", "zbv"), ("zbv", "one"))
"""Those in the guard tier; one is in none, the others are slow."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    changes = {
        "model.layers": LAYERS,
        "train.duration": f"{LAST} steps",
        "train.validation": {"every_steps": LAST, "samples": 5},
        "train.checkpoint": {"every_steps": 3, "keep": 9},
        "train.ema": {"decay": 0.9},
        "blend": {"skip": [{"steps": f"{SAVED + 1}-{MOVED}"}, {"samples": "34-35"}]},
    }
    for family, keys in layouts.FAMILIES.items():
        file = tiny.write_run(folder, {**layouts.COMMON, **keys, **changes}, f"{family}.yaml")
    preprocess(load(file))
    return folder


def train(root: Path, processes: Processes, family: str, row: Combination, name: str) -> Path:
    """A run to the end; its folder, which may have checkpoints to begin with."""
    parallel = row.parallel.model_dump(mode="json", exclude_unset=True)
    micro = layouts.BATCH_SIZE // row.layout.dp // row.micro_batches
    values = [f"run.dir={root / name}", f"parallel={orjson.dumps(parallel).decode()}"]
    values.append(f"train.micro_batch_size={micro}")
    processes(row.layout.world_size).call(_train, root / f"{family}.yaml", values)
    return root / name


def _train(file: Path, values: list[str]) -> None:
    trainer.train(load(file, values))


def uninterrupted(root: Path, processes: Processes, family: str, layout: str) -> Path:
    """The run under the layout that the others begin with; made once."""
    name = f"{family}-{layout}"
    if not (root / name).exists():
        train(root, processes, family, LAYOUTS[layout], name)
    return root / name


def moved(root: Path, processes: Processes, family: str, source: str, target: str) -> Path:
    """The run that goes on under another layout; made once."""
    name = f"{family}-{source}-to-{target}"
    if not (root / name).exists():
        begin_with(uninterrupted(root, processes, family, source), SAVED, name)
        train(root, processes, family, LAYOUTS[target], name)
    return root / name


def begin_with(run: Path, step: int, name: str) -> None:
    """Give a new run the checkpoint of a step of another one."""
    folder = f"step-{step:08d}"
    shutil.copytree(run / "checkpoints" / folder, run.parent / name / "checkpoints" / folder)


def tensors_of(run: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, as torch's own tool reads them in one process."""
    file = run / f"tensors-{step}.pt"
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:08d}", file)
    return dict(_flat(torch.load(file, weights_only=True)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value


def differ(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same in every bit."""
    found = sorted(left.keys() ^ right.keys())
    return found + [name for name in left.keys() & right.keys() if not torch.equal(left[name], right[name])]


def table(quick: tuple[tuple[str, str], ...]) -> Iterator[Any]:
    """Every pair of layouts with the family that ties its embedding."""
    for pair in itertools.product(LAYOUTS, LAYOUTS):
        marks = [pytest.mark.guard if pair in quick and pair in GUARD else pytest.mark.slow]
        yield pytest.param("gpt2", *pair, id="-to-".join(pair), marks=[*_trains(pair), *marks])


def table_of_both() -> Iterator[Any]:
    """And some pairs with a family that does not."""
    yield from table(QUICK)
    for pair in QUICK:
        yield pytest.param("llama", *pair, id="llama-" + "-to-".join(pair), marks=[*_trains(pair), pytest.mark.slow])


def _trains(pair: tuple[str, str]) -> list[pytest.MarkDecorator]:
    return [mark for name in pair for mark in layouts.trains(LAYOUTS[name].schedule)]


@pytest.mark.parametrize(("family", "source", "target"), list(table_of_both()))
def test_saved_under_one_layout_and_loaded_under_another(
    root: Path, processes: Processes, family: str, source: str, target: str
) -> None:
    whole = uninterrupted(root, processes, family, source)
    run = moved(root, processes, family, source, target)
    saved = tensors_of(whole, SAVED)
    for section in ("model", "optimizer", "ema"):
        assert any(key.startswith(f"{section}.") for key in saved), section
    assert differ(saved, tensors_of(run, MOVED)) == []
    if source == target:
        assert exact(run) == exact(whole)[SAVED:]
        assert weights_hash(run) == weights_hash(whole)
        return
    rows, others = read_metrics(run), read_metrics(whole)[SAVED:]
    assert [row["step"] for row in rows] == list(range(SAVED + 1, LAST + 1))
    for row, other in zip(rows, others, strict=True):
        for key in ("order_hash", "data_hash", "tokens", "lr", "passed_over", "skipped"):
            assert row.get(key) == other.get(key), (row["step"], key)
        assert row.keys() >= {"loss", "grad_norm"} or row["step"] <= MOVED
        for key, tolerance in (("loss", 1e-5), ("validation_loss", 1e-5), ("grad_norm", 1e-4)):
            if key in other:
                assert row[key] == pytest.approx(other[key], rel=0, abs=tolerance), (row["step"], key)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "source", "target"), list(table((("tp2-dp2", "zbv"),))))
def test_and_back_it_goes_on_as_if_it_had_never_been_away(
    root: Path, processes: Processes, family: str, source: str, target: str
) -> None:
    whole = uninterrupted(root, processes, family, source)
    away = moved(root, processes, family, source, target)
    name = f"{away.name}-and-back"
    begin_with(away, MOVED, name)
    run = train(root, processes, family, LAYOUTS[source], name)
    assert exact(run) == exact(whole)[MOVED:]
    assert weights_hash(run) == weights_hash(whole)
