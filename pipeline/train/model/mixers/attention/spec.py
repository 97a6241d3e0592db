"""Causal grouped-query attention as data: everything that is asked about it without building it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pipeline.config.model import ModelConfig
from pipeline.train.model.part_spec import CpTransfer, Division, HeadNorm, KernelUse, Matrix, MixerSpec, NormSpec, Reach

_MUP_HEAD_DIM = 64
"""muP divides attention logits by head_dim instead of its root; the two agree for heads of this size."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Causal grouped-query attention. `window` counts the token itself; None is all tokens before it."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: NormSpec | None
    window: int | None
    scale: float

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
    def of(cls, config: ModelConfig) -> AttentionSpec:
        """That of the `model:` section."""
        head_dim = config.head_size
        return cls(
            dim=config.dim,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_dim=head_dim,
            qkv_bias=config.bias in ("qkv", "all"),
            output_bias=config.bias == "all",
            qk_norm=NormSpec("rmsnorm", config.norm_eps) if config.qk_norm else None,
            window=config.sliding_window,
            scale=head_dim**-0.5 if config.init.mup_base_dim is None else _MUP_HEAD_DIM**0.5 / head_dim,
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
            Matrix("wo", self.dim, queries, "columns", self.output_bias, to_residual=True),
        )

    @property
    def head_norms(self) -> tuple[HeadNorm, ...]:
        """See `LayerPartSpec`."""
        if self.qk_norm is None:
            return ()
        return tuple(HeadNorm(name, self.qk_norm, self.head_dim) for name in ("q_norm", "k_norm"))

    @property
    def divisions(self) -> tuple[Division, ...]:
        """See `LayerPartSpec`."""
        heads = Division("heads", self.heads)
        return (heads,) if self.kv_heads == self.heads else (heads, Division("kv_heads", self.kv_heads, self.heads))

    @property
    def kernel(self) -> KernelUse:
        """See `MixerSpec`."""
        return KernelUse(Reach.window(self.window), self.head_dim, self.head_dim)

    def extra_flops(self, sequence_length: int, *, causal: bool) -> float:
        """Scores and their sum over values."""
        window = min(self.window or sequence_length, sequence_length)
        keys = window - window**2 / (2 * sequence_length) if causal else window
        return 4.0 * self.heads * self.head_dim * keys

    def elementwise_numbers(self, tp: int) -> float:
        """The rotation."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim / tp

    def kept_numbers(self, tp: int) -> float:
        """Queries, keys, values and the result of attention."""
        return 2 * (self.heads * self.head_dim / tp) + 2 * self._kv_heads_on_rank(tp) * self.head_dim

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
