"""Sizes of mixers that are sections of `model:`, and limits of all sizes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section

MAX_LAYERS = 4096
MAX_WIDTH = 2**20
MAX_ROWS = 2**28
MAX_EXPERTS = 2**14
"""Far above any model: a config.json of somebody else's may say a billion layers, each built before any is read."""


class MlaConfig(Section):
    """Sizes of multi-head latent attention (`mixer: mla`, DeepSeek-V2 and V3), which has `heads` heads."""

    kv_rank: int = Field(ge=1, le=MAX_WIDTH)
    """Size of the latent from which keys and values of all heads are computed (V3: 512)."""
    q_rank: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Size of the latent from which queries are computed (V3: 1536); by default one matrix computes them from the
    stream."""
    nope_dim: int = Field(ge=1, le=MAX_WIDTH)
    """Dimensions of a query and key head that are computed from the latents, without rotary embedding (V3: 128)."""
    rope_dim: int = Field(ge=1, le=MAX_WIDTH)
    """Further dimensions of a head, with rotary embedding (V3: 64); all heads share those of the keys."""
    value_dim: int = Field(ge=1, le=MAX_WIDTH)
    """Size of a value head (V3: 128)."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Added to the variance in the norms of the latents; by default norm_eps of the model. Hugging Face's models have
    1e-6 there, independent of their other norms."""


class Mamba2Config(Section):
    """Sizes of Mamba-2 (`mixer: mamba2`, Dao and Gu 2024): a state per head that decays at its own rate."""

    heads: int = Field(ge=1, le=MAX_WIDTH)
    """Heads. In most models heads * head_dim is 2 * dim."""
    head_dim: int = Field(default=64, ge=1, le=MAX_WIDTH)
    """Size of a head."""
    state_dim: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """Size of the vectors B and C; the state of a head is head_dim * state_dim numbers."""
    groups: int = Field(default=1, ge=1, le=MAX_WIDTH)
    """Groups of heads that share the vectors B and C of a position."""
    conv_size: int = Field(default=4, ge=2, le=64)
    """Positions that the convolution before the state covers, the token's own included."""
    conv_bias: bool = True
    """The convolution has a bias."""
    dt_min: float = Field(default=0.0, ge=0)
    """Least step of time (Nemotron-H: 0.001)."""
    dt_max: float | None = Field(default=None, gt=0)
    """Greatest step of time; by default there is no bound."""
    norm_groups: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Equal parts of the result that are normalized separately; by default `groups`, as in all families."""

    @model_validator(mode="after")
    def _divisible(self) -> Mamba2Config:
        for key, count in (("groups", self.groups), ("norm_groups", self.norm_groups or self.groups)):
            if self.heads % count:
                raise ValueError(f"heads {self.heads} must be a multiple of {key} {count}")
        if self.dt_max is not None and self.dt_max <= self.dt_min:
            raise ValueError(f"dt_max {self.dt_max} must be more than dt_min {self.dt_min}")
        return self


class DeltaConfig(Section):
    """Sizes of a gated delta rule (`mixer: gated_delta`, Yang et al. 2024; `mixer: kda`, Kimi Linear 2025)."""

    key_heads: int = Field(ge=1, le=MAX_WIDTH)
    """Heads of queries and keys."""
    value_heads: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Heads of values, which share key heads in equal groups; by default key_heads. kda needs as many as key_heads."""
    key_dim: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """Size of a query and key head; the state of a value head is key_dim * value_dim numbers."""
    value_dim: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """Size of a value head."""
    conv_size: int = Field(default=4, ge=2, le=64)
    """Positions that the convolutions of queries, keys and values cover, the token's own included."""
    beta_max: Literal[1, 2] = 1
    """Bound of the share of a key's old value that a new one replaces. 2 lets the state change its sign (OLMo
    Hybrid)."""
    rank: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """kda: size between the two matrices of the decay, and of the gate; by default value_dim."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Added to the variance in the norm of the result; by default norm_eps of the model. OLMo Hybrid has 1e-5."""

    @model_validator(mode="after")
    def _shared(self) -> DeltaConfig:
        if (self.value_heads or self.key_heads) % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} must be a multiple of key_heads {self.key_heads}")
        return self
