"""The feed-forward half of a block as data: one hidden layer, gated or not."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, cast, get_args

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.parameter_spec import DIM, Axes, Matrix, WidthAxis
from pipeline.train.model.part_spec import Division, LayerPartSpec

DenseKind = Literal["swiglu", "gelu", "gelu_exact", "geglu", "geglu_exact", "relu", "relu2"]
_GATED = ("swiglu", "geglu", "geglu_exact")


@dataclass(frozen=True)
class MlpSpec(LayerPartSpec):
    """`swiglu`: w2(silu(w1 x) * w3 x). `gelu`: w2(gelu(w1 x)). For the others see `LayerConfig.mlp`."""

    kind: DenseKind
    dim: int
    ffn_dim: int
    bias: bool

    label: ClassVar = "mlp"
    module: ClassVar = "pipeline.train.model.mlps.dense.module.Mlp"
    huggingface: ClassVar = {
        "llama": (("mlp.gate_proj", ("w1",)), ("mlp.up_proj", ("w3",)), ("mlp.down_proj", ("w2",))),
        "gpt2": (("mlp.c_fc", ("w1",)), ("mlp.c_proj", ("w2",))),
    }

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> MlpSpec:
        """Spec of the layers with these keys."""
        assert layer.mlp in get_args(DenseKind)
        kind = cast(DenseKind, layer.mlp)
        ffn_dim = layer.ffn_dim or default_ffn_dim(kind, model.dim)
        return cls(kind, model.dim, ffn_dim, bias=layer.bias in ("mlp", "all"))

    @classmethod
    def same_meaning(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        """The width of the hidden layer, which the shapes of weights show."""
        return {"ffn_dim": None}

    @property
    def gated(self) -> bool:
        """True if the hidden layer is a product of two."""
        return self.kind in _GATED

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        hidden = ("w1", "w3") if self.gated else ("w1",)
        return (
            *(Matrix(name, self.ffn_dim, self.dim, "rows", self.bias) for name in hidden),
            Matrix("w2", self.dim, self.ffn_dim, "columns", self.bias, to_residual=True),
        )

    @property
    def axes(self) -> dict[str, Axes]:
        """See `LayerPartSpec`."""
        stream, hidden = WidthAxis(DIM, self.dim), WidthAxis("ffn_dim", self.ffn_dim)
        found: dict[str, Axes] = {"w2.weight": (stream, hidden), "w2.bias": (stream,)}
        for name in ("w1", "w3"):
            found |= {f"{name}.weight": (hidden, stream), f"{name}.bias": (hidden,)}
        return found

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        return (Division("ffn_dim", self.ffn_dim),)

    def elementwise_numbers(self, tp: int) -> float:
        """The activation."""
        return (3 if self.gated else 2) * self.ffn_dim / tp

    def kept_numbers(self, tp: int) -> float:
        """Everything between products."""
        return (4 if self.gated else 2) * (self.ffn_dim / tp)

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """Results of the first products; without a gate none are counted."""
        return 2 * (self.ffn_dim / tp) if self.gated and "matmul" in keep else 0.0

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        return 40 * self.ffn_dim


def default_ffn_dim(kind: str, dim: int) -> int:
    """4 * dim; with a gate 8/3 * dim (three matrices with the parameters of two), up to a multiple of 64."""
    return math.ceil(8 * dim / 3 / 64) * 64 if kind in _GATED else 4 * dim
