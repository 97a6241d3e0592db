"""Training steps with a vocabulary of 131,072: peak memory and time by `train.loss.chunk_tokens`, 0 for one piece.

A process each, in turn; JSON lines with the peak over that of the process before its first step, and the median step.
On a GPU the peak is `max_memory_allocated`, else the kernel's high-water mark of resident memory.

Run it as `python benchmarks/train/loss_chunks.py --tokens 4096 --chunks 0 2048 512`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch, StepData

_VOCABULARY = 131_072
_SAMPLE = 1024


def step_costs(tokens: int, chunk: int, compute: str, steps: int) -> tuple[float, float]:
    """Peak memory in GB and seconds of a step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = {
        "sequence_length": _SAMPLE,
        "precision": {"compute": compute},
        "loss": {"chunk_tokens": chunk or None},
        "compile": False,
        "attention": {"backend": "sdpa"},
    }
    stepper = stepper_of(device, _VOCABULARY, model={"layers": 2, "dim": 256, "heads": 4}, train=train)
    rows = tokens // _SAMPLE
    ids = torch.randint(_VOCABULARY, (rows, _SAMPLE + 1))
    ones, zeros = torch.ones(rows, _SAMPLE), torch.zeros(rows, _SAMPLE, dtype=torch.int64)
    batch = Batch(ids[:, :-1], ids[:, 1:], ones, zeros, zeros[:, 0], {})
    before, times = _peak(device), []
    for _ in range(steps + 1):
        start = time.perf_counter()
        stepper.step(StepData(0, [batch], tokens), 1e-3).columns()  # waits for the device
        times.append(time.perf_counter() - start)
    return (_peak(device) - before) / 1e9, statistics.median(times[1:])


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, a multiple of 1024")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2048, 512])
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        peak, seconds = step_costs(arguments.tokens, arguments.one, arguments.compute, arguments.steps)
        row = {"chunk_tokens": arguments.one, "tokens": arguments.tokens, "vocabulary": _VOCABULARY}
        row |= {"compute": arguments.compute, "peak_gb": round(peak, 2), "step_s": round(seconds, 2)}
        print(json.dumps(row))
        return
    for chunk in arguments.chunks:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", str(chunk)], check=True)


if __name__ == "__main__":
    main()
