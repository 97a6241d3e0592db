"""Mamba-2 as data: everything that is asked about it without building it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.mixers.recurrent_spec import CHUNK, STEPS, RecurrentSpec, conv_vectors
from pipeline.train.model.parameter_spec import HeadNorm, Matrix, Normal, NormSpec, Uniform, Vector
from pipeline.train.model.part_spec import Division
from pipeline.train.model.tensor_names import PartTable, TensorNames


def _names(module: str) -> PartTable:
    """Hugging Face's names, given that of the mixer: five products are one there, and three convolutions."""
    return (
        (f"{module}.in_proj.weight", tuple(f"{name}.weight" for name in ("wz", "wx", "wb", "wc", "wdt"))),
        TensorNames(f"{module}.conv1d", ("conv_x", "conv_b", "conv_c"), unit_dims=(1,)),
        (f"{module}.A_log", ("decay.a_log",)),
        (f"{module}.dt_bias", ("decay.dt_bias",)),
        (f"{module}.D", ("decay.d",)),
        (f"{module}.norm.weight", ("norm.weight",)),
        (f"{module}.out_proj.weight", ("wo.weight",)),
    )


@dataclass(frozen=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2."""

    dim: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_size: int
    conv_bias: bool
    dt_min: float
    dt_max: float | None
    norm: NormSpec
    """Of the result."""
    norm_groups: int

    label: ClassVar = "Mamba-2"
    section: ClassVar = "mamba2"
    module: ClassVar = "pipeline.train.model.mixers.mamba2.module.Mamba2"
    huggingface: ClassVar = {"mamba2": _names("mixer"), "llama": _names("mamba")}

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> Mamba2Spec:
        """Spec of the layers with these keys."""
        sizes = layer.mamba2
        assert sizes is not None
        return cls(
            dim=model.dim,
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            state_dim=sizes.state_dim,
            groups=sizes.groups,
            conv_size=sizes.conv_size,
            conv_bias=sizes.conv_bias,
            dt_min=sizes.dt_min,
            dt_max=sizes.dt_max,
            norm=NormSpec("rmsnorm", model.norm_eps),
            norm_groups=sizes.norm_groups or sizes.groups,
        )

    @property
    def inner_dim(self) -> int:
        """Size of all heads."""
        return self.heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Size of B, and of C, of all groups."""
        return self.groups * self.state_dim

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        inner, of_groups = self.inner_dim, self.group_dim
        return (
            Matrix("wz", inner, self.dim, "rows"),
            Matrix("wx", inner, self.dim, "rows"),
            *(Matrix(name, of_groups, self.dim, "rows", heads=self.groups, muon=False) for name in ("wb", "wc")),
            Matrix("wdt", self.heads, self.dim, "rows", feeds_rate=True),
            Matrix("wo", self.dim, inner, "columns", to_residual=True),
        )

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """See `LayerPartSpec`."""
        taps, bias = self.conv_size, self.conv_bias
        return (
            *conv_vectors("conv_x", self.inner_dim, taps, bias=bias),
            *conv_vectors("conv_b", self.group_dim, taps, bias=bias, heads=self.groups),
            *conv_vectors("conv_c", self.group_dim, taps, bias=bias, heads=self.groups),
            Vector("decay.a_log", (self.heads,), Uniform(1.0, 16.0, "log")),
            Vector("decay.dt_bias", (self.heads,), STEPS),
            Vector("decay.d", (self.heads,), Normal(1.0)),
        )

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """See `LayerPartSpec`."""
        return (HeadNorm("norm", self.norm, self.head_dim, self.heads, self.norm_groups),)

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        heads = self.heads
        return (
            Division("mamba2.heads", heads),
            Division("mamba2.groups", self.groups, heads),
            Division("mamba2.norm_groups", self.norm_groups, heads),
        )

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """The state is written and read; within a chunk B and C give scores, which inputs are summed by."""
        state = 4.0 * self.inner_dim * self.state_dim
        return state + 2.0 * self.chunk_keys(causal=causal) * (self.group_dim + self.inner_dim)

    def elementwise_numbers(self, tp: int) -> float:
        """Convolutions; steps and decays; the gate."""
        convolved = 2 * (self.inner_dim / tp + 2 * self._group_dim_on_rank(tp))
        return convolved + (3 * self.inner_dim + 4 * self.heads) / tp

    def kept_numbers(self, tp: int) -> float:
        """Inputs and results of the convolutions; steps; results of state and gate, their product, its norm."""
        convolved = 2 * (self.inner_dim / tp + 2 * self._group_dim_on_rank(tp))
        return convolved + (5 * self.inner_dim + self.heads) / tp

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """Results of all products but the last."""
        if "matmul" not in keep:
            return 0.0
        return (2 * self.inner_dim + self.heads) / tp + 2 * self._group_dim_on_rank(tp)

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        states = self.heads * self.head_dim * self.state_dim // CHUNK
        return 40 * self.dim + 24 * self.inner_dim + 16 * self.group_dim + 8 * states + 8 * CHUNK * self.heads

    def conv_channels(self, tp: int) -> int:
        """See `RecurrentSpec`."""
        return self.inner_dim // tp + 2 * self._group_dim_on_rank(tp)

    def piece_numbers(self, tp: int) -> int:
        """See `RecurrentSpec`: the state of each head and its decay."""
        return self.heads // tp * (self.head_dim * self.state_dim + 1)

    @property
    def entering_flops(self) -> float:
        """See `RecurrentSpec`: what is read of the state."""
        return 2.0 * self.inner_dim * self.state_dim

    def _group_dim_on_rank(self, tp: int) -> int:
        return max(1, self.groups // tp) * self.state_dim
