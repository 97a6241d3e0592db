"""Recurrent kernels on one device: fla-core beside PyTorch alone, and attention of the same width beside both.

Times are medians by CUDA events on a GPU, of functions that are called in turn, see `rates`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evidence.item import Result, goal
from evidence.rates import timed
from pipeline.common.errors import UserError
from pipeline.train.model.kernels.recurrence.base import PLAIN, RecurrentKernels
from pipeline.train.model.kernels.recurrence.chunks import Chunks

_CLOSE = 2e-2
"""Of a difference in bf16, over the largest value."""


def measure(
    device: str,
    work: Path,
    *,
    kinds: Sequence[str],
    lengths: Sequence[int],
    heads: int,
    head_dim: int,
    state_dim: int,
    beside_from: int,
    seconds: float,
) -> Result:
    """Measure recurrences forward and backward; `rows` of the result has one of each kind and length.

    Args:
        device: "cuda" or "cpu".
        work: Not used.
        kinds: Of `_INPUTS`.
        lengths: Positions of a sequence.
        heads: Of the recurrence and of attention.
        head_dim: Size of them.
        state_dim: Size of keys, and of B and C.
        beside_from: From this length on fla-core should be faster than attention.
        seconds: About how long functions that are called in turn are timed.
    """
    torch.manual_seed(0)
    packages = {"plain": PLAIN}
    found: Result = {"rows": {}, "goals": {}, "checks": {}}
    try:
        from pipeline.train.model.kernels.recurrence.fla import load

        packages["fla"] = load()
    except UserError as error:
        found["without_fla"] = str(error)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for kind, length in product(kinds, lengths):
        row, inputs = f"{kind} {length}", _INPUTS[kind](length, heads, head_dim, state_dim, device, dtype)
        sides = {name: _both_passes(_rule(each, kind, length), inputs) for name, each in packages.items()}
        qkv = [torch.randn(1, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]
        sides["attention"] = _both_passes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv)
        if "fla" in packages:
            found["checks"][f"{row}: fla computes the same"] = _same(sides["fla"](), sides["plain"]())
        times = {name: statistics.median(values) for name, values in timed(device, sides, seconds).items()}
        found["rows"][row] = {f"{name}_ms": round(1e3 * value, 3) for name, value in times.items()}
        if "fla" in packages and length >= beside_from:
            name = f"{row}: attention's time over that of fla"
            found["goals"][name] = goal(times["attention"] / times["fla"], 1.0)
    return found


def _rule(kernels: RecurrentKernels, kind: str, length: int) -> Callable[..., Tensor]:
    function, chunks = kernels.ssd if kind == "ssd" else kernels.delta_rule, Chunks.of(length)
    return lambda *inputs: function(*inputs, chunks)[0]


def _ssd_inputs(
    length: int, heads: int, head_dim: int, state_dim: int, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """x, dt, a, B and C."""
    x, b, c = (
        torch.randn(1, length, *shape, device=device, dtype=dtype)
        for shape in ((heads, head_dim), (1, state_dim), (1, state_dim))
    )
    dt = F.softplus(torch.randn(1, length, heads, device=device) - 2)
    return [x, dt, -4 * torch.rand(heads, device=device) - 0.5, b, c]


def _delta_inputs(
    length: int,
    heads: int,
    head_dim: int,
    state_dim: int,
    device: str,
    dtype: torch.dtype,
    *,
    by_channel: bool,
) -> list[Tensor]:
    """q, k, v, g and beta."""
    q, k, v = (
        torch.randn(1, length, heads, size, device=device, dtype=dtype) for size in (state_dim, state_dim, head_dim)
    )
    g = F.logsigmoid(torch.randn(1, length, heads, *(state_dim,) * by_channel, device=device) + 3)
    beta = torch.rand(1, length, heads, device=device, dtype=dtype)
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta]


_INPUTS: dict[str, Callable[..., list[Tensor]]] = {
    "ssd": _ssd_inputs,
    "gated_delta": partial(_delta_inputs, by_channel=False),
    "kda": partial(_delta_inputs, by_channel=True),
}
"""By kind of recurrence its inputs, given length, heads, their size, that of keys, device and type."""


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
