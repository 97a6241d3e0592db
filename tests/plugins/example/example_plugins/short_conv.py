"""A gated short convolution as data: a mixer that looks at a few positions, and not beyond its document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from pipeline.config.base import Section
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig
from pipeline.train.model.parameter_spec import Matrix, Uniform, Vector
from pipeline.train.model.part_spec import Division, MixerSpec


class ShortConvOptions(Section):
    """Options of `mixer: example.short_conv`."""

    channels: int | None = Field(default=None, ge=1)
    """Channels; by default dim."""
    taps: int = Field(default=3, ge=1, le=64)
    """Positions that a position sees, its own among them."""


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """wo(c * conv(b * u)), where b, c and u are products of the input, and each channel has its own taps.

    Its module imports torch, and is in a file of its own: commands that only read the run file do not wait for that.
    """

    dim: int
    channels: int
    taps: int

    Options = ShortConvOptions
    label: ClassVar = "gated short convolution"
    module: ClassVar = "example_plugins.short_conv_module.ShortConv"
    documents_apart: ClassVar = True

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig, options: ShortConvOptions) -> ShortConvSpec:
        """Make that of the layers with these options."""
        return cls(model.dim, options.channels or model.dim, options.taps)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Three in, one out, in the order of the forward pass. The gates stay out of fp8."""
        return (
            Matrix("wb", self.channels, self.dim, "rows", fp8=False),
            Matrix("wc", self.channels, self.dim, "rows", fp8=False),
            Matrix("wu", self.channels, self.dim, "rows"),
            Matrix("wo", self.dim, self.channels, "columns", to_residual=True),
        )

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The taps, whose channels tp cuts."""
        bound = self.taps**-0.5
        return (Vector("taps", (self.channels, self.taps), Uniform(-bound, bound)),)

    @property
    def divisions(self) -> tuple[Division, ...]:
        """Channels are cut over tp."""
        return (Division("mixer_options.channels", self.channels),)

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """The convolution."""
        return 2.0 * self.channels * self.taps

    def kept_numbers(self, tp: int) -> float:
        """All that is between the products: b, c, u, b * u, the convolution and its product with c."""
        return 6 * self.channels / tp
