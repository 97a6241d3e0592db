"""Transformer Engine's attention, which chooses among cuDNN's kernels and flash-attn's itself.

Written against versions 2.0 to 2.9. What ran on a GPU: docs/gpu-results.md.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.train.model.kernels.packed import PackedKernel, Packing


class TransformerEngine(PackedKernel):
    """`DotProductAttention` over packed tokens; causality is aligned with the last of the keys."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        self._build = te.DotProductAttention
        # It is a module with a state of its own, which is none of the model's.
        self._built: dict[tuple[int, int, int, float], Any] = {}

    def __call__(self, q_BCHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, prepared: Packing, scale: float) -> Tensor:
        """See `Kernel`."""
        key = q_BCHE.shape[2], k_BTKE.shape[2], q_BCHE.shape[3], scale
        if key not in self._built:
            heads, groups, size, scale = key
            self._built[key] = self._build(
                num_attention_heads=heads,
                kv_channels=size,
                num_gqa_groups=groups,
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal_bottom_right",
                softmax_scale=scale,
            )
        out: Tensor = self._built[key](
            *(x.flatten(0, 1) for x in (q_BCHE, k_BTKE, v_BTKE)),
            cu_seqlens_q=prepared.queries_N,
            cu_seqlens_kv=prepared.keys_N,
            max_seqlen_q=prepared.longest_queries,
            max_seqlen_kv=prepared.longest_keys,
            window_size=(-1 if prepared.window is None else prepared.window - 1, 0),
        )
        return out.view(q_BCHE.shape)
