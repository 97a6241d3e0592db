"""One layer of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.model.norm import build_norm
from pipeline.train.model.part_spec import LayerSpec
from pipeline.train.model.recompute import Recompute

Attended = tuple[Tensor, Tensor, AttentionMask, float]
"""Queries, keys, what is seen and the scale of an attention: what an `ActivationObserver` gets, without gradients."""


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
        spec: Its parts.
        index: Which layer this is, to find its state in the context.

    Attributes:
        recompute: How a training pass keeps less than everything for backward; None: it keeps everything.
        compiled: What a training pass calls in place of `compute`, if it is compiled.
    """

    def __init__(self, spec: LayerSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        self.mixer_norm = build_norm(spec.norm, spec.mixer.dim)
        self.mixer = spec.mixer.build()
        self.mlp_norm = build_norm(spec.norm, spec.mlp.dim)
        self.mlp = spec.mlp.build()
        self.recompute: Recompute | None = None
        self.compiled: Callable[[Tensor, LayerContext], tuple[Tensor, list[Attended]]] | None = None

    def forward(self, x_BSD: Tensor, context: LayerContext) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        trains = self.training and torch.is_grad_enabled()
        compute = self.compiled if trains and self.compiled is not None else self.compute
        out_BSD, attended = compute(x_BSD, context)
        if context.observer is not None:
            # Here and not within, where backward may come by again and a compiler would follow.
            for queries, keys, mask, scale in attended:
                context.observer.attention(self.mixer, queries, keys, mask, scale)
            context.observer.output(self, out_BSD)
        return out_BSD

    def compute(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Attended]]:
        """The output, and what there is to watch if somebody does."""
        if self.recompute is None or not (self.training and torch.is_grad_enabled()):
            return self._compute(x_BSD, context)
        return self.recompute(lambda x: self._compute(x, context), x_BSD)

    def _compute(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Attended]]:
        state = None if context.states is None else context.states.layers[self.index]
        attended: list[Attended] = []
        if context.observer is not None:
            context = replace(context, observer=_Recorder(attended))
        mixed_BSD: Tensor = x_BSD + self.mixer(self.mixer_norm(x_BSD), context, state)
        out_BSD: Tensor = mixed_BSD + self.mlp(self.mlp_norm(mixed_BSD))
        return out_BSD, attended


class _Recorder:
    """Stands in for an `ActivationObserver` while a layer computes, and notes what it is shown."""

    def __init__(self, attended: list[Attended]) -> None:
        self._attended = attended

    def attention(self, _: nn.Module, q_BSHE: Tensor, k_BTKE: Tensor, mask: AttentionMask, scale: float) -> None:
        self._attended.append((q_BSHE.detach(), k_BTKE.detach(), mask, scale))

    def output(self, block: nn.Module, x_BSD: Tensor) -> None:
        raise AssertionError("the block shows its output itself")
