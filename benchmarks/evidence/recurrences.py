"""Recurrent kernels on one device: fla-core beside PyTorch alone, and attention of the same width beside both.

Times are medians by CUDA events on a GPU, of functions that are called in turn, see `rates`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evidence.item import Result, goal
from evidence.rates import timed
from pipeline.common.errors import UserError
from pipeline.train.model.kernels.chunks import Chunks
from pipeline.train.model.kernels.recurrent import PLAIN

_CLOSE = 2e-2
"""Of a difference in bf16, over the largest value."""


def measure(
    device: str,
    work: Path,
    *,
    lengths: Sequence[int],
    heads: int,
    head_dim: int,
    state_dim: int,
    beside_from: int,
    seconds: float,
) -> Result:
    """Measure Mamba-2's scan forward and backward; `lengths` of the result has a row of each.

    Args:
        device: "cuda" or "cpu".
        work: Not used.
        lengths: Positions of a sequence.
        heads: Of the scan and of attention.
        head_dim: Size of them.
        state_dim: Size of B and C.
        beside_from: From this length on fla-core should be faster than attention.
        seconds: About how long functions that are called in turn are timed.
    """
    torch.manual_seed(0)
    kernels = {"plain": PLAIN.ssd}
    found: Result = {"lengths": {}, "goals": {}, "checks": {}}
    try:
        from pipeline.train.model.kernels.fla import load

        kernels["fla"] = load().ssd
    except UserError as error:
        found["without_fla"] = str(error)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for length in lengths:
        inputs = _inputs(length, heads, head_dim, state_dim, device, dtype)
        sides = {name: _both_passes(_scan(ssd, Chunks.of(length)), inputs) for name, ssd in kernels.items()}
        qkv = [torch.randn(1, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]
        sides["attention"] = _both_passes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv)
        if "fla" in kernels:
            found["checks"][f"{length}: fla computes the same"] = _same(sides["fla"](), sides["plain"]())
        times = {name: statistics.median(values) for name, values in timed(device, sides, seconds).items()}
        found["lengths"][str(length)] = {f"{name}_ms": round(1e3 * value, 3) for name, value in times.items()}
        if "fla" in kernels and length >= beside_from:
            name = f"{length}: attention's time over that of fla's scan"
            found["goals"][name] = goal(times["attention"] / times["fla"], 1.0)
    return found


def _scan(ssd: Callable[..., tuple[Tensor, Tensor]], chunks: Chunks) -> Callable[..., Tensor]:
    return lambda *inputs: ssd(*inputs, chunks)[0]


def _inputs(length: int, heads: int, head_dim: int, state_dim: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, dt, a, B and C."""
    x, b, c = (
        torch.randn(1, length, *shape, device=device, dtype=dtype)
        for shape in ((heads, head_dim), (1, state_dim), (1, state_dim))
    )
    dt = F.softplus(torch.randn(1, length, heads, device=device) - 2)
    return [x, dt, -4 * torch.rand(heads, device=device) - 0.5, b, c]


def _both_passes(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.ones_like(function(*inputs))

    def call() -> tuple[Tensor, ...]:
        out = function(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, gradient)

    return call


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(bool((a.float() - b.float()).abs().max() <= _CLOSE * b.float().abs().max()) for a, b in pairs)
