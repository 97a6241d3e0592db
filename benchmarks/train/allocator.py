"""Training steps on the CPU with and without `keep_freed_memory`: tokens/s in alternating processes, ratio of medians.

Run it as `python benchmarks/train/allocator.py --rounds 5`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.host.cpu_allocator import keep_freed_memory

_MODEL = {"layers": 3, "dim": 192, "heads": 3, "kv_heads": 1, "ffn_dim": 512}
_BATCH, _LENGTH, _VOCABULARY = 8, 256, 8192


def tokens_per_second(keep: bool, steps: int) -> float:
    """The quickstart's model on random tokens; the median step after a warm-up."""
    if keep:
        assert keep_freed_memory()
    stepper = stepper_of(torch.device("cpu"), _VOCABULARY, model=_MODEL, train={"sequence_length": _LENGTH})
    tokens = torch.randint(_VOCABULARY, (_BATCH, _LENGTH + 1))
    ones, zeros = torch.ones(_BATCH, _LENGTH), torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, zeros, zeros[:, 0], {})
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        stepper.step(StepData(0, [batch], _BATCH * _LENGTH), 1e-3)
        times.append(time.perf_counter() - start)
    return _BATCH * _LENGTH / statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps timed in each process")
    parser.add_argument("--one", choices=["default", "keep"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(tokens_per_second(arguments.one == "keep", arguments.steps))
        return
    rates: dict[str, list[float]] = {"default": [], "keep": []}
    for _ in range(arguments.rounds):
        for kind, found in rates.items():
            command = [sys.executable, __file__, "--one", kind, "--steps", str(arguments.steps)]
            found.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    medians = {kind: round(statistics.median(found)) for kind, found in rates.items()}
    print(json.dumps({**medians, "ratio": round(medians["keep"] / medians["default"], 2), "unit": "tokens/s"}))


if __name__ == "__main__":
    main()
