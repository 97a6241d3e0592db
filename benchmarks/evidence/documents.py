"""Every backend of attention beside a mask that is counted out in fp64: documents, a window, and both.

Shapes: B samples, S positions, H query heads, K key and value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.train.attention import DTYPES, documents
from evidence.item import Result
from pipeline.common.errors import UserError
from pipeline.config.train import AttentionConfig
from pipeline.train.model.kernels.attention_mask import AttentionMask, Documents, Kernel, Terms
from pipeline.train.model.kernels.choice import Backend, KernelRequirements, choose_on
from pipeline.train.model.part_spec import Reach

BACKENDS: tuple[Backend, ...] = ("sdpa", "varlen", "flash", "te", "flex")
LIMIT = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest difference from fp64, relative to the largest value of the output or the gradient."""


def measure(
    device: str,
    work: Path,
    *,
    samples: int,
    length: int,
    kind: str,
    window: int,
    heads: int,
    kv_heads: int,
    head_sizes: Mapping[str, Sequence[int]],
) -> Result:
    """Outputs and gradients of all backends.

    Args:
        device: Where they run.
        work: Not used.
        samples: B.
        length: S.
        kind: Lengths of the documents, see `attention.KINDS`.
        window: Positions that a token sees, itself included.
        heads: H.
        kv_heads: K.
        head_sizes: E by number format.
    """
    place = torch.empty(0, device=device).device  # with the number of the GPU, as tensors have it
    drawn = documents(kind, samples, length, place)
    assert drawn is not None
    masks = (("documents", drawn, None), ("window", None, window), ("documents and window", drawn, window))
    rows: list[Result] = []
    missing: dict[str, str] = {}
    for compute, size in [(compute, size) for compute, sizes in head_sizes.items() for size in sizes]:
        inputs = draw(samples, length, heads, kv_heads, size, DTYPES[compute], place)
        for name, bounds, near in masks:
            sight = AttentionMask.of(samples, (0, length), Reach.window(near), place, bounds)
            expected = reference(seen(samples, length, bounds, near, place), inputs)
            for backend in BACKENDS:
                about: Result = {"backend": backend, "compute": compute, "head_size": size, "mask": name}
                try:
                    rows.append(about | one(backend, compute, sight, inputs, expected))
                except UserError as error:
                    missing[f"{backend}, {compute}"] = str(error)
    return {
        "documents": sum(map(len, drawn.by_row)),
        "limit": LIMIT,
        "rows": rows,
        "missing": missing,
        "checks": checks(rows),
    }


def one(
    backend: Backend, compute: str, sight: AttentionMask, inputs: Sequence[Tensor], expected: Mapping[str, Tensor]
) -> Result:
    """Differences of a backend, or the error with which it ended.

    Raises:
        UserError: It is not installed, or not for this device and number format.
    """
    need = KernelRequirements(sight.documents is not None, sight.reach.back is not None, inputs[0].shape[-1], compute)
    choice = choose_on(AttentionConfig(backend=backend), need, sight.device)
    kernel = choice.build(deterministic=False)
    about = {} if choice.version is None else {"version": choice.version}
    try:
        return {**about, "differences": differences(kernel, sight, inputs, expected)}
    except Exception as error:  # the other backends are compared
        return {**about, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def draw(
    samples: int, length: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output; the same each time."""
    chance = torch.Generator().manual_seed(1)
    shapes = [(samples, length, count, size) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=chance).to(device, dtype) for shape in shapes]


def seen(samples: int, length: int, bounds: Documents | None, window: int | None, device: torch.device) -> Tensor:
    """Mask of the keys that a query sees, bool [B, 1, S, S], from the number of each token's document."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    mask = (back >= 0) if window is None else (back >= 0) & (back < window)
    number = torch.zeros(samples, length, dtype=torch.int64)
    for row, starts in enumerate(bounds.by_row if bounds else ()):
        number[row, starts] = 1
    number = number.cumsum(1).to(device)
    return (mask & (number[:, :, None] == number[:, None, :]))[:, None]


def reference(mask: Tensor, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Output and gradients of q, k and v in fp64, by name."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    many = [x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v)]
    scores = torch.einsum("bqhe,bkhe->bhqk", q, many[0]) * q.shape[-1] ** -0.5
    out = torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(~mask, -torch.inf).softmax(-1), many[1])
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3].double())
    return {"output": out.detach(), **dict(zip("qkv", gradients, strict=True))}


def differences(
    kernel: Kernel, sight: AttentionMask, inputs: Sequence[Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest differences of output and gradients, each over the largest value that is expected."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    out = kernel(q, k, v, kernel.prepare(sight), Terms(q.shape[-1] ** -0.5))
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3])
    found = {"output": out.detach(), **dict(zip("qkv", gradients, strict=True))}
    return {
        name: float((found[name].double() - wanted).abs().max() / wanted.abs().max())
        for name, wanted in expected.items()
    }


def checks(rows: Sequence[Result]) -> dict[str, bool]:
    """By backend and number format, whether all differences are within the limit."""
    found = {"backends ran": bool(rows)}
    for row in rows:
        limit = LIMIT[row["compute"]]
        name = f"{row['backend']} in {row['compute']} differs by at most {limit:g}"
        # A value that is not finite is not within it either.
        within = "differences" in row and all(value <= limit for value in row["differences"].values())
        found[name] = found.get(name, True) and within
    return found
