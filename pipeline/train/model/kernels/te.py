"""Transformer Engine's attention, which chooses among cuDNN's kernels and flash-attn's itself.

Written against versions 2.0 to 2.9. What ran on a GPU: docs/gpu-results.md.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.train.model.kernels.attention_mask import Terms
from pipeline.train.model.kernels.heads import equal_heads
from pipeline.train.model.kernels.packed import PackedKernel
from pipeline.train.model.kernels.packing import Packing

_MULTIPLE = 8
"""Head sizes that it takes are its multiples."""


class TransformerEngine(PackedKernel):
    """`DotProductAttention` over packed tokens; causality is aligned with the last of the keys."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        self._build = te.DotProductAttention
        # It is a module with a state of its own, which is none of the model's.
        self._built: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        q_BCHE: Tensor,
        k_BTKE: Tensor,
        v_BTKV: Tensor,
        prepared: Packing,
        terms: Terms,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `Kernel`."""
        # It has sinks, as parameters of its own modules; of packed documents only with cuDNN from 9.18.
        assert terms.soft_cap is None and sinks_H is None, "te has neither soft caps nor sinks"
        value_size = v_BTKV.shape[-1]
        if value_size % _MULTIPLE:
            q_BCHE, k_BTKE, v_BTKV = equal_heads(q_BCHE, k_BTKE, v_BTKV)
        samples, queries, heads, size = q_BCHE.shape
        sizes = size if v_BTKV.shape[-1] == size else (size, v_BTKV.shape[-1])
        kind = "padding_causal_bottom_right" if prepared.causal else "padding"
        key = heads, k_BTKE.shape[2], sizes, kind, terms.scale
        if key not in self._built:
            self._built[key] = self._build(
                num_attention_heads=heads,
                kv_channels=sizes,
                num_gqa_groups=k_BTKE.shape[2],
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type=kind,
                softmax_scale=terms.scale,
            )
        out: Tensor = self._built[key](
            *(x.flatten(0, 1) for x in (q_BCHE, k_BTKE, v_BTKV)),
            cu_seqlens_q=prepared.queries_N,
            cu_seqlens_kv=prepared.keys_N,
            max_seqlen_q=prepared.longest_queries,
            max_seqlen_kv=prepared.longest_keys,
            window_size=prepared.window,
        )
        return out.view(samples, queries, heads, -1)[..., :value_size]
