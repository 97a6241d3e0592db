"""`model.experts`: sizes and router of a mixture of experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import Section
from pipeline.config.layers.mixers import MAX_EXPERTS, MAX_WIDTH

EXPERT_MULTIPLE = 8
"""Divisor of both sizes of an expert: its products read rows of numbers of 2 bytes that begin at a multiple of 16."""


class ExpertsConfig(Section):
    """Mixture of experts: each token goes through some of many small mlps, which a router chooses."""

    count: int = Field(ge=1, le=MAX_EXPERTS)
    """Experts."""
    top_k: int = Field(ge=1, le=MAX_EXPERTS)
    """Experts of each token."""
    ffn_dim: int = Field(ge=1, le=MAX_WIDTH)
    """Hidden size of an expert, a multiple of 8."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """`swiglu`: silu(w1 x) * w3 x. `clamped_swiglu`: g * sigmoid(alpha * g) * (u + 1) with g = min(w1 x, clamp) and u =
    w3 x between -clamp and clamp (GPT-OSS)."""
    clamp: float = Field(default=7.0, gt=0)
    """clamped_swiglu: see activation."""
    alpha: float = Field(default=1.702, gt=0)
    """clamped_swiglu: see activation."""
    bias: bool = False
    """The products of the experts have a bias (GPT-OSS)."""
    shared_ffn_dim: int | None = Field(default=None, ge=1, le=8 * MAX_WIDTH)
    """Hidden size of a shared mlp that every token goes through; for several shared experts, the sum of their sizes
    (DeepSeek, GLM)."""
    shared_gate: bool = False
    """The result of the shared mlp is multiplied by sigmoid(wg x) (Qwen2-MoE, Qwen3-Next)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores: softmax over all experts (Mixtral, Qwen3), or sigmoid of each
    (DeepSeek-V3)."""
    normalize: bool = True
    """The weights of the chosen experts are their scores divided by their sum; false: the scores themselves (OLMoE)."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on these weights (DeepSeek-V3: 2.5)."""
    groups: int | None = Field(default=None, ge=1, le=MAX_EXPERTS)
    """Groups of equally many experts; a token's experts come from only `top_groups` of them (DeepSeek)."""
    top_groups: int | None = Field(default=None, ge=1, le=MAX_EXPERTS)
    """Number of groups from which a token's experts are chosen."""
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    """Score of a group: the sum of its two best experts (DeepSeek-V3), or its best one (DeepSeek-V2)."""
    score_bias: bool = False
    """Each expert has a number that is added to its score only when experts are chosen. It is not trained by gradients:
    train.balance.bias_rate moves it until loads are equal (DeepSeek-V3)."""
    router_bias: bool = False
    """The router's logits have a trained bias (GPT-OSS)."""

    @field_validator("ffn_dim")
    @classmethod
    def _aligned(cls, ffn_dim: int) -> int:
        if ffn_dim % EXPERT_MULTIPLE:
            raise ValueError(f"{ffn_dim} is not a multiple of {EXPERT_MULTIPLE}, which mlp: experts needs")
        return ffn_dim

    @model_validator(mode="after")
    def _choice(self) -> ExpertsConfig:
        if self.top_k > self.count:
            raise ValueError(f"top_k {self.top_k} is more than count {self.count}")
        if (self.groups is None) != (self.top_groups is None):
            raise ValueError("groups and top_groups need each other")
        if self.groups is not None and self.top_groups is not None:
            if self.count % self.groups:
                raise ValueError(f"count {self.count} must be a multiple of groups {self.groups}")
            size, least = self.count // self.groups, 2 if self.group_score == "top2_sum" else 1
            if size < least:
                raise ValueError(f"groups {self.groups} leave {size} expert in each, and group_score needs {least}")
            if self.top_groups > self.groups or self.top_k > self.top_groups * size:
                raise ValueError(
                    f"top_k {self.top_k} experts cannot be chosen from top_groups {self.top_groups} of "
                    f"{self.groups} groups of {size}"
                )
        if self.shared_gate and self.shared_ffn_dim is None:
            raise ValueError("shared_gate needs shared_ffn_dim")
        return self
