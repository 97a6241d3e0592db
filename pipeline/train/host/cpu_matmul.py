"""Products of matrices on a CPU: the library that multiplies fp32, and whether bf16 is worth having.

torch has two, MKL and oneDNN, and takes MKL, whose fast paths are for processors of its maker: on others oneDNN is
about twice as fast. torch hands products to it when their precision is allowed to be less. Where the processor has no
arithmetic of less precision that oneDNN would use, none is lost, and where it has, the error shows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_SHAPE = 256, 1024, 256
"""Rows, inner dimension and columns of the product that is looked at."""
_WORSE = 4.0
"""More than this many times the error is another precision: bf16 and TF32 have thousands of times as much."""

Precision = Literal["highest", "medium"]


def choose_products() -> str:
    """Let oneDNN multiply fp32 matrices from now on if it is as exact as MKL here.

    The choice follows from what the processor computes, never from how long it takes, so that equal machines choose
    alike.

    Returns:
        The choice and its reason, for the log.
    """
    exact, other = error_of("highest"), error_of("medium")
    allowed = other <= _WORSE * exact
    torch.set_float32_matmul_precision("medium" if allowed else "highest")
    found = f"error {other:.0e}, of MKL {exact:.0e}"
    return f"fp32 products by oneDNN ({found})" if allowed else f"fp32 products by MKL (oneDNN rounds here: {found})"


def slow_bf16(compute: str) -> str | None:
    """A warning where the processor multiplies bf16 far slower than fp32; None elsewhere.

    Args:
        compute: `train.precision.compute`.
    """
    # With AVX-512, and on Arm, oneDNN has kernels for bf16; with AVX2 alone torch's loops are some ten times slower.
    if compute != "bf16" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "NO AVX"):
        return None
    return (
        "train.precision.compute is bf16, which this processor has no fast products for: fp32 is many times faster "
        "here; for a new run set train.precision.compute=fp32"
    )


def error_of(precision: Precision) -> float:
    """The largest error of a product of random matrices against fp64, relative to the size of its elements.

    `torch.set_float32_matmul_precision` is as it was afterwards.
    """
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(1)
    rows, inner, columns = _SHAPE
    a, b = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
    torch.set_float32_matmul_precision(precision)
    try:
        product: Tensor = a @ b
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = a.double() @ b.double()
    return float((product - wanted).abs().max() / wanted.abs().mean())
