"""Gated delta rules as data: everything that is asked about them without building them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.mixers.recurrent_spec import CHUNK, STEPS, RecurrentSpec, conv_vectors
from pipeline.train.model.parameter_spec import HeadNorm, Matrix, NormSpec, Uniform, Vector
from pipeline.train.model.part_spec import Division
from pipeline.train.model.tensor_names import RowNumbers, RowOrder, TensorNames, by_group

CONVOLUTIONS = ("conv_q.weight", "conv_k.weight", "conv_v.weight")
"""Parameters of the convolutions."""


def _projected_rows(part: DeltaSpec) -> RowNumbers:
    shared = part.value_heads // part.key_heads * part.value_dim
    return by_group(part.key_heads, part.key_dim, part.key_dim, shared, shared)


def _rate_rows(part: DeltaSpec) -> RowNumbers:
    shared = part.value_heads // part.key_heads
    return by_group(part.key_heads, shared, shared)


_PROJECTED = RowOrder("key head by key head", _projected_rows)
_RATES = RowOrder("key head by key head", _rate_rows)


@dataclass(frozen=True)
class DeltaSpec(RecurrentSpec):
    """Gated delta rule: the state of a head decays at one rate."""

    dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    beta_max: float
    norm: NormSpec
    """Of the result of each head."""

    label: ClassVar = "the gated delta rule"
    section: ClassVar = "delta"
    module: ClassVar = "pipeline.train.model.mixers.delta.module.GatedDelta"
    huggingface: ClassVar = {
        "llama": (
            TensorNames("linear_attn.in_proj_qkvz", ("wq", "wk", "wv", "wz"), _PROJECTED),
            TensorNames("linear_attn.in_proj_ba", ("wb", "wa"), _RATES),
            TensorNames("linear_attn.conv1d.weight", CONVOLUTIONS, unit_dims=(1,)),
            ("linear_attn.A_log", ("decay.a_log",)),
            ("linear_attn.dt_bias", ("decay.dt_bias",)),
            ("linear_attn.norm.weight", ("norm.weight",)),
            ("linear_attn.out_proj", ("wo",)),
        )
    }

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> DeltaSpec:
        """Spec of the layers with these keys."""
        return cls(**_sizes(model, layer))

    @property
    def keys_dim(self) -> int:
        """Size of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values_dim(self) -> int:
        """Size of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Rates of decay of a position."""
        return self.value_heads

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        return (
            *self._of_rule,
            Matrix("wa", self.value_heads, self.dim, "rows", feeds_rate=True),
            Matrix("wz", self.values_dim, self.dim, "rows"),
            self._last,
        )

    @property
    def _of_rule(self) -> tuple[Matrix, ...]:
        return (
            Matrix("wq", self.keys_dim, self.dim, "rows"),
            Matrix("wk", self.keys_dim, self.dim, "rows"),
            Matrix("wv", self.values_dim, self.dim, "rows"),
            Matrix("wb", self.value_heads, self.dim, "rows", feeds_rate=True),
        )

    @property
    def _last(self) -> Matrix:
        return Matrix("wo", self.dim, self.values_dim, "columns", to_residual=True)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """See `LayerPartSpec`."""
        return (
            *conv_vectors("conv_q", self.keys_dim, self.conv_size),
            *conv_vectors("conv_k", self.keys_dim, self.conv_size),
            *conv_vectors("conv_v", self.values_dim, self.conv_size),
            Vector("decay.a_log", (self.value_heads,), Uniform(1.0, 16.0, "log")),
            Vector("decay.dt_bias", (self.decays,), STEPS),
        )

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """See `LayerPartSpec`."""
        return (HeadNorm("norm", self.norm, self.value_dim),)

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        # Value heads stay with their key heads.
        return (Division("delta.key_heads", self.key_heads),)

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """The state is read by keys, written, and read by queries; products within a chunk.

        Those are keys with keys and queries with keys, which heads of values share; a triangular system for values and
        keys, which costs as much as a product with its factor; and scores with values.
        """
        state = 6.0 * self.value_heads * self.key_dim * self.value_dim
        products = 2 * self.keys_dim + self.value_heads * (self.key_dim + 2 * self.value_dim)
        return state + 2.0 * self.chunk_keys(causal=causal) * products

    def elementwise_numbers(self, tp: int) -> float:
        """Convolutions and norms of queries and keys; decays; the gate."""
        return (2 * (4 * self.keys_dim + self.values_dim) + 3 * self.values_dim + 3 * self.decays) / tp

    def kept_numbers(self, tp: int) -> float:
        """Inputs and results of convolutions and norms; decays; the result of the rule, its norm, gate, and product."""
        return (2 * (3 * self.keys_dim + self.values_dim) + 4 * self.values_dim + 2 * self.decays) / tp

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """Results of all products but the last."""
        if "matmul" not in keep:
            return 0.0
        return sum(matrix.on_rank(tp)[0] for matrix in self.matrices[:-1])

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        states = self.value_heads * self.key_dim * self.value_dim // CHUNK
        of_heads = self.value_heads * (24 * (self.key_dim + self.value_dim) + 8 * CHUNK)
        return 40 * self.dim + of_heads + 8 * states

    def conv_channels(self, tp: int) -> int:
        """See `RecurrentSpec`."""
        return (2 * self.keys_dim + self.values_dim) // tp

    def piece_numbers(self, tp: int) -> int:
        """See `RecurrentSpec`: the state of each head and the matrix that an entering one is multiplied with."""
        return self.value_heads // tp * self.key_dim * (self.key_dim + self.value_dim)

    @property
    def entering_flops(self) -> float:
        """See `RecurrentSpec`: the rule once more, for values and for the identity beside them."""
        return replace(self, value_dim=self.key_dim + self.value_dim).extra_flops(CHUNK, causal=False)


