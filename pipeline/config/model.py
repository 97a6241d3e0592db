"""`model:`: a decoder whose layers are equal, or of several kinds that repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section, Text
from pipeline.config.layers.experts import EXPERT_MULTIPLE
from pipeline.config.layers.layer import LayerConfig, LayerKindConfig
from pipeline.config.layers.mixers import MAX_LAYERS, MAX_ROWS, MAX_WIDTH
from pipeline.config.layers.plugin_checks import check_layer_plugin
from pipeline.config.plugins import is_plugin


class InitConfig(Section):
    """Initial weights. Every value is a function of (seed, parameter name, row), on any layout."""

    scheme: Literal["normal", "depth_scaled", "mup"] = "depth_scaled"
    """`normal`: one std everywhere. `depth_scaled`: layers that write to the residual stream get
    std / sqrt(2 * layers) (GPT-2). `mup`: maximal update parametrization with respect to `mup_base_dim`."""
    std: float = Field(default=0.02, gt=0)
    """Standard deviation of the normal distribution."""
    mup_base_dim: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    """mup: width at which learning rate and std are those of the config."""
    mup_fixed: list[Text] | None = None
    """mup: which of `mla.q_rank`, `mla.kv_rank`, `experts.ffn_dim` and `experts.shared_ffn_dim` do not grow with dim;
    the others do, all of them with []. Required if the model has one of them and a dim other than `mup_base_dim`."""

    @model_validator(mode="after")
    def _mup(self) -> InitConfig:
        if (self.scheme == "mup") != (self.mup_base_dim is not None):
            raise ValueError("mup_base_dim is needed with scheme: mup and not allowed otherwise")
        if self.mup_fixed is not None and self.scheme != "mup":
            raise ValueError(f"mup_fixed needs scheme: mup, and scheme is {self.scheme}; leave it out")
        return self


class MtpConfig(Section):
    """Multi-token prediction (DeepSeek-V3): layers after the model that predict tokens beyond the next one.

    Layer d predicts the token d + 1 places ahead, from the stream of the layer before it and the embedding of the token
    d places ahead. Its loss is `train.loss.mtp`. Validation, evaluation and generation leave these layers out.
    """

    depth: int = Field(default=1, ge=1, le=16)
    """Number of these layers, each like the model's last one, and of tokens predicted beyond the next one."""


class RelativeConfig(Section):
    """Relative positions (T5): each head has a number for each bucket of distances, added to scores.

    Half of the buckets are for one distance each, and the others for ranges that grow by a factor up to max_distance.
    """

    buckets: int = Field(default=32, ge=4, le=MAX_WIDTH)
    """Number of buckets, even; in the encoder half of them are for each direction."""
    max_distance: int = Field(default=128, ge=2, le=MAX_ROWS)
    """Distance from which all larger ones are in the last bucket."""

    @model_validator(mode="after")
    def _ranges(self) -> RelativeConfig:
        if self.buckets % 4:
            raise ValueError(f"buckets {self.buckets} is not a multiple of 4")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(f"max_distance {self.max_distance} must be more than half of buckets {self.buckets}")
        return self


class EncoderConfig(Section):
    """Encoder of an encoder-decoder: layers whose tokens attend to all of their document.

    The layers of `model.layers` are then the decoder's, and attend to the encoder's output, too. Both sides have the
    keys of `model:`, and share the embedding.
    """

    layers: int = Field(ge=1, le=MAX_LAYERS)
    """Number of blocks of the encoder."""
    pattern: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_LAYERS)
    """Kinds of its layers, like `model.pattern`, which is the default."""


class _Size(Section):
    layers: int = Field(ge=1, le=MAX_LAYERS)
    """Number of blocks."""
    dim: int = Field(ge=1, le=MAX_WIDTH)
    """Width of the residual stream."""


