"""Normalization over the last dimension; statistics are fp32 whatever the type of the input."""

from __future__ import annotations

from torch import nn

from pipeline.train.model.part_spec import NormSpec


def build_norm(spec: NormSpec, dim: int) -> nn.Module:
    """LayerNorm with weight and bias (Ba et al. 2016), or RMSNorm with a weight (Zhang and Sennrich 2019)."""
    return nn.LayerNorm(dim, spec.eps) if spec.kind == "layernorm" else nn.RMSNorm(dim, spec.eps)
