"""Attention forward and backward by backend, for documents of several lengths: one JSON line a result.

    python benchmarks/attention.py [--length 2048] [--samples 2] [--heads 8] [--kv-heads 4] [--head-size 64]
        [--dtype fp32] [--repeats 5]

On a CPU a mask of sequence x sequence against the tiles that `sdpa` is there; on a GPU every backend that is installed.
They take turns, so that what else the machine does reaches all of them. Times are the processor's on a CPU (seconds of
all threads, so that other programs do not count), and the device's on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.train import AttentionConfig
from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Kernel
from pipeline.train.model.kernels.choice import KernelRequirements, choose_on
from pipeline.train.model.kernels.sdpa import Sdpa

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WINDOW = 256
KINDS: dict[str, int | None] = {
    "causal": None,
    "window": None,
    "tens": 10,
    "fifties": 50,
    "mean 200": 200,
    "mean 800": 800,
}
"""Documents: none, none and a window, of equal length, or of lengths that are distributed exponentially."""


def documents(kind: str, samples: int, length: int, device: torch.device) -> Documents | None:
    """Of a batch; the same each time."""
    size = KINDS[kind]
    if size is None:
        return None
    draw = torch.Generator().manual_seed(0)
    starts = []
    for row in range(samples):
        at = 0
        while at < length:
            starts.append(row * length + at)
            at += size if "mean" not in kind else 1 + int(torch.empty(1).exponential_(1 / size, generator=draw))
    flat = torch.tensor(starts)
    sizes = torch.diff(flat, append=torch.tensor([samples * length]))
    bounds = torch.repeat_interleave(flat % length, sizes).view(samples, length)
    return Documents(bounds.to(device), flat)


def seconds(kernel: Kernel, sight: AttentionMask, qkv: list[Tensor], scale: float) -> float:
    """Of one forward pass and its backward pass, with what is prepared once for all layers."""
    clock: Callable[[], float] = time.process_time
    if sight.device.type == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    begin = clock()
    out = kernel(qkv[0], qkv[1], qkv[2], kernel.prepare(sight), scale)
    out.backward(torch.ones_like(out))
    if sight.device.type == "cuda":
        torch.cuda.synchronize()
    for x in qkv:
        x.grad = None
    return clock() - begin


def kernels(need: KernelRequirements, device: torch.device) -> Iterator[tuple[str, Kernel]]:
    """A mask, and all that there is besides."""
    yield "mask", Sdpa(on_gpu=True)
    for backend in ("sdpa",) if device.type == "cpu" else ("flex", "varlen", "flash", "te"):
        try:
            choice = choose_on(AttentionConfig.model_validate({"backend": backend}), need, device)
            kernel = choice.build(deterministic=False)
        except UserError:
            continue
        yield backend if choice.version is None else f"{backend} {choice.version}", kernel


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser()
    for name, default in (("length", 2048), ("samples", 2), ("heads", 8), ("kv-heads", 4), ("head-size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    ask: Any = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (ask.samples, ask.length)
    qkv = [
        torch.randn(*shape, heads, ask.head_size, device=device, dtype=DTYPES[ask.dtype], requires_grad=True)
        for heads in (ask.heads, ask.kv_heads, ask.kv_heads)
    ]
    for kind in ask.kinds:
        window = WINDOW if kind == "window" else None
        sight = AttentionMask.of(ask.samples, (0, ask.length), window, device, documents(kind, *shape, device))
        need = KernelRequirements(sight.documents is not None, window is not None, ask.head_size, ask.dtype)
        found: dict[str, list[float]] = {name: [] for name, _ in kernels(need, device)}
        for number in range(ask.repeats + 1):
            for name, kernel in kernels(need, device):
                took = seconds(kernel, sight, qkv, ask.head_size**-0.5)
                found[name] += [took] * (number > 0)  # the first is to warm up
        for name, times in found.items():
            ratio = statistics.median(found["mask"]) / statistics.median(times)
            row = {"kind": kind, "backend": name, "ms": round(1e3 * statistics.median(times), 1)}
            row |= {"of_mask": round(ratio, 2), "length": ask.length, "samples": ask.samples, "dtype": ask.dtype}
            print(json.dumps(row | {"device": device.type, "threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
    main()
