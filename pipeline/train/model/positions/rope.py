"""Rotary position embedding (Su et al. 2021) and its scalings for longer contexts.

Dimension i of a head is paired with dimension i + dims / 2, the order of most Hugging Face checkpoints, so
that converting them needs no permutation of rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.config.layers.layer import RopeScalingConfig
from pipeline.train.model.part_spec import RopeSpec, yarn_factor


def rope_frequencies(spec: RopeSpec, device: torch.device) -> tuple[Tensor, float]:
    """Angle by position of each pair of dimensions, fp32 [dims / 2], and the factor on cos and sin.

    Computed where it is used and never stored: a buffer would not survive building on the meta device.
    """
    exponents = torch.arange(0, spec.dims, 2, dtype=torch.float32, device=device) / spec.dims
    frequencies = spec.theta**-exponents
    scaling = spec.scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.type == "linear":  # Chen et al. 2023: positions are divided by the factor
        return frequencies / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    factor = scaling.attention_factor
    if factor is None:
        factor = yarn_factor(scaling, scaling.mscale) / yarn_factor(scaling, scaling.mscale_all_dim)
    return _yarn(frequencies, spec, scaling), factor


def _llama3(frequencies: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Llama 3.1: long wavelengths are scaled, short ones kept, those between interpolated (Grattafiori et al. 2024)."""
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, spec: RopeSpec, scaling: RopeScalingConfig) -> Tensor:
    """YaRN (Peng et al. 2023): a ramp over dimensions between the two numbers of rotations, scaled beyond."""

    def dimension_with(rotations: float) -> float:
        ratio = scaling.original_max_positions / (rotations * 2 * math.pi)
        return spec.dims * math.log(ratio) / (2 * math.log(spec.theta))

    fast, slow = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, spec.dims - 1)
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_tables(spec: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for `apply_rope`, computed once a forward pass.

    Args:
        spec: Frequencies.
        positions: Integers [S], or [B, S] when they differ by row.

    Returns:
        cos [(B,) S, 1, dims] and sin [(B,) S, 1, dims / 2], fp32.
    """
    frequencies, factor = rope_frequencies(spec, positions.device)
    angles = positions.to(torch.float32)[..., None, None] * frequencies
    cos = angles.cos() * factor
    return torch.cat((cos, cos), dim=-1), angles.sin() * factor


def apply_rope(x_BSHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates every pair of dimensions of [B, S, heads, head_dim] by its position's angle, in fp32.

    The tables may be for the first dimensions of a head; the others stay.
    """
    dims = cos.shape[-1]
    if dims < x_BSHE.shape[-1]:
        turned = _Rotation.apply(x_BSHE[..., :dims], cos, sin)  # type: ignore[no-untyped-call]
        return torch.cat((turned, x_BSHE[..., dims:]), dim=-1)
    out: Tensor = _Rotation.apply(x_BSHE, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: a third less time on CPU than autograd on the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, sin, sign=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    x32 = x.float()
    out = x32 * cos
    out[..., :half].addcmul_(x32[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x32[..., :half], sin, value=sign)
    # Not `out.to(x.dtype)` alone: where that changes nothing, torch.compile in 2.11 loses the gradient of x.
    return out if out.dtype == x.dtype else out.to(x.dtype)
