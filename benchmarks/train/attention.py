"""Attention forward and backward by backend, for documents of several lengths: one JSON line a result.

    python benchmarks/train/attention.py [--length 2048] [--samples 2] [--heads 8] [--kv-heads 4] [--head-size 64]
        [--dtype fp32] [--repeats 5] [--kinds causal window] [--terms plain sinks cap]

Terms are those of the softmax: sinks, soft caps, keys to both sides, and values of half the size; `times_plain` is the
time with them over that without them. On a CPU a mask of sequence x sequence against the tiles that `sdpa` is there; on
a GPU every backend that is installed. They take turns, so that what else the machine does reaches all of them. Times
are the processor's on a CPU (seconds of all threads, so that other programs do not count), and the device's on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.train import AttentionConfig
from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Kernel, Terms
from pipeline.train.model.kernels.choice import KernelRequirements, choose_on
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.part_spec import Reach

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
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "cap": {"soft_cap": True},
    "both sides": {"both": True},
    "half values": {},
}
"""By name, what a kernel has to have for them."""


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


def seconds(kernel: Kernel, mask: AttentionMask, inputs: list[Tensor], terms: Terms) -> float:
    """Of one forward pass and its backward pass, with what is prepared once for all layers."""
    clock: Callable[[], float] = time.process_time
    if mask.device.type == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    begin = clock()
    out = kernel(inputs[0], inputs[1], inputs[2], kernel.prepare(mask), terms, *inputs[3:])
    out.backward(torch.ones_like(out))
    if mask.device.type == "cuda":
        torch.cuda.synchronize()
    for x in inputs:
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
    parser.add_argument("--terms", nargs="+", choices=TERMS, default=["plain"])
    ask: Any = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kind in ask.kinds:
        for row in rows(kind, ask, device):
            row |= {"length": ask.length, "samples": ask.samples, "dtype": ask.dtype}
            print(json.dumps(row | {"device": device.type, "threads": torch.get_num_threads()}), flush=True)


def rows(kind: str, ask: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Median times of all backends with all terms, which take turns."""
    shape, window = (ask.samples, ask.length), WINDOW if kind == "window" else None
    size = ask.head_size
    runs: list[tuple[str, str, Kernel, AttentionMask, list[Tensor], Terms]] = []
    for name in ask.terms:
        reach = Reach.window(window)
        if name == "both sides":
            reach = replace(reach, ahead=reach.back)
        mask = AttentionMask.of(ask.samples, (0, ask.length), reach, device, documents(kind, *shape, device))
        need = KernelRequirements(mask.documents is not None, window is not None, size, ask.dtype, **TERMS[name])
        sizes = ((ask.heads, size), (ask.kv_heads, size), (ask.kv_heads, size // 2 if name == "half values" else size))
        dims = [(*shape, *each) for each in sizes] + [(ask.heads,)] * (name == "sinks")
        inputs = [torch.randn(each, device=device, dtype=DTYPES[ask.dtype], requires_grad=True) for each in dims]
        terms = Terms(size**-0.5, 50.0 if name == "cap" else None)
        runs += [(name, backend, kernel, mask, inputs, terms) for backend, kernel in kernels(need, device)]
    found: dict[tuple[str, str], list[float]] = {(name, backend): [] for name, backend, *_ in runs}
    for number in range(ask.repeats + 1):
        for name, backend, *run in runs:
            took = seconds(*run)
            found[name, backend] += [took] * (number > 0)  # the first is to warm up
    for (name, backend), times in found.items():
        took = statistics.median(times)
        row = {"kind": kind, "terms": name, "backend": backend, "ms": round(1e3 * took, 1)}
        row["of_mask"] = round(statistics.median(found[name, "mask"]) / took, 2)
        if ("plain", backend) in found:
            row["times_plain"] = round(took / statistics.median(found["plain", backend]), 2)
        yield row


if __name__ == "__main__":
    main()
