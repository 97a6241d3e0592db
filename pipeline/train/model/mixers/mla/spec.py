"""Multi-head latent attention as data: everything that is asked about it without building it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.parameter_spec import HeadNorm, Matrix, NormSpec, Vector
from pipeline.train.model.part_spec import (
    CpTransfer,
    Division,
    KernelUse,
    MixerSpec,
    Reach,
    RopeSpec,
    default_scale,
    softmax_factor,
)
from pipeline.train.model.tensor_names import RowNumbers, RowOrder, TensorNames, by_group, rope_pairs


def _query_rows(part: MlaSpec) -> RowNumbers:
    if part.rope is None:
        return np.arange(part.heads * part.head_dim)
    return rope_pairs(part.heads, part.head_dim, first=part.nope_dim)


def _latent_rows(part: MlaSpec) -> RowNumbers:
    rotary = np.arange(part.rope_dim) if part.rope is None else rope_pairs(1, part.rope_dim)
    return np.concatenate((np.arange(part.kv_rank), part.kv_rank + rotary))


_QUERIES = RowOrder("with rotary pairs together", _query_rows)
_LATENT = RowOrder("the rotary pairs of the key together", _latent_rows)
_KEYS_VALUES = RowOrder("head by head", lambda part: by_group(part.heads, part.nope_dim, part.value_dim))


@dataclass(frozen=True)
class MlaSpec(MixerSpec):
    """Multi-head latent attention."""

    dim: int
    heads: int
    kv_rank: int
    q_rank: int | None
    """None: queries come from the stream by one matrix."""
    nope_dim: int
    """Dimensions of a key that each head makes of the latent."""
    rope_dim: int
    """Dimensions of a key that all heads share, and that the rotary embedding turns; they come after the others."""
    value_dim: int
    norm: NormSpec
    """Of the latents."""
    reach: Reach
    scale: float
    rope: RopeSpec | None = None
    soft_cap: float | None = None
    sinks: bool = False

    label: ClassVar = "latent attention"
    module: ClassVar = "pipeline.train.model.mixers.mla.module.LatentAttention"
    huggingface: ClassVar = {
        "llama": (
            TensorNames("self_attn.q_proj", ("wq",), _QUERIES),
            ("self_attn.q_a_proj", ("wqa",)),
            ("self_attn.q_a_layernorm.weight", ("q_norm.weight",)),
            TensorNames("self_attn.q_b_proj", ("wqb",), _QUERIES),
            TensorNames("self_attn.kv_a_proj_with_mqa", ("wkva", "wkr"), _LATENT),
            ("self_attn.kv_a_layernorm.weight", ("kv_norm.weight",)),
            TensorNames("self_attn.kv_b_proj", ("wkb", "wvb"), _KEYS_VALUES),
            ("self_attn.o_proj", ("wo",)),
        )
    }

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> MlaSpec:
        """Spec of the layers with these keys."""
        mla = layer.mla
        assert mla is not None
        rope = RopeSpec(mla.rope_dim, layer.rope_theta, layer.rope_scaling) if layer.positions == "rope" else None
        scale = default_scale(mla.nope_dim + mla.rope_dim, mup=model.init.mup_base_dim is not None)
        return cls(
            dim=model.dim,
            heads=layer.query_heads,
            kv_rank=mla.kv_rank,
            q_rank=mla.q_rank,
            nope_dim=mla.nope_dim,
            rope_dim=mla.rope_dim,
            value_dim=mla.value_dim,
            norm=NormSpec("rmsnorm", mla.norm_eps or model.norm_eps, offset=model.norm_offset),
            reach=Reach.window(layer.sliding_window, both=model.direction == "both"),
            scale=(layer.attention_scale or scale) * softmax_factor(rope.scaling if rope else None),
            rope=rope,
            soft_cap=layer.attention_soft_cap,
            sinks=layer.sinks,
        )

    @property
    def head_dim(self) -> int:
        """Size of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        queries = self.heads * self.head_dim
        if self.q_rank is None:
            of_queries: tuple[Matrix, ...] = (Matrix("wq", queries, self.dim, "rows"),)
        else:
            of_queries = (
                Matrix("wqa", self.q_rank, self.dim, "whole"),
                Matrix("wqb", queries, self.q_rank, "rows", of_whole=True, input_key="mla.q_rank"),
            )
        return (
            *of_queries,
            Matrix("wkva", self.kv_rank, self.dim, "whole"),
            Matrix("wkr", self.rope_dim, self.dim, "whole"),
            *(
                Matrix(name, self.heads * size, self.kv_rank, "rows", of_whole=True, input_key="mla.kv_rank")
                for name, size in (("wkb", self.nope_dim), ("wvb", self.value_dim))
            ),
            Matrix("wo", self.dim, self.heads * self.value_dim, "columns", to_residual=True),
        )

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """See `LayerPartSpec`."""
        return (Vector("sinks", (self.heads,)),) if self.sinks else ()

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """See `LayerPartSpec`."""
        of_queries = () if self.q_rank is None else (HeadNorm("q_norm", self.norm, self.q_rank),)
        return (*of_queries, HeadNorm("kv_norm", self.norm, self.kv_rank))

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        return (Division("heads", self.heads),)

    @property
    def kernel(self) -> KernelUse:
        """See `MixerSpec`."""
        return KernelUse(self.reach, self.head_dim, self.value_dim, self.soft_cap, self.sinks, size_key="model.mla")

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """Scores and their sum over values, of keys and values that are made of the latent."""
        keys = self.reach.mean_keys(sequence_length, causal=causal)
        return 2.0 * self.heads * (self.head_dim + self.value_dim) * keys

    def elementwise_numbers(self, tp: int) -> float:
        """Norms and rotary keys, which are whole on each rank; queries and keys, made of two parts."""
        return 2 * (self._latents + self.rope_dim) + 4 * self.heads * self.head_dim / tp

    def kept_numbers(self, tp: int) -> float:
        """Latents before and after their norms; queries, keys, values and the result of attention."""
        return 2 * self._latents + 2 * self.heads * (self.head_dim + self.value_dim) / tp

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """Results of attention, and of all products but the last."""
        attention = self.heads * self.value_dim / tp if "attention" in keep else 0.0
        of_heads = self.heads * (self.head_dim + self.nope_dim + self.value_dim) / tp
        return attention + (self._latents + self.rope_dim + of_heads if "matmul" in keep else 0.0)

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        heads = self.heads * (8 * (self.head_dim + self.value_dim) + 2 * sequence_length)
        return 40 * self.dim + 8 * (self._latents + self.rope_dim) + heads

    def cp_transfer(self, method: str, tp: int, cp: int) -> CpTransfer:
        """See `MixerSpec`."""
        if method != "ulysses":  # collected is what all ranks have together; keys and values are made of it then
            made = 2.0 * self.heads * (self.nope_dim + self.value_dim) * self.kv_rank
            return CpTransfer("latents and rotary keys", 1, cp * (self.kv_rank + self.rope_dim), (cp - 1) * made)
        numbers = 2 * (self.heads // tp) * (self.head_dim + self.value_dim)
        return CpTransfer("queries, keys, values, outputs", 2, numbers)

    @property
    def _latents(self) -> int:
        """Numbers of a token that are normalized."""
        return self.kv_rank + (self.q_rank or 0)
