"""Grouped-query attention as data: everything that is asked about it without building it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

from pipeline.config.layers.layer import LayerConfig
from pipeline.config.model import ModelConfig, head_size, turned_dims
from pipeline.train.model.parameter_spec import DIM, Axes, HeadNorm, Matrix, NormSpec, Vector, WidthAxis
from pipeline.train.model.part_spec import (
    CpTransfer,
    Division,
    KernelUse,
    MixerSpec,
    Reach,
    RelativeSpec,
    RopeSpec,
    default_scale,
    softmax_factor,
)


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Grouped-query attention."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: NormSpec | None
    reach: Reach
    scale: float
    _: KW_ONLY
    wide_qk_norm: bool = False
    """`qk_norm` is over all heads together."""
    rope: RopeSpec | None = None
    soft_cap: float | None = None
    """Scores become cap * tanh(scores / cap)."""
    sinks: bool = False
    """A learned logit of each head takes a part of the attention and gives no value."""
    gate: bool = False
    """The result of a head is multiplied by sigmoid(wg x)."""
    relative: RelativeSpec | None = None
    """Bias of the products of queries and keys."""

    label: ClassVar = "attention"
    module: ClassVar = "pipeline.train.model.mixers.attention.module.Attention"
    huggingface: ClassVar = {
        "llama": (
            ("self_attn.q_proj", ("wq",)),
            ("self_attn.k_proj", ("wk",)),
            ("self_attn.v_proj", ("wv",)),
            ("self_attn.o_proj", ("wo",)),
            ("self_attn.q_norm.weight", ("q_norm.weight",)),
            ("self_attn.k_norm.weight", ("k_norm.weight",)),
        ),
        "gpt2": (("attn.c_attn", ("wq", "wk", "wv")), ("attn.c_proj", ("wo",))),
    }

    @classmethod
    def of(cls, model: ModelConfig, layer: LayerConfig) -> AttentionSpec:
        """Spec of the layers with these keys."""
        head_dim = head_size(layer, model.dim)
        scale = default_scale(head_dim, mup=model.init.mup_base_dim is not None)
        rope = None
        if layer.positions == "rope":
            rope = RopeSpec(int(turned_dims(layer, model.dim)), layer.rope_theta, layer.rope_scaling)
        return cls(
            dim=model.dim,
            heads=layer.query_heads,
            kv_heads=layer.kv_heads or layer.query_heads,
            head_dim=head_dim,
            qkv_bias=layer.bias in ("qkv", "attention", "all"),
            output_bias=layer.bias in ("attention", "all"),
            qk_norm=NormSpec("rmsnorm", model.norm_eps, offset=model.norm_offset) if layer.qk_norm else None,
            reach=Reach.window(layer.sliding_window, both=model.direction == "both"),
            scale=(layer.attention_scale or scale) * softmax_factor(rope.scaling if rope else None),
            wide_qk_norm=layer.qk_norm == "full",
            rope=rope,
            soft_cap=layer.attention_soft_cap,
            sinks=layer.sinks,
            gate=layer.output_gate,
        )

    @classmethod
    def same_meaning(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that follow from other keys may be written out."""
        heads = model["heads"]
        return {"kv_heads": model["kv_heads"] or heads, "head_dim": model["head_dim"] or model["dim"] // heads}

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """See `LayerPartSpec`."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Matrix("wq", queries, self.dim, "rows", self.qkv_bias),
            *(Matrix(name, keys, self.dim, "rows", self.qkv_bias, heads=self.kv_heads) for name in ("wk", "wv")),
            *((Matrix("wg", queries, self.dim, "rows"),) if self.gate else ()),
            Matrix("wo", self.dim, queries, "columns", self.output_bias, to_residual=True),
        )

    @property
    def axes(self) -> dict[str, Axes]:
        """See `LayerPartSpec`."""
        stream, heads = WidthAxis(DIM, self.dim), WidthAxis("heads", self.heads, self.head_dim)
        keys = WidthAxis("kv_heads", self.kv_heads, self.head_dim)
        found: dict[str, Axes] = {"sinks": (WidthAxis("heads", self.heads),)}
        for name, outputs, inputs in (
            *(("wq", heads, stream), ("wk", keys, stream), ("wv", keys, stream)),
            *(("wg", heads, stream), ("wo", stream, heads)),
        ):
            found |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        if self.wide_qk_norm:
            found |= {"q_norm.weight": (heads,), "k_norm.weight": (keys,)}
        return found

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """See `LayerPartSpec`."""
        return (Vector("sinks", (self.heads,)),) if self.sinks else ()

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """See `LayerPartSpec`."""
        if self.qk_norm is None:
            return ()
        heads = (self.heads, self.kv_heads) if self.wide_qk_norm else (None, None)
        return tuple(
            HeadNorm(name, self.qk_norm, self.head_dim, count)
            for name, count in zip(("q_norm", "k_norm"), heads, strict=True)
        )

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        heads = Division("heads", self.heads)
        if self.kv_heads == self.heads:
            return (heads,)
        # A norm over all key heads counts each of them once: no rank may have another's.
        return heads, Division("kv_heads", self.kv_heads, None if self.wide_qk_norm else self.heads)

    @property
    def kernel(self) -> KernelUse:
        """See `MixerSpec`."""
        biased = self.relative is not None
        return KernelUse(self.reach, self.head_dim, self.head_dim, self.soft_cap, self.sinks, biased)

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """Scores and their sum over values."""
        return 4.0 * self.heads * self.head_dim * self.reach.mean_keys(sequence_length, causal=causal)

    def elementwise_numbers(self, tp: int) -> float:
        """The rotation; the gate."""
        turned = self.heads + self.kv_heads if self.rope is not None else 0
        return (2 * turned + (3 * self.heads if self.gate else 0)) * self.head_dim / tp

    def kept_numbers(self, tp: int) -> float:
        """Queries, keys, values and the result of attention; the gate and what it is multiplied with."""
        of_queries = (4 if self.gate else 2) * (self.heads * self.head_dim / tp)
        return of_queries + 2 * self._kv_heads_on_rank(tp) * self.head_dim

    def kept_results(self, keep: Collection[str], tp: int) -> float:
        """The result of attention; queries."""
        return sum(self.heads * self.head_dim / tp for name in ("attention", "matmul") if name in keep)

    def most_numbers(self, sequence_length: int) -> int:
        """See `LayerPartSpec`."""
        return 40 * self.dim + 2 * self.heads * (self.head_dim + sequence_length)

    def cp_transfer(self, method: str, tp: int, cp: int) -> CpTransfer:
        """See `MixerSpec`."""
        keys = self._kv_heads_on_rank(tp)
        if method != "ulysses":  # collected is what all ranks have together
            return CpTransfer("keys and values", 1, 2 * keys * cp * self.head_dim)
        # Exchanged is what this rank has, with a copy of a key head for each rank that needs one.
        heads = 2 * (keys if keys % cp == 0 else cp) + 2 * self.heads // tp
        return CpTransfer("queries, keys, values, outputs", 2, heads * self.head_dim)

    def _kv_heads_on_rank(self, tp: int) -> int:
        return max(1, self.kv_heads // tp)
