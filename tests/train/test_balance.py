"""Metrics of experts against plain numpy, and what the balance of a step changes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from pipeline.common.errors import MachineError
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.report.command import report
from pipeline.train.loop import trainer
from pipeline.train.loop.quantities.quantity import Update
from pipeline.train.loop.quantities.routing import Balance, routing_columns
from pipeline.train.monitor.imbalance import Imbalance
from pipeline.train.monitor.loggers.base import flat
from pipeline.train.parallel.parallelize import build_model
from pipeline.train.run.folder import read_metrics
from slurm.status.command import show_status
from tests import tiny
from tests.train.one_process import CPU, config_of, setup_of
from tests.train.runs import start, train

LAYERS, DIM, FFN, VOCABULARY, LENGTH = 2, 32, 24, 304, 32
EXPERTS = {"count": 8, "top_k": 2, "ffn_dim": FFN, "shared_ffn_dim": 16, "score": "sigmoid", "score_bias": True}


def metrics(counts: dict[int, list[int]], rows: list[float], **more: Any) -> dict[str, Any]:
    """Those of a step in which the experts of each layer were chosen so often; losses and bias ranges by the layer."""
    numbers = [value for layer, each in counts.items() for value in (*each, 0.5 + layer, 10.0 + layer, 0.25 * layer)]
    sums = [torch.tensor(values, dtype=torch.float64) for values in (numbers, rows)]
    found: dict[str, Any] = routing_columns({layer: len(each) for layer, each in counts.items()}, *sums, **more)
    return found["experts"]


def test_metrics_are_what_numpy_computes() -> None:
    chance = np.random.default_rng(1)
    counts = {layer: chance.integers(0, 50, size) for layer, size in ((1, 8), (2, 11), (5, 16))}
    counts[2][[3, 10]] = 0
    rows = [120.0, 80.0, 100.0]
    found = metrics({layer: each.tolist() for layer, each in counts.items()}, rows, by_layer=True)

    load = {layer: each.max() / each.mean() for layer, each in counts.items()}
    assert found["load_max_over_mean"] == pytest.approx(max(load.values()))
    assert found["load_max_layer"] == max(load, key=lambda layer: load[layer])
    assert found["load_cv"] == pytest.approx(max(each.std() / each.mean() for each in counts.values()))
    assert found["dead_experts"] == max((each == 0).sum() for each in counts.values()) >= 2

    def entropy(each: Any) -> float:
        shares = each[each > 0] / each.sum()
        return float(np.exp(-(shares * np.log(shares)).sum()) / len(each))

    assert found["load_entropy"] == pytest.approx(min(map(entropy, counts.values())))
    assert found["balance_loss"] == pytest.approx(sum(0.5 + layer for layer in counts))
    assert found["z_loss"] == pytest.approx(sum(10.0 + layer for layer in counts))
    assert found["router_bias_range"] == 1.25
    assert found["rows_max_over_mean"] == pytest.approx(1.2)
    for layer, each in counts.items():
        assert found["load_by_layer"][str(layer)] == pytest.approx((each / each.mean()).tolist())
    assert "balance_forced" not in found


def test_biases_move_towards_equal_loads_and_not_in_a_withheld_step() -> None:
    experts = {"count": 4, "top_k": 1, "ffn_dim": 8, "score": "sigmoid", "score_bias": True}
    keys = {"layers": 1, "dim": 16, "heads": 2, "mlp": "experts", "experts": experts}
    config = config_of(keys, balance={"bias_rate": 0.5}, precision={"compute": "fp32"})
    setup = setup_of(config)
    model = build_model(config, setup)
    balance = Balance(config.train.balance, model, setup.mesh, CPU, None)
    router = model.whole.layers["0"].mlp.router
    sums = [torch.tensor([2.0, 6.0, 4.0, 4.0, 1.0, 1.0, 0.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    for updated in (False, True, True, False):
        before = router.score_bias.clone(), router.loads.clone()
        balance.finish(sums, Update(torch.ones(()), torch.tensor(True), torch.tensor(updated), None, None))
        if not updated:
            assert torch.equal(router.score_bias, before[0]) and torch.equal(router.loads, before[1])
    assert router.score_bias.tolist() == [1.0, -1.0, 0.0, 0.0]
    assert router.loads.tolist() == [2.0, 6.0, 4.0, 4.0]


def test_even_and_collapsed_loads() -> None:
    even = metrics({0: [6] * 8}, [48.0], forced=True)
    assert even["load_max_over_mean"] == even["rows_max_over_mean"] == 1 == pytest.approx(even["load_entropy"])
    assert even["load_cv"] == even["dead_experts"] == 0
    assert even["balance_forced"] is True and "load_by_layer" not in even
    # All tokens go to the same 2 of 8.
    collapsed = metrics({0: [24, 0, 0, 24, 0, 0, 0, 0]}, [48.0])
    assert collapsed["load_max_over_mean"] == 4 and collapsed["dead_experts"] == 6
    assert collapsed["load_entropy"] == pytest.approx(2 / 8)
    # Nothing but padding was seen.
    assert metrics({0: [0] * 4}, [0.0])["load_max_over_mean"] == 0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    model = {"layers": LAYERS, "dim": DIM, "heads": 2, "vocab_multiple": 16, "mlp": "experts", "experts": EXPERTS}
    changes = {"model": model, "train.metrics.layers_every_steps": 4, "train.validation.samples": 0}
    preprocess(load(tiny.write_run(root, changes)))
    return root


def shown(run: Path) -> str:
    out = io.StringIO()
    show_status((run,), Console(file=out, width=200))
    return out.getvalue()


def test_a_run_tells_the_loads_wherever_it_tells_its_loss(root: Path) -> None:
    code, out = start(root, "run")
    assert code == 0, out
    rows = read_metrics(root / "run")
    last = rows[-1]["experts"]
    assert f"load {last['load_max_over_mean']:.1f}x" in out and "for each token" in out
    assert [row["step"] for row in rows if "load_by_layer" in row["experts"]] == [4, 8]
    for loads in rows[3]["experts"]["load_by_layer"].values():
        assert len(loads) == 8 and sum(loads) == pytest.approx(8)
    most = {int(layer): max(loads) for layer, loads in last["load_by_layer"].items()}
    assert most[last["load_max_layer"]] == max(most.values()) == last["load_max_over_mean"]
    # All biases go up or down by the rate in each step, the first of which begins with none.
    assert [row["experts"]["router_bias_range"] for row in rows[:2]] == pytest.approx([0, 0.002], abs=1e-9)
    assert last["rows_max_over_mean"] == 1, "there is one rank"
    scalars = flat(rows[3])
    assert scalars["experts/load_cv"] == rows[3]["experts"]["load_cv"]
    assert not any(name.startswith("experts/load_by_layer") for name in scalars), "a scalar for each expert is too many"
    assert f"busiest {last['load_max_over_mean']:.2f}x the mean (layer {last['load_max_layer']})" in shown(root / "run")
    page = report([root / "run"], Console(quiet=True), out=root / "run.html").read_text()
    assert "Load of the busiest expert" in page and "Load per expert: layer" in page


def test_flops_are_those_of_the_experts_that_a_token_goes_to(root: Path) -> None:
    row = read_metrics(train(root, "flops"))[-1]
    attention = 4 * 2 * DIM * DIM + 2 * 2 * DIM * LENGTH
    experts = 2 * 2 * 3 * DIM * FFN + 2 * 3 * DIM * 16 + 2 * DIM * 8
    head = 2 * DIM * load(root / "run.yaml").tokenizer.train.vocab_size  # type: ignore[union-attr]
    flops = row["model_flops_per_second"] / row["tokens_per_second"]
    assert flops == pytest.approx(3 * (LAYERS * (attention + experts) + head))


def test_forced_balance_is_named(root: Path) -> None:
    code, out = start(root, "forced", "train.balance.force=true")
    assert code == 0, out
    assert "train.balance.force: tokens are dealt to experts in turn" in out and "load 1.0x (forced)" in out
    for row in read_metrics(root / "forced"):
        assert row["experts"]["balance_forced"] is True and row["experts"]["load_max_over_mean"] == 1
    assert "forced by train.balance.force" in shown(root / "forced")


@pytest.mark.slow
def test_what_is_uneven_is_told_on_the_console_and_where_memory_runs_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Imbalance, "see", lambda self, step, experts: "uneven" if step == 3 else None)
    out = start(root, "uneven")[1]
    assert out.count("warning: uneven") == 1

    def issue(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB. GPU 0 has 79.00 GiB")

    monkeypatch.setattr("pipeline.train.loop.step.Stepper.step", lambda *_, **__: issue())
    with pytest.raises(MachineError, match=r"micro_batch_size.* `rows_max_over_mean` below `experts`"):
        trainer.train(load(root / "run.yaml", [f"run.dir={root / 'large'}"]), Console(quiet=True))
