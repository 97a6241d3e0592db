"""Keys of `model:` that kinds of layers may set."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from pipeline.config.base import DATA, MAX_SEQUENCE, Section
from pipeline.config.layers.experts import ExpertsConfig
from pipeline.config.layers.mixers import MAX_ROWS, MAX_WIDTH, DeltaConfig, Mamba2Config, MlaConfig
from pipeline.config.plugins import MixerOptions, MlpOptions, NamedPlugin, is_plugin


class RopeScalingConfig(Section):
    """Change of rotary frequencies for contexts longer than the original one."""

    type: Literal["linear", "llama3", "yarn"]
    """Method of scaling."""
    factor: float = Field(gt=0)
    """Length of the new context over the original one."""
    original_max_positions: int = Field(default=8192, ge=1, le=MAX_SEQUENCE)
    """Context length of the unscaled frequencies (llama3, yarn)."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: wavelengths longer than original_max_positions / low_freq_factor are scaled by the full factor."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: wavelengths shorter than original_max_positions / high_freq_factor do not change."""
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


class LayerConfig(Section):
    """Keys of `model:` that `model.kinds` may set for some layers."""

    heads: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Query heads. Layers with attention need it."""
    kv_heads: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Key and value heads (grouped-query attention); by default `heads`."""
    head_dim: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """Size of a head; by default dim / heads."""
    ffn_dim: int | None = Field(default=None, ge=1, le=8 * MAX_WIDTH)
    """Hidden size of the mlp; by default 4 * dim without a gate and 8/3 * dim, rounded up to a multiple of 64, with."""
    mixer: Annotated[
        Literal["attention", "mla", "mamba2", "gated_delta", "kda", "none"] | str, NamedPlugin("mixers"), DATA
    ] = "attention"
    """Part of a layer that moves information between positions. `attention`: with grouped queries. `mla`: keys and
    values are computed from a small latent of each token, see `mla`. `mamba2`, `gated_delta`, `kda`: recurrences, with
    a state of fixed size, see `mamba2` and `delta`. `none`: the layer has only an mlp. A name with a dot: an installed
    plug-in, see `docs/plugins.md`."""
    mixer_options: MixerOptions = None
    """Options of the plug-in that `mixer` names, beside that name."""
    mla: MlaConfig | None = None
    """Sizes of latent attention."""
    mamba2: Mamba2Config | None = None
    """Sizes of Mamba-2."""
    delta: DeltaConfig | None = None
    """Sizes of gated_delta and kda."""
    mlp: Annotated[
        Literal["swiglu", "gelu", "gelu_exact", "geglu", "geglu_exact", "relu", "relu2", "experts", "none"] | str,
        NamedPlugin("mlps"),
        DATA,
    ] = "swiglu"
    """`swiglu`: silu(w1 x) * w3 x (Llama). `gelu`: the tanh approximation (GPT-2); `gelu_exact`: without it (Pythia).
    `geglu`, `geglu_exact`: gelu(w1 x) * w3 x (Gemma; ModernBERT). `relu`: relu(w1 x) (T5 1.0). `relu2`: relu(w1 x)^2
    (Nemotron). `experts`: a mixture of experts, see experts. `none`: no mlp. A name with a dot: an
    installed plug-in, see `docs/plugins.md`."""
    mlp_options: MlpOptions = None
    """Options of the plug-in that `mlp` names, beside that name."""
    experts: ExpertsConfig | None = None
    """The experts, with `mlp: experts`."""
    bias: Literal["none", "qkv", "attention", "mlp", "all"] = "none"
    """Linear layers that have a bias: none (Llama 3), query/key/value (Qwen2), those of attention or of the mlp, or all
    (GPT-2)."""
    positions: Literal["rope", "learned", "relative", "none"] = "rope"
    """Rotary embedding of queries and keys, a learned embedding added to the tokens, or none. `relative`: see relative;
    for encoder-decoders, and slower."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary frequencies."""
    rope_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a head's dimensions with rotary embedding, from the first on (Pythia: 0.25)."""
    qk_norm: bool | Literal["full"] = False
    """RMSNorm of queries and keys before the rotary embedding: true, over each head (Qwen3); `full`, over all heads
    together (OLMo 2)."""
    sliding_window: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """A token attends to itself and the sliding_window - 1 tokens before it (Mistral). With direction: both, to itself
    and to sliding_window / 2 tokens on each side, rounded down (ModernBERT's local_attention)."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor on the products of queries and keys; by default 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = Field(default=None, gt=0)
    """Attention logits, after their factor, become cap * tanh(logit / cap) (Gemma 2)."""
    sinks: bool = False
    """Each head has a learned logit that takes a part of the attention and gives no value (GPT-OSS)."""
    output_gate: bool = False
    """The result of attention is multiplied by sigmoid(wg x) (Qwen3-Next)."""
    norm_place: Literal["pre", "output", "both", "post"] = "pre"
    """Place of the norms of mixer and mlp: `pre`, on the input (Llama); `output`, on the output before it is added to
    the stream (OLMo 2); `both` (Gemma); `post`, on the stream after the addition (BERT)."""
    residual: Literal["sequential", "parallel", "parallel_shared"] = "sequential"
    """`sequential`: the mlp reads the stream after the mixer. `parallel` (Pythia): it reads the stream before the
    mixer, with its own norm; `parallel_shared` (Cohere): with the mixer's norm."""

    @property
    def query_heads(self) -> int:
        """`heads` of a layer that has attention."""
        assert self.heads is not None
        return self.heads


class LayerKindConfig(LayerConfig):
    """A kind of layers: the keys that differ from those of `model:`."""

    described_at: ClassVar = "model"

    @model_validator(mode="after")
    def _options_of_its_own(self) -> LayerKindConfig:
        # A kind that names a plug-in does not take the options of the plug-in that `model:` names.
        for key in ("mixer", "mlp"):
            if key in self.model_fields_set and is_plugin(getattr(self, key)):
                self.model_fields_set.add(f"{key}_options")
        return self

    @model_serializer
    def _set_alone(self) -> dict[str, Any]:
        # A value that is a key's default may differ from that of `model:`, so that it is never left out.
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}
