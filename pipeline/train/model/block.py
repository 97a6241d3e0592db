"""One layer of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.dropout import PlacedDropout, dropped
from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.model.norm import build_norm
from pipeline.train.model.part_spec import LayerSpec
from pipeline.train.model.recompute import Recompute

Attended = tuple[Tensor, Tensor, AttentionMask, float]
"""Queries, keys, what is seen and the scale of an attention: what an `ActivationObserver` gets, without gradients."""


class Block(nn.Module):
    """Residual block: mixer and mlp, or one of them, and norms on their inputs, outputs or sums.

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
        for place, part in spec.parts.items():
            for name in (f"{place}_norm", place, f"{place}_out_norm", f"{place}_sum_norm"):
                if name == place:
                    self.add_module(name, part.build())
                elif name in spec.norms:
                    self.add_module(name, build_norm(spec.norm, spec.dim))
        self._fp32_vectors = [
            self.get_submodule(f"{place}.{name}") for place, part in spec.parts.items() for name in part.fp32_modules
        ]
        self.recompute: Recompute | None = None
        self.compiled: Callable[[Tensor, LayerContext], tuple[Tensor, list[Attended]]] | None = None

    def forward(self, x_BSD: Tensor, context: LayerContext) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        for unit in self._fp32_vectors:
            unit()
        trains = self.training and torch.is_grad_enabled()
        if context.dropout is not None:
            # Here, as layers that differ in an index would not share what is compiled.
            context = replace(context, dropout=context.dropout.within(f"layers.{self.index}"))
        compute = self.compiled if trains and self.compiled is not None else self.compute
        out_BSD, attended = compute(x_BSD, context)
        if context.observer is not None:
            # Here and not within, where backward may come by again and a compiler would follow.
            for queries, keys, mask, scale in attended:
                context.observer.attention(self.get_submodule("mixer"), queries, keys, mask, scale)
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
        spec = self.spec
        if spec.residual != "sequential":
            module = self.get_submodule
            input_BSD = module("mixer_norm")(x_BSD)
            of_mlp_BSD = input_BSD if spec.residual == "parallel_shared" else module("mlp_norm")(x_BSD)
            of_mixer_BSD = dropped(module("mixer")(input_BSD, context, state), "mixer", context.dropout)
            branches_BSD = of_mixer_BSD + dropped(module("mlp")(of_mlp_BSD), "mlp", context.dropout)
            return x_BSD + self._scaled(branches_BSD), attended
        if spec.mixer is not None:
            x_BSD = self._add(x_BSD, "mixer", context.dropout, context, state)
        if spec.mlp is not None:
            x_BSD = self._add(x_BSD, "mlp", context.dropout)
        return x_BSD, attended

    def _add(self, x_BSD: Tensor, place: str, dropout: PlacedDropout | None, *more: Any) -> Tensor:
        """The stream and what a part makes of it, with the norms of the part."""
        norms, module = self.spec.norms, self.get_submodule
        input_BSD = module(f"{place}_norm")(x_BSD) if f"{place}_norm" in norms else x_BSD
        out_BSD = module(place)(input_BSD, *more)
        if f"{place}_out_norm" in norms:
            out_BSD = module(f"{place}_out_norm")(out_BSD)
        sum_BSD: Tensor = x_BSD + self._scaled(dropped(out_BSD, place, dropout))
        return module(f"{place}_sum_norm")(sum_BSD) if f"{place}_sum_norm" in norms else sum_BSD

    def _scaled(self, out_BSD: Tensor) -> Tensor:
        scale = self.spec.residual_scale
        return out_BSD if scale == 1 else out_BSD * scale


class _Recorder:
    """Stands in for an `ActivationObserver` while a layer computes, and notes what it is shown."""

    def __init__(self, attended: list[Attended]) -> None:
        self._attended = attended

    def attention(self, _: nn.Module, q_BSHE: Tensor, k_BTKE: Tensor, mask: AttentionMask, scale: float) -> None:
        self._attended.append((q_BSHE.detach(), k_BTKE.detach(), mask, scale))

    def output(self, block: nn.Module, x_BSD: Tensor) -> None:
        raise AssertionError("the block shows its output itself")