def _sizes(model: ModelConfig, layer: LayerConfig) -> dict[str, Any]:
    """Fields that both kinds have."""
    sizes = layer.delta
    assert sizes is not None
    return {
        "dim": model.dim,
        "key_heads": sizes.key_heads,
        "value_heads": sizes.value_heads or sizes.key_heads,
        "key_dim": sizes.key_dim,
        "value_dim": sizes.value_dim,
        "conv_size": sizes.conv_size,
        "beta_max": float(sizes.beta_max),
        "norm": NormSpec("rmsnorm", sizes.norm_eps or model.norm_eps),
    }


@dataclass(frozen=True)
class KdaSpec(DeltaSpec):
    """Kimi delta attention: each dimension of a key head decays at a rate of its own."""

    rank: int
    """Size between the two matrices of the decay, and of the gate."""

    label: ClassVar = "Kimi delta attention"
    huggingface: ClassVar = {
        "llama": (
            ("self_attn.q_proj", ("wq",)),
            ("self_attn.k_proj", ("wk",)),
            ("self_attn.v_proj", ("wv",)),
            *(
                TensorNames(f"self_attn.{kind}_conv1d.weight", (f"conv_{kind}.weight",), unit_dims=(1,))
                for kind in ("q", "k", "v")
            ),
            ("self_attn.b_proj", ("wb",)),
            ("self_attn.f_a_proj", ("waa",)),
            ("self_attn.f_b_proj", ("wab",)),
            TensorNames("self_attn.A_log", ("decay.a_log",), unit_dims=(0, 1, 3)),
            ("self_attn.dt_bias", ("decay.dt_bias",)),
            ("self_attn.g_a_proj", ("wza",)),
            ("self_attn.g_b_proj", ("wzb",)),
            ("self_attn.o_norm.weight", ("norm.weight",)),
            ("self_attn.o_proj", ("wo",)),
        )
    }

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> KdaSpec:
        """Spec of the layers with these keys."""
        assert layer.delta is not None
        return cls(**_sizes(model, layer), rank=layer.delta.rank or layer.delta.value_dim)

    @property
    def decays(self) -> int:
        """Rates of decay of a position."""
        return self.keys_dim

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        return (
            *self._of_rule,
            Matrix("waa", self.rank, self.dim, "whole", feeds_rate=True),
            Matrix("wab", self.decays, self.rank, "rows", of_whole=True, feeds_rate=True),
            Matrix("wza", self.rank, self.dim, "whole"),
            Matrix("wzb", self.values_dim, self.rank, "rows", of_whole=True),
            self._last,
        )
