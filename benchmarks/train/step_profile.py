"""Where the time of a training step on a CPU goes, by kind of operation, as the suite runs it and without its choices.

    python benchmarks/train/step_profile.py --dtype bf16
    python benchmarks/train/step_profile.py --dtype fp32 --documents 20

The model and batch of `train_cpu.py`. A process for each way, one after the other; JSON lines with the milliseconds
that operations of a kind take themselves in a step, by torch's profiler (mean of the steps), and the step's wall time
without it (median). `plain`: as torch comes, the loss in one piece. `ours`: freed memory kept, fp32 products by what
is faster and as exact. `ours, compiled`: and compiled layers, whose fused loops are a kind of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.one_process import stepper_of
from pipeline.data.loading.batch import Batch, StepData
from pipeline.train.host.cpu_allocator import keep_freed_memory
from pipeline.train.host.cpu_matmul import choose_products

BATCH, LENGTH, VOCABULARY = 4, 1024, 8192
MODEL = {"layers": 8, "dim": 384, "heads": 6, "ffn_dim": 1024}
WAYS = ("plain", "ours", "ours, compiled")

KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("scaled_dot_product", "document_attention", "flash_attention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "mkldnn", "aten::matmul"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy", "logsumexp"),
    "norms": ("rms_norm", "layer_norm", "aten::rsqrt", "aten::mean", "aten::pow"),
    "activation": ("silu", "gelu"),
    "optimizer and clipping": ("adam", "_foreach", "linalg_vector_norm"),
    "embedding": ("embedding", "aten::index"),
    "copies and casts": ("copy_", "aten::to", "aten::cat", "contiguous", "clone", "split_with_sizes", "chunk_cat"),
    "compiled loops": ("cpp_fused", "CompiledF", "inductor", "Torch-Compiled"),
    "elementwise": (
        "aten::mul",
        "aten::add",
        "aten::sub",
        "aten::neg",
        "aten::div",
        "aten::sum",
        "aten::fill_",
        "zero_",
    ),
}
"""By name of the operation, the first kind that a part of it is in."""


def kind_of(name: str) -> str:
    """Of an operation."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def profiled(way: str, dtype: str, documents: int, steps: int, threads: int) -> dict[str, float]:
    """Milliseconds of a step: wall, and by kind."""
    torch.set_num_threads(threads)
    if way != "plain":
        keep_freed_memory()
        choose_products()
    train = {
        "sequence_length": LENGTH,
        "precision": {"compute": dtype},
        "compile": way == "ours, compiled",
        "loss": {"chunk_tokens": BATCH * LENGTH} if way == "plain" else {},
    }
    model = {**MODEL, "document_attention": documents > 1}
    stepper = stepper_of(torch.device("cpu"), VOCABULARY, model=model, train=train)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    begins = torch.cat([row * LENGTH + torch.arange(documents) * LENGTH // documents for row in range(BATCH)])
    ones, sources = torch.ones(BATCH, LENGTH), torch.zeros(BATCH, dtype=torch.int64)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, begins.int(), sources, {})

    def step() -> float:
        start = time.perf_counter()
        stepper.step(StepData(0, [batch], BATCH * LENGTH), 1e-3)
        return time.perf_counter() - start

    for _ in range(3):
        step()
    wall = statistics.median(step() for _ in range(steps))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    kinds: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / steps
    return {"step": wall * 1e3, **dict(sorted(kinds.items(), key=lambda pair: -pair[1]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--documents", type=int, default=1, help="of a window, which attention stays within")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = profiled(arguments.one, arguments.dtype, arguments.documents, arguments.steps, arguments.threads)
        row = {"way": arguments.one, "dtype": arguments.dtype, "documents": arguments.documents, "unit": "ms"}
        print(json.dumps(row | {kind: round(milliseconds, 1) for kind, milliseconds in found.items()}))
        return
    for way in WAYS:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", way], check=True)


if __name__ == "__main__":
    main()
