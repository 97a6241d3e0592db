"""The page about the training loop does what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.loop.quantities.quantity import Quantity, QuantityNumbers
from pipeline.train.loop.step import Stepper
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.parallel.parallelize import build_model
from tests import tiny
from tests.train.one_process import config_of, setup_of
from tests.train.runs import column, train

PAGE = Path(__file__).parents[2] / "docs" / "loop.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.guard
def test_the_arithmetic_alone_gives_the_losses_of_a_run(tmp_path: Path) -> None:
    file = tiny.write_run(tmp_path, {"train.metrics.windows": True})
    words = [sys.executable, "-c", BLOCKS[0], str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()[-8:]]
    rows = [loss for loss in column(train(tmp_path, "run"), "loss") if loss is not None]
    assert losses == rows


@pytest.mark.parametrize(("nats", "share"), [(10, 0.0), (0, 1.0)])
def test_the_quantity_of_the_page_counts(nats: int, share: float) -> None:
    names: dict[str, Any] = {"torch": torch, "Quantity": Quantity, "QuantityNumbers": QuantityNumbers}
    block = BLOCKS[1].replace("> 10", f"> {nats}")
    exec(compile(f"from __future__ import annotations\n{block}", "loop.md", "exec"), names)
    config = config_of({"layers": 1, "dim": 16, "heads": 2, "vocab_multiple": 8}, sequence_length=8)
    setup = setup_of(config)
    model = build_model(config, setup)
    hard = names["HardTargets"](setup.device)
    stepper = Stepper(config, setup, model, Optimizers(config, model), sources=["a"], quantities=[hard])
    ids, starts, sources = torch.zeros(2, 8, dtype=torch.int64), torch.tensor([0, 8], dtype=torch.int32), torch.zeros(2)
    batch = Batch(ids, ids, torch.tensor([[1.0] * 8, [0.0] * 8]), starts, sources.long(), {})
    assert stepper.step(StepData(0, [batch, batch], 16), 0.0).columns()["hard_targets"] == share