class ModelConfig(LayerConfig, _Size):
    """A decoder or an encoder: embedding, `layers` blocks of mixer and mlp, head."""

    direction: Literal["causal", "both"] = "causal"
    """Tokens that a token attends to: `causal`, itself and those before it; `both`, those after it too, in every layer.
    A model with `both` is an encoder (BERT), which learns to fill in masked tokens and does not write text."""
    pattern: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_LAYERS)
    """Kinds of the layers, by their names in `kinds`: repeated until there are `layers`, which need not be a multiple
    of its length. By default all layers are equal."""
    kinds: dict[str, LayerKindConfig] = Field(default_factory=dict)
    """By name of a kind in `pattern`, the keys that differ from those of `model:`, like `{sliding_window: 1024}`."""
    encoder: EncoderConfig | None = None
    """Encoder beside the decoder."""
    relative: RelativeConfig | None = None
    """Relative positions, with `positions: relative`."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of normalization, of mixers and mlps and before the head."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in the norms."""
    norm_bias: bool = True
    """A layernorm has a bias."""
    norm_offset: float = 0.0
    """Added to the weights of the norms, which then begin at 1 - norm_offset (Gemma: 1)."""
    max_positions: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Rows of the learned position embedding; by default train.sequence_length. Not used by rope."""
    document_attention: bool = False
    """Attention, and the state of a recurrence, stays inside a document, and positions restart at its first token.
    false: a window is one text."""
    tie_embeddings: bool = False
    """The head uses the embedding's weights."""
    vocab_size: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Tokens that have logits; by default as many as the tokenizer has ids. Models from elsewhere may have more."""
    vocab_multiple: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """The vocabulary is padded to a multiple of this; logits of the padding are -inf."""
    token_types: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Rows of a token type embedding (BERT: 2), of which all tokens use the first one. By default there is no such
    embedding."""
    embedding_norm: bool = False
    """The sum of the embeddings is normalized (BERT, ModernBERT)."""
    first_norm: bool = True
    """The input of the first layer is normalized. false: not again after embedding_norm (ModernBERT)."""
    final_norm: bool = True
    """There is a norm after the last layer. false: `norm_place: post` has one there already (BERT)."""
    head_transform: Literal["gelu", "gelu_exact"] | None = None
    """Before the head comes a matrix of dim x dim, with a bias if bias is all, then this function and a norm (BERT,
    ModernBERT: gelu_exact)."""
    head_bias: bool = False
    """Each token has a number that is added to its logit (BERT)."""
    embedding_scale: float = Field(default=1.0, gt=0)
    """Factor on the embedding of tokens, rounded to the type of the weights (Gemma: sqrt(dim))."""
    residual_scale: float = Field(default=1.0, gt=0)
    """Factor on the output of a mixer or mlp before it is added to the residual stream (Granite)."""
    logit_scale: float = Field(default=1.0, gt=0)
    """Factor on the logits (Cohere; Granite divides by its `logits_scaling`)."""
    logit_soft_cap: float | None = Field(default=None, gt=0)
    """Logits become cap * tanh(logits / cap) (Gemma 2)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the embedding and of the output of each mixer and mlp that a training step sets to 0, before it is added
    to the residual stream (GPT-2's resid_pdrop and embd_pdrop). Probabilities of attention are never dropped: no kernel
    supports it. The mask depends only on the seed and the sample, not on the layout."""
    mtp: MtpConfig | None = None
    """Multi-token prediction."""
    init: InitConfig = InitConfig()
    """Initial weights."""

    @property
    def head_size(self) -> int:
        """Size of a head of layers without a kind."""
        return head_size(self, self.dim)

    @property
    def heads_fill_dim(self) -> bool:
        """True if the heads of layers without a kind are as wide as the residual stream, together."""
        return self.head_size * self.query_heads == self.dim

    @property
    def layer_kinds(self) -> list[str | None]:
        """Name of each layer's kind; None for all where there is no pattern."""
        return _repeated(self.pattern, self.layers)

    @property
    def all_layers(self) -> int:
        """Number of layers, of an encoder-decoder those of both sides."""
        return self.layers + (0 if self.encoder is None else self.encoder.layers)

    @property
    def encoder_kinds(self) -> list[str | None]:
        """Kinds of the encoder's layers; none without an encoder."""
        return [] if self.encoder is None else _repeated(self.encoder.pattern or self.pattern, self.encoder.layers)

    def layer(self, kind: str | None) -> ModelConfig:
        """The section with the keys of the layers of a kind."""
        if kind is None:
            return self
        found = self.kinds[kind]
        changed = {key: getattr(found, key) for key in found.model_fields_set}
        return self.model_copy(update=changed) if changed else self

    @model_validator(mode="after")
    def _kinds(self) -> ModelConfig:
        of_encoder = None if self.encoder is None else self.encoder.pattern
        if of_encoder is not None:
            if self.pattern is None:
                raise ValueError("encoder.pattern needs a pattern, which is that of the decoder's layers")
            if unknown := [name for name in of_encoder if name not in self.kinds]:
                raise ValueError(f"encoder.pattern has {unknown[0]!r}, which is not in kinds")
        used = {*(self.pattern or ()), *(of_encoder or ())}
        if unknown := [name for name in self.pattern or () if name not in self.kinds]:
            known = ", ".join(self.kinds) or "none"
            raise ValueError(f"pattern has {unknown[0]!r}, which is not in kinds ({known})")
        if unused := [name for name in self.kinds if name not in used]:
            raise ValueError(f"kinds has {unused[0]!r}, which is not in pattern; add it there or remove it")
        if self.pattern is not None and len(self.pattern) > self.layers:
            raise ValueError(f"pattern has {len(self.pattern)} layers, but layers is {self.layers}")
        for name, kind in self.kinds.items():
            for each in ("learned", "relative"):
                if "positions" in kind.model_fields_set and each in (kind.positions, self.positions):
                    raise ValueError(f"kinds.{name}.positions: {each} positions are those of all layers")
        return self

    @model_validator(mode="after")
    def _encoder(self) -> ModelConfig:
        if self.relative is not None and self.positions != "relative":
            raise ValueError(f"relative needs positions: relative, and positions is {self.positions}")
        if self.encoder is None:
            if self.positions == "relative":
                raise ValueError("positions: relative needs the section encoder; set positions: rope without one")
            return self
        if self.direction != "causal":
            raise ValueError("direction: both is not for models with an encoder, whose layers see both sides anyway")
        for key in ("token_types", "embedding_norm", "first_norm", "final_norm", "head_transform", "head_bias"):
            if getattr(self, key) != ModelConfig.model_fields[key].default:
                raise ValueError(f"{key} is not for models with an encoder; leave it out")
        if self.mtp is not None:
            raise ValueError("mtp is not for models with an encoder; leave one of the two out")
        if self.positions == "learned":
            raise ValueError("positions: learned is not for models with an encoder; set rope or relative")
        for name in dict.fromkeys([*self.encoder_kinds, *self.layer_kinds]):
            layer, where = self.layer(name), "" if name is None else f"kinds.{name}: "
            if layer.mixer != "attention":
                raise ValueError(f"{where}mixer: {layer.mixer} is not for models with an encoder; set attention")
            if layer.mlp in ("experts", "none"):
                raise ValueError(f"{where}mlp: {layer.mlp} is not for models with an encoder; set another mlp")
            if layer.residual != "sequential":
                raise ValueError(f"{where}residual: {layer.residual} is not for models with an encoder; leave it out")
            if layer.positions == "relative" and (layer.sinks or layer.attention_soft_cap is not None):
                key = "sinks" if layer.sinks else "attention_soft_cap"
                raise ValueError(f"{where}{key} is not for positions: relative; leave it out, or set positions: rope")
        return self

    @model_validator(mode="after")
    def _shapes(self) -> ModelConfig:
        if self.norm_offset != 0 and self.norm != "rmsnorm":
            raise ValueError(f"norm_offset needs norm: rmsnorm, and norm is {self.norm}")
        kinds = [(f"kinds.{name}: ", self.layer(name), kind) for name, kind in self.kinds.items()]
        layers = [("", self, self)] if self.pattern is None else kinds
        for where, layer, own in layers:
            _check_layer(layer, self, where, own)
        if self.experts is not None and all(layer.mlp != "experts" for _, layer, _ in layers):
            raise ValueError("experts needs layers with mlp: experts, and there are none")
        mixers = {layer.mixer for _, layer, _ in layers} - {"none"}
        if len(mixers) == 1:
            _check_unused(self, self, "", *mixers)
        for key, owners in _SECTIONS.items():
            if getattr(self, key) is not None and not mixers.intersection(owners):
                raise ValueError(f"{key} needs layers with mixer: {' or '.join(owners)}, and there are none")
        if not self.first_norm and (self.layer(self.layer_kinds[0]).norm_place not in ("pre", "both")):
            raise ValueError("first_norm: false needs norm_place: pre or both; leave it out")
        if not self.first_norm and self.layer(self.layer_kinds[0]).residual != "sequential":
            raise ValueError("first_norm: false needs residual: sequential")
        if self.head_transform is not None and self.init.scheme == "mup":
            raise ValueError("head_transform is not known for init.scheme: mup; set depth_scaled or normal")
        if self.head_transform is not None and self.mtp is not None:
            raise ValueError("head_transform does not go with mtp; leave one out")
        if self.direction == "both":
            if recurrent := sorted(mixers.intersection(RECURRENT)):
                raise ValueError(f"direction: both is not for mixer: {recurrent[0]}, whose state goes forward alone")
            if self.mtp is not None:
                raise ValueError("mtp needs direction: causal; with both a token sees the ones that mtp would predict")
        return self


