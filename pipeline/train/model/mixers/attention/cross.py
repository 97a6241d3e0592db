"""Attention of a decoder's layer to the encoder's positions: see `CrossAttention`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.parameter_spec import Matrix
from pipeline.train.model.part_spec import Reach


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Queries of the decoder, keys and values of the encoder, without positions."""

    label: ClassVar = "cross attention"
    module: ClassVar = "pipeline.train.model.mixers.attention.cross_module.CrossAttention"
    huggingface: ClassVar = {}

    @classmethod
    def beside(cls, own: AttentionSpec) -> CrossAttentionSpec:
        """Spec of a layer beside its attention to itself."""
        return cls(
            dim=own.dim,
            heads=own.heads,
            kv_heads=own.kv_heads,
            head_dim=own.head_dim,
            qkv_bias=own.qkv_bias,
            output_bias=own.output_bias,
            qk_norm=own.qk_norm,
            reach=Reach(None, None),
            scale=own.scale,
            wide_qk_norm=own.wide_qk_norm,
            soft_cap=own.soft_cap,
            sinks=own.sinks,
            gate=own.gate,
        )

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        return tuple(replace(each, of_encoder=each.name in ("wk", "wv")) for each in super().matrices)
