"""Training steps by `train.recompute` and `train.compile`: peak memory and time.

A process each, in turn; JSON lines with the peak over that of the process before its first step, and the median step.
On a GPU the peak is `max_memory_allocated`, else the kernel's high-water mark of resident memory.

Run it as `python benchmarks/train/recompute.py --layers 8 --dim 512 --tokens 4096`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch, StepData

_VOCABULARY = 4096
_SAMPLE = 1024

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": {"mode": "full"}},
    "full, every 2": {"recompute": {"mode": "full", "every": 2}},
    "full, offload": {"recompute": {"mode": "full", "offload": True}},
    "selective": {"recompute": {"mode": "selective"}},
    "selective, keep attention": {"recompute": {"mode": "selective", "keep": ["attention"]}},
    "none, compiled": {"compile": True},
    "full, compiled": {"compile": True, "recompute": {"mode": "full"}},
    "selective, compiled": {"compile": True, "recompute": {"mode": "selective"}},
    "budget 0.5, compiled": {"compile": True, "recompute": {"mode": "budget"}},
}


def step_costs(way: str, tokens: int, layers: int, dim: int, compute: str, steps: int) -> tuple[float, float, float]:
    """Peak memory in GB, seconds of the first step, and of a later one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = {
        "sequence_length": _SAMPLE,
        "precision": {"compute": compute},
        "loss": {"chunk_tokens": _SAMPLE},
        "compile": False,
        **WAYS[way],
    }
    model = {"layers": layers, "dim": dim, "heads": max(1, dim // 64)}
    stepper = stepper_of(device, _VOCABULARY, model=model, train=train)
    rows = tokens // _SAMPLE
    ids = torch.randint(_VOCABULARY, (rows, _SAMPLE + 1))
    ones, zeros = torch.ones(rows, _SAMPLE), torch.zeros(rows, _SAMPLE, dtype=torch.int64)
    batch = Batch(ids[:, :-1], ids[:, 1:], ones, zeros, zeros[:, 0], {})
    before, times = _peak(device), []
    for number in range(steps + 1):
        if number == 1:
            _forget_peak(device)  # the first step may have compiled, which takes memory of its own
        start = time.perf_counter()
        stepper.step(StepData(0, [batch], tokens), 1e-3).columns()  # waits for the device
        times.append(time.perf_counter() - start)
    return (_peak(device) - before) / 1e9, times[0], statistics.median(times[1:])


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, a multiple of 1024")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS))
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        peak, first, later = step_costs(given.one, given.tokens, given.layers, given.dim, given.compute, given.steps)
        row = {"way": given.one, "tokens": given.tokens, "layers": given.layers, "dim": given.dim}
        row |= {"compute": given.compute, "peak_gb": round(peak, 2)}
        row |= {"first_step_s": round(first, 2), "step_s": round(later, 2)}
        print(json.dumps(row))
        return
    # Nothing can be moved off a CPU.
    ways = given.ways or [way for way in WAYS if torch.cuda.is_available() or "offload" not in way]
    for way in ways:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", way], check=True)


if __name__ == "__main__":
    main()