def head_size(layer: LayerConfig, dim: int) -> int:
    """Size of a head."""
    return layer.head_dim or dim // layer.query_heads


def turned_dims(layer: LayerConfig, dim: int) -> float:
    """Dimensions of a head that the rotary embedding turns; no whole number where the share is none."""
    # A product like 0.07 * 200 is not whole by its last bits.
    return round(layer.rope_share * head_size(layer, dim), 6)


def _check_layer(layer: LayerConfig, model: ModelConfig, where: str, own: LayerConfig) -> None:
    """Raise a `ValueError` where keys of a layer do not fit each other.

    Args:
        layer: The keys.
        model: All of the section.
        where: Which kind it is, for messages.
        own: The section with those of the keys that are meant for it alone: what it has of `model:` and does not use,
            like the scaling of rope, is for other layers.
    """
    if layer.mixer == layer.mlp == "none":
        raise ValueError(f"{where}mixer and mlp are both none; a layer needs one of them")
    if layer.mixer == "none" and layer.residual != "sequential":
        raise ValueError(f"{where}residual: {layer.residual} needs a mixer")
    if layer.residual != "sequential" and (layer.mlp == "none" or layer.norm_place != "pre"):
        raise ValueError(f"{where}residual: {layer.residual} needs an mlp and norm_place: pre")
    if layer.mlp == "none" and where and own.ffn_dim is not None:
        raise ValueError(f"{where}ffn_dim needs an mlp, and mlp is none; leave it out")
    if layer.mlp == "experts":
        if layer.experts is None:
            raise ValueError(f"{where}mlp: experts needs the section experts, with count, top_k and ffn_dim")
        if layer.residual != "sequential":
            raise ValueError(f"{where}mlp: experts needs residual: sequential, not {layer.residual}")
        if model.dim % EXPERT_MULTIPLE:
            raise ValueError(f"{where}dim {model.dim} is not a multiple of {EXPERT_MULTIPLE}, which mlp: experts needs")
    elif own.experts is not None and where:
        raise ValueError(f"{where}experts needs mlp: experts, and mlp is {layer.mlp}")
    for key, owners in _SECTIONS.items():
        if getattr(own, key) is not None and layer.mixer not in owners:
            raise ValueError(f"{where}{key} needs mixer: {' or '.join(owners)}, and mixer is {layer.mixer}")
        if getattr(layer, key) is None and layer.mixer in owners:
            raise ValueError(f"{where}mixer: {layer.mixer} needs the section {key} with its sizes")
    _check_plugins(layer, model, where, own)
    if layer.mixer == "none":
        # Without kinds, those of `model:` may stay where its mixer is taken out.
        if where and (given := _first_given(own, _OF_ATTENTION)):
            raise ValueError(f"{where}{given} needs a mixer with attention, and mixer is none; leave it out")
        return
    _check_unused(layer, own, where, layer.mixer)
    if layer.mixer in RECURRENT:
        _check_recurrent(layer, model, where)
    if layer.mixer in RECURRENT or is_plugin(layer.mixer):
        return
    if layer.heads is None:
        raise ValueError(f"{where}heads is missing, which mixer: {layer.mixer} needs")
    if layer.positions != "rope" and own.rope_scaling is not None:
        raise ValueError(f"{where}rope_scaling needs positions: rope")
    if layer.attention_scale is not None and model.init.scheme == "mup":
        raise ValueError(f"{where}attention_scale and init.scheme: mup both set the factor on attention; leave one out")
    if layer.mixer == "mla":
        _check_mla(layer, where)
    else:
        _check_heads(layer, model, where)


