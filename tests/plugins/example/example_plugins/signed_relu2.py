"""An mlp with a squared ReLU of both signs, in one file.

Shapes: B batch, S positions, D width, F hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.base import Section
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.parameter_spec import Matrix, Normal, Vector
from pipeline.train.model.part_spec import Division, LayerPartSpec
from pipeline.train.torch_compat.core import own_part


class SignedRelu2Options(Section):
    """Options of `mlp: example.signed_relu2`."""

    slope: float = 0.25
    """Initial factor on the squares of negative numbers."""


@dataclass(frozen=True)
class SignedRelu2Spec(LayerPartSpec):
    """w2(relu(h)^2 - slope * relu(-h)^2) with h = w1 x, and a learned slope of each hidden unit."""

    dim: int
    ffn_dim: int
    slope: float

    Options = SignedRelu2Options
    label: ClassVar = "signed squared ReLU"
    module: ClassVar = "example_plugins.signed_relu2.SignedRelu2"
    model_keys: ClassVar = ("ffn_dim",)

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig, options: SignedRelu2Options) -> SignedRelu2Spec:
        """Make that of the layers with these options."""
        return cls(model.dim, layer.ffn_dim or 4 * model.dim, options.slope)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """One up, one down."""
        return (
            Matrix("w1", self.ffn_dim, self.dim, "rows"),
            Matrix("w2", self.dim, self.ffn_dim, "columns", to_residual=True),
        )

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The slopes, which tp cuts as the hidden units."""
        return (Vector("slope", (self.ffn_dim,), Normal(self.slope)),)

    @property
    def divisions(self) -> tuple[Division, ...]:
        """Hidden units are cut over tp."""
        return (Division("ffn_dim", self.ffn_dim),)


class SignedRelu2(nn.Module):
    """See `SignedRelu2Spec`. With tensor parallelism F are the hidden units that a rank has."""

    def __init__(self, spec: SignedRelu2Spec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.w2 = nn.Linear(spec.ffn_dim, spec.dim, bias=False)
        self.slope = nn.Parameter(torch.empty(spec.ffn_dim))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h_BSF = self.w1(x_BSD)
        out_BSD: Tensor = self.w2(F.relu(h_BSF).square() - own_part(self.slope) * F.relu(-h_BSF).square())
        return out_BSD
