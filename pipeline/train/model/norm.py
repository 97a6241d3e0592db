"""Normalization over the last dimension; statistics are fp32 whatever the type of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.parameter_spec import NormSpec


def build_norm(spec: NormSpec, dim: int) -> nn.Module:
    """LayerNorm (Ba et al. 2016), or RMSNorm with a weight (Zhang and Sennrich 2019), with an offset or without."""
    if spec.kind == "layernorm":
        assert spec.offset == 0, "a layernorm with an offset"
        return nn.LayerNorm(dim, spec.eps, bias=spec.bias)
    return nn.RMSNorm(dim, spec.eps) if spec.offset == 0 else OffsetRMSNorm(spec, dim)


class GroupedRMSNorm(nn.RMSNorm):
    """RMSNorm of equal groups of neighbours, each by itself."""

    def __init__(self, spec: NormSpec, dim: int, groups: int) -> None:
        super().__init__(dim, spec.eps)
        self.offset = spec.offset
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return grouped_rms_norm(x, self.weight, self.offset, self.eps or 0.0, self.groups)


def grouped_rms_norm(x: Tensor, weight_D: Tensor, offset: float, eps: float, groups: int) -> Tensor:
    """[..., D] -> [..., D], computed in fp32."""
    grouped = torch.unflatten(x.float(), -1, (groups, -1))
    normalized = F.rms_norm(grouped, grouped.shape[-1:], None, eps).flatten(-2)
    return (normalized * (weight_D.float() + offset)).to(x.dtype)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight counts from an offset: x / rms(x) * (offset + weight), the factor in fp32 (Gemma)."""

    def __init__(self, spec: NormSpec, dim: int) -> None:
        super().__init__(dim, spec.eps)
        self.offset = spec.offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        # In fp32: near an offset of 1 a weight in bf16 has three digits.
        out = F.rms_norm(x.float(), self.normalized_shape, self.weight.float() + self.offset, self.eps)
        return out.to(x.dtype)