def _check_plugins(layer: LayerConfig, model: ModelConfig, where: str, own: LayerConfig) -> None:
    """Raise a `ValueError` where keys do not fit plug-ins of a layer."""
    asked = {
        "mup": model.init.scheme == "mup",
        "documents": model.document_attention,
        "both": model.direction == "both",
    }
    needs = [name for name, value in asked.items() if value]
    if is_plugin(layer.mixer):
        biased = ["bias"] * (own.bias not in ("none", "mlp"))
        check_layer_plugin("mixer", layer.mixer, where, [*_given(own, _OF_ATTENTION), *biased], needs)
    if is_plugin(layer.mlp):
        biased = ["bias"] * (own.bias in ("mlp", "all"))
        check_layer_plugin("mlp", layer.mlp, where, [*_given(own, ("ffn_dim",)), *biased], needs)


def _check_heads(layer: LayerConfig, model: ModelConfig, where: str) -> None:
    """Raise a `ValueError` where the heads of attention do not fit."""
    heads = layer.query_heads
    if layer.head_dim is None and model.dim % heads:
        raise ValueError(
            f"{where}dim {model.dim} is not divisible by heads {heads}; set head_dim, or change dim or heads"
        )
    if heads % (layer.kv_heads or heads):
        raise ValueError(f"{where}heads {heads} must be a multiple of kv_heads {layer.kv_heads}")
    if layer.positions == "rope" and (turned := turned_dims(layer, model.dim)) % 2:
        if layer.rope_share == 1:
            raise ValueError(f"{where}rope needs an even head_dim")
        raise ValueError(f"{where}rope_share {layer.rope_share} of a head is {turned:g}, which must be an even number")


