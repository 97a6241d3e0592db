"""`model:`: one decoder family that covers GPT-2, Llama 3, Qwen3 and Mistral."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section

MAX_LAYERS = 4096
MAX_WIDTH = 2**20
MAX_ROWS = 2**28
"""Far above any model: a config.json of somebody else's may say a billion layers, each built before any is read."""


class RopeScalingConfig(Section):
    """Change of rotary frequencies for contexts longer than the original one."""

    type: Literal["linear", "llama3", "yarn"]
    """Method of scaling."""
    factor: float = Field(gt=0)
    """Length of the new context over the original one."""
    original_max_positions: int = Field(default=8192, ge=1)
    """Context length that the unscaled frequencies were made for (llama3, yarn)."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: wavelengths longer than original_max_positions / low_freq_factor are scaled by the full factor."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: wavelengths shorter than original_max_positions / high_freq_factor stay as they are."""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: rotations over the original context above which a frequency is kept."""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: rotations over the original context below which a frequency is scaled by the full factor."""
    truncate: bool = True
    """yarn: the two limits are rounded outwards to whole dimensions. false: the ramp between them begins and ends at
    fractions (GPT-OSS)."""
    mscale: float = Field(default=1.0, ge=0)
    """yarn: cos and sin are multiplied by m(mscale) / m(mscale_all_dim), where m(s) is 0.1 * s * ln(factor) + 1
    (DeepSeek)."""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """yarn: see mscale; the products of queries and keys are multiplied by m(mscale_all_dim) squared."""
    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: factor on cos and sin, in place of that of mscale and mscale_all_dim, by default 0.1 * ln(factor) + 1."""


class InitConfig(Section):
    """Initial weights. Every value is a function of (seed, parameter name, row), whatever the layout."""

    scheme: Literal["normal", "depth_scaled", "mup"] = "depth_scaled"
    """`normal`: one std everywhere. `depth_scaled`: layers that write to the residual stream get
    std / sqrt(2 * layers) (GPT-2). `mup`: maximal update parametrization with respect to `mup_base_dim`."""
    std: float = Field(default=0.02, gt=0)
    """Standard deviation of the normal distribution."""
    mup_base_dim: int | None = Field(default=None, ge=1)
    """mup: width at which learning rate and std are those of the config."""

    @model_validator(mode="after")
    def _mup(self) -> InitConfig:
        if (self.scheme == "mup") != (self.mup_base_dim is not None):
            raise ValueError("mup_base_dim is needed with scheme: mup and not allowed otherwise")
        return self


class ModelConfig(Section):
    """A decoder: embedding, `layers` equal blocks of attention and mlp, head."""

    layers: int = Field(ge=1, le=MAX_LAYERS)
    """Number of blocks."""
    dim: int = Field(ge=1, le=MAX_WIDTH)
    """Width of the residual stream."""
    heads: int = Field(ge=1, le=MAX_WIDTH)
    """Query heads."""
    kv_heads: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Key and value heads (grouped-query attention); by default `heads`."""
    head_dim: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Size of a head; by default dim / heads."""
    ffn_dim: int | None = Field(default=None, ge=1, le=8 * MAX_WIDTH)
    """Hidden size of the mlp; by default 4 * dim for gelu and 8/3 * dim, rounded up to a multiple of 64, for swiglu."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of normalization, before each mixer and mlp and before the head."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in the norms."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """`swiglu`: silu(w1 x) * w3 x (Llama). `gelu`: the tanh approximation (GPT-2)."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Linear layers that have a bias: none (Llama 3), query/key/value (Qwen2), or all (GPT-2)."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary embedding of queries and keys, or a learned embedding added to the tokens."""
    max_positions: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Rows of the learned position embedding; by default train.sequence_length. Not used by rope."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary frequencies."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys before the rotary embedding (Qwen3)."""
    sliding_window: int | None = Field(default=None, ge=1)
    """A token attends to itself and the sliding_window - 1 tokens before it (Mistral)."""
    document_attention: bool = False
    """Attention stays inside a document and positions restart at its first token. False: windows are one text."""
    tie_embeddings: bool = False
    """The head uses the embedding's weights."""
    vocab_size: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Tokens that have logits; by default as many as the tokenizer has ids. Models from elsewhere may have more."""
    vocab_multiple: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """The vocabulary is padded to a multiple of this; logits of the padding are -inf."""
    logit_soft_cap: float | None = Field(default=None, gt=0)
    """Logits become cap * tanh(logits / cap) (Gemma 2)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the embedding and of the output of each mixer and mlp that a training step sets to 0, before it is added
    to the residual stream (GPT-2's resid_pdrop and embd_pdrop). Probabilities of attention are never dropped: no kernel
    does it. What is dropped depends on the seed and the sample alone, whatever the layout."""
    init: InitConfig = InitConfig()
    """Initial weights."""

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.head_dim or self.dim // self.heads

    @model_validator(mode="after")
    def _shapes(self) -> ModelConfig:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(
                f"dim {self.dim} is not divisible by heads {self.heads}; set head_dim, or change dim or heads"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError("rope needs an even head_dim")
        if self.positions == "learned" and self.rope_scaling is not None:
            raise ValueError("rope_scaling needs positions: rope")
        return self
