"""Training by `train.optimizer`: the loss that it comes to on bytes of Python's own source, and the time of an update.

A process each, in turn; JSON lines with the mean loss (nats a byte) of the last 50 steps, the median step, and the
share of it that clipping and the update take. `nearest` are bf16 moments that are rounded to the nearest, which the
program has no key for.

Run it as `python benchmarks/train/optimizers.py --steps 300`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch
from pipeline.train.optim.gradients import Gradients
from pipeline.train.optim.optimizers import Optimizers
from pipeline.train.optim.stochastic_rounding import Rounding

_VOCABULARY, _WARM_UP, _LAST = 256, 20, 50

WAYS: dict[str, dict[str, Any]] = {
    f"{name}, beta2 {beta}": {**keys, "betas": [0.9, beta]}
    for beta in (0.95, 0.999)
    for name, keys in {"fp32": {}, "bf16": {"states": "bf16"}, "nearest": {"states": "bf16"}}.items()
} | {"muon": {"type": "muon"}, "muon, bf16": {"type": "muon", "states": "bf16"}}


def train(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """A row of the result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if way.startswith("nearest"):
        Rounding.store = _nearest  # type: ignore[method-assign]
    update = _Timer(device)
    Optimizers.step = update.of(Optimizers.step)  # type: ignore[method-assign]
    Gradients.scale = update.of(Gradients.scale)  # type: ignore[method-assign]
    config = {
        "sequence_length": given.length,
        "precision": {"compute": "fp32"},
        "compile": False,
        "optimizer": {"lr": given.lr, **WAYS[way]},
    }
    model = {"layers": given.layers, "dim": given.dim, "heads": given.dim // 32}
    stepper = stepper_of(device, _VOCABULARY, model=model, train=config, seed=given.seed)
    text, generator = _text(), torch.Generator().manual_seed(given.seed)
    losses, times, updates = [], [], []
    for step in range(given.steps):
        starts = torch.randint(len(text) - given.length - 1, (given.rows,), generator=generator)
        rows = torch.stack([text[start : start + given.length + 1] for start in starts.tolist()]).long()
        ones, zeros = torch.ones(given.rows, given.length), torch.zeros(given.rows, dtype=torch.int64)
        batch = Batch(rows[:, :-1], rows[:, 1:], ones, torch.zeros(0, dtype=torch.int32), zeros, {})
        begin, update.seconds = time.perf_counter(), 0.0
        # Up, and down to a tenth.
        factor = min((step + 1) / _WARM_UP, 1 - 0.9 * step / given.steps)
        result = stepper.step([batch], rows[:, 1:].numel(), given.lr * factor)
        losses.append(result.nats.sum().item() / rows[:, 1:].numel())
        times.append(time.perf_counter() - begin)
        updates.append(update.seconds)
    second = statistics.median(times)
    return {
        "way": way,
        "seed": given.seed,
        "steps": given.steps,
        "loss": round(statistics.mean(losses[-_LAST:]), 4),
        "step_s": round(second, 3),
        "update_share": round(statistics.median(updates) / second, 3),
    }


def _nearest(_: Rounding, __: str, ___: int, value: Tensor, into: Tensor, *____: slice) -> None:
    into.copy_(value)


class _Timer:
    """Adds up the seconds of calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def of(self, function: Any) -> Any:
        def timed(*args: Any) -> None:
            self._wait()
            begin = time.perf_counter()
            function(*args)
            self._wait()
            self.seconds += time.perf_counter() - begin

        return timed

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _text() -> Tensor:
    """Bytes of the modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS))
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(train(given.one, given)), flush=True)
        return
    for way in given.ways or WAYS:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", way], check=True)


if __name__ == "__main__":
    main()