def _repeated(pattern: Sequence[str] | None, layers: int) -> list[str | None]:
    names: Sequence[str | None] = pattern or (None,)
    return [names[index % len(names)] for index in range(layers)]


RECURRENT = ("mamba2", "gated_delta", "kda")
"""Values of `mixer` that are recurrences."""
_SECTIONS = {"mla": ("mla",), "mamba2": ("mamba2",), "delta": ("gated_delta", "kda")}
"""By section of sizes, the values of `mixer` that have it."""
_OF_HEADS = ("kv_heads", "head_dim", "qk_norm", "rope_share", "output_gate")
_OF_ATTENTION = ("heads", *_OF_HEADS, "sliding_window", "attention_scale", "attention_soft_cap", "sinks")
_UNUSED = {"mla": _OF_HEADS, **dict.fromkeys(RECURRENT, _OF_ATTENTION)}
"""By value of `mixer`, keys of attention that it has otherwise, or not."""


def _given(own: LayerConfig, keys: Iterable[str]) -> Iterator[str]:
    """Those of some keys that are not at their defaults."""
    return (key for key in keys if getattr(own, key) != LayerConfig.model_fields[key].default)


def _first_given(own: LayerConfig, keys: Iterable[str]) -> str | None:
    return next(_given(own, keys), None)


def _check_unused(layer: LayerConfig, own: LayerConfig, where: str, mixer: str) -> None:
    """Raise a `ValueError` where a key of attention is meant for a mixer that does not have it."""
    if key := _first_given(own, _UNUSED.get(mixer, ())):
        section = next(name for name, mixers in _SECTIONS.items() if mixer in mixers)
        raise ValueError(f"{where}{key} is not for mixer: {mixer}, whose sizes are in {section}; leave it out")
    # Layers with latent attention do not inherit a bias of attention, those of a recurrence beside attention may.
    bias = layer.bias if mixer == "mla" else own.bias
    if mixer in _UNUSED and bias not in ("none", "mlp"):
        raise ValueError(f"{where}bias: {bias} is not for mixer: {mixer}, which has no biases; set none or mlp")


def _check_mla(layer: LayerConfig, where: str) -> None:
    """Raise a `ValueError` where the keys of latent attention do not fit."""
    assert layer.mla is not None
    if layer.positions == "rope" and layer.mla.rope_dim % 2:
        raise ValueError(f"{where}mla.rope_dim {layer.mla.rope_dim} must be an even number with positions: rope")


def _check_recurrent(layer: LayerConfig, model: ModelConfig, where: str) -> None:
    """Raise a `ValueError` where the keys of a recurrence do not fit."""
    if model.init.scheme == "mup":
        raise ValueError(f"{where}init.scheme: mup is not known for mixer: {layer.mixer}; set depth_scaled or normal")
    delta = layer.delta
    if layer.mixer == "kda" and delta is not None and delta.value_heads not in (None, delta.key_heads):
        raise ValueError(f"{where}delta.value_heads must be as many as key_heads with mixer: kda; leave it out")
    if layer.mixer == "gated_delta" and delta is not None and delta.rank is not None:
        raise ValueError(f"{where}delta.rank needs mixer: kda, and mixer is gated_delta")
