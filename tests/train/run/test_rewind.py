"""A rewind on several ranks: all go back together, and end as if the steps had been passed over from the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pytest

from pipeline.common import storage
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.loop import trainer
from tests import tiny
from tests.train.distributed import ranks
from tests.train.poison import INF, poison
from tests.train.runs import column, weights_hash

pytestmark = pytest.mark.parallel

STEPS = 14
LAYOUTS = {
    "tp2": (2, "parallel.tp=2"),
    "pp2": (2, "parallel.pp=2"),
    "fsdp2": (2, "parallel.dp_shard=2"),
    "tp2-fsdp2": (4, "parallel.tp=2", "parallel.dp_shard=2"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewind")
    keys = {
        "train.duration": f"{STEPS} steps",
        "train.micro_batch_size": 1,
        "train.precision": {"compute": "fp32"},
        "train.validation.samples": 0,
        "train.checkpoint": {"every_steps": 3, "keep": 9},
        "train.faults": {
            "on_nonfinite": "rewind",
            "on_spike": "rewind",
            "spike_window": 8,
            "spike_zscore": 20,
            "rewind_steps": 3,
        },
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


def train(root: Path, name: str, layout: str, steps: Mapping[int, float], *values: str) -> Path:
    world, *degrees = LAYOUTS[layout]
    ranks.run(world, _train, root / "run.yaml", [f"run.dir={root / name}", *degrees, *values], steps, connect=False)
    return root / name


def _train(file: Path, values: Sequence[str], steps: Mapping[int, float]) -> None:
    poison(pytest.MonkeyPatch(), steps)
    trainer.train(load(file, values))


@pytest.mark.guard
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("pp2", "spike"),
        ("fsdp2", "nonfinite"),
        pytest.param("tp2", "nonfinite", marks=pytest.mark.slow),
        pytest.param("pp2", "nonfinite", marks=pytest.mark.slow),
        pytest.param("tp2-fsdp2", "spike", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_go_back_to_one_checkpoint(root: Path, layout: str, kind: str) -> None:
    factor = {"nonfinite": INF, "spike": 1000.0}[kind]
    run = train(root, f"{layout}-{kind}", layout, {11: factor})
    other = train(root, f"{layout}-{kind}-without", layout, {}, "blend.skip=[{steps: 8-11}]")
    (fault,) = storage.read_json_lines(run / "faults.jsonl")
    assert (fault["step"], fault["kind"], fault["action"]) == (11, kind, "rewind")
    assert column(run, "attempt") == [1 if step <= 6 else 2 for step in range(1, STEPS + 1)]
    for key in ("loss", "grad_norm", "passed_over", "order_hash", "data_hash", "loss_zscore", "grad_norm_zscore"):
        assert column(run, key) == column(other, key), key
    assert column(run, "passed_over") == [True if 8 <= step <= 11 else None for step in range(1, STEPS + 1)]
    assert weights_hash(run) == weights_hash(other)
    assert orjson.loads((run / "attempt").read_bytes()) == 2


def test_more_rewinds_than_allowed_end_all_ranks(root: Path) -> None:
    with pytest.raises(ranks.RankFailed, match=r"NumericalError: step 11: .*train.faults.max_rewinds"):
        train(root, "forbidden", "fsdp2", {11: INF}, "train.faults.max_rewinds=0")
