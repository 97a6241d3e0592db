"""One layer of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.dropout import PlacedDropout, dropped
from pipeline.train.model.kernels.attention_mask import AttentionMask
from pipeline.train.model.mixers.recomputed import InputCache
from pipeline.train.model.mlps.experts.routing import Routed
from pipeline.train.model.norm import build_norm
from pipeline.train.model.part_spec import LayerSpec
from pipeline.train.model.plugins.parts import check_module
from pipeline.train.model.recompute import Recompute
from pipeline.train.model.states import States

if TYPE_CHECKING:
    from pipeline.train.model.mixers.attention.cross_module import CrossAttention

Attended = tuple[Tensor, Tensor, AttentionMask, float]
"""Queries, keys, what is seen and the scale of an attention: what an `ActivationObserver` gets, without gradients."""

Compute = Callable[[Tensor, LayerContext], tuple[Any, list[Attended]]]
"""What computes a layer, or a piece of one."""


class Block(nn.Module):
    """Residual block: mixer and mlp, or one of them, and norms on their inputs, outputs or sums.

    Of an encoder-decoder it changes the positions of its side; a decoder's also attends to the encoder's.

    Args:
        spec: Its parts.
        index: Which layer this is, to find its state in the context.

    Attributes:
        recompute: How a training pass keeps less than everything for backward; None: it keeps everything.
        compiled: What a training pass calls in place of `compute`, if it is compiled.
        in_pieces: It is computed in pieces, see `_in_pieces`.
    """

    def __init__(self, spec: LayerSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        for place, part in spec.parts.items():
            for name in (f"{place}_norm", place, f"{place}_out_norm", f"{place}_sum_norm"):
                if name == place:
                    self.add_module(name, part.build())
                    check_module(part, self.get_submodule(name))
                elif name in spec.norms:
                    self.add_module(name, build_norm(spec.norm, spec.dim))
        if spec.ends_encoder:
            self.encoder_norm = build_norm(spec.norm, spec.dim)
        self._fp32_vectors = [
            self.get_submodule(f"{place}.{name}") for place, part in spec.parts.items() for name in part.fp32_modules
        ]
        self.in_pieces = spec.mlp is not None and bool(spec.mlp.stacks)
        self.recompute: Recompute | None = None
        self.compiled: Compute | None = None

    def forward(self, x_BSD: Tensor, context: LayerContext) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        if context.states is not None and self._skips(context):
            if self.spec.side == "decoder":
                self._hold_cross_states(x_BSD, context.states)
            return x_BSD
        for unit in self._fp32_vectors:
            unit()
        if context.dropout is not None:
            # Here, as layers that differ in an index would not share what is compiled.
            context = replace(context, dropout=context.dropout.within(f"layers.{self.index}"))
        routed: list[Routed] = []
        if self.in_pieces:
            out_BSD, attended, routed = self._in_pieces(x_BSD, context)
        else:
            out_BSD, attended = self._trained(self.compute)(x_BSD, context)
        if context.on_routed is not None:
            for choices in routed:
                context.on_routed(self.index, choices)
        if context.observer is not None:
            # Here and not within, where backward may come by again and a compiler would follow.
            for queries, keys, mask, scale in attended:
                context.observer.attention(self.get_submodule("mixer"), queries, keys, mask, scale)
            context.observer.output(self, self._own(out_BSD, context.encoder))
        return out_BSD

    def _own(self, x_BSD: Tensor, encoder: int) -> Tensor:
        """The positions that the layer changes."""
        if self.spec.side is None:
            return x_BSD
        return x_BSD[:, :encoder] if self.spec.side == "encoder" else x_BSD[:, encoder:]

    def _skips(self, context: LayerContext) -> bool:
        """True if a pass with states belongs to the other side of an encoder-decoder: it has one side at a time."""
        return self.spec.side is not None and (self.spec.side == "encoder") != bool(context.encoder)

    def _hold_cross_states(self, x_BSD: Tensor, states: States) -> None:
        """Keep the keys and values that this decoder's layer makes of the encoder's output, for later passes."""
        keys, values = cast("CrossAttention", self.get_submodule("cross")).keys_values(x_BSD)
        states.cross[self.index].hold(keys, values)

    def compute(self, x_BSD: Tensor, context: LayerContext) -> tuple[Any, list[Attended]]:
        """Compute the layer, or its first piece if it is in pieces: output, and attention for an observer."""
        compute = self._first_piece if self.in_pieces else self._compute
        if self.recompute is None or not self._trains or (self.in_pieces and self.recompute.keep is None):
            return compute(x_BSD, context)
        return self.recompute(lambda x: compute(x, context), x_BSD)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _trained(self, compute: Compute) -> Compute:
        """The compiled form of `compute` in a training pass if there is one, else `compute`."""
        return self.compiled if self._trains and self.compiled is not None else compute

    def _in_pieces(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Attended], list[Routed]]:
        """The layer as what is before the mlp, the mlp, and their sum.

        An mlp that waits for the host, and has weights that come and go apart, can neither be compiled together with
        the rest nor repeated for selected results.
        """
        if self.recompute is not None and self.recompute.keep is None and self._trains:
            # All together is. What tokens choose is not chosen again, whatever the repetition rounds.
            repeated = replace(context, chosen=[])
            return self.recompute(lambda x: self._pieces(x, repeated), x_BSD)
        return self._pieces(x_BSD, context)

    def _pieces(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Attended], list[Routed]]:
        routed: list[Routed] = []
        # What the first piece does not read is not compiled into it.
        first = replace(context, routing=None, on_routed=None, chosen=None)
        (x_BSD, input_BSD), attended = self._trained(self.compute)(x_BSD, first)
        out_BSD = self.get_submodule("mlp")(input_BSD, replace(context, routed=routed))
        return self._add(x_BSD, "mlp", out_BSD, context.dropout), attended, routed

    def _first_piece(self, x_BSD: Tensor, context: LayerContext) -> tuple[tuple[Tensor, Tensor], list[Attended]]:
        """The stream after the mixer, and the input of the mlp."""
        attended: list[Attended] = []
        if self.spec.mixer is not None:
            of_mixer_BSD = self._mixed(self._input(x_BSD, "mixer"), context, attended)
            x_BSD = self._add(x_BSD, "mixer", of_mixer_BSD, context.dropout)
        if self.spec.cross is not None:
            x_BSD = self._add(x_BSD, "cross", self._crossed(self._input(x_BSD, "cross"), context), context.dropout)
        return (x_BSD, self._input(x_BSD, "mlp")), attended

    def _crossed(self, input_BSD: Tensor, context: LayerContext) -> Tensor:
        """Output of attention to the encoder."""
        state = None if context.states is None else context.states.cross[self.index]
        out_BSD: Tensor = self.get_submodule("cross")(input_BSD, context.memory_BED, context.cross, state)
        return out_BSD

    def _compute(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Attended]]:
        if self.spec.side is None or context.states is not None:
            x_BSD, attended = self._whole(x_BSD, context)
            return self.encoder_norm(x_BSD) if self.spec.ends_encoder else x_BSD, attended
        encoder_BED, decoder_BTD = x_BSD[:, : context.encoder], x_BSD[:, context.encoder :]
        if self.spec.side == "decoder":
            decoder_BTD, attended = self._whole(decoder_BTD, replace(context, memory_BED=encoder_BED))
        else:
            encoder_BED, attended = self._whole(encoder_BED, context)
            encoder_BED = self.encoder_norm(encoder_BED) if self.spec.ends_encoder else encoder_BED
        return torch.cat((encoder_BED, decoder_BTD), dim=1), attended

    def _whole(self, x_BSD: Tensor, context: LayerContext) -> tuple[Tensor, list[Attended]]:
        """The layer on all positions that it changes."""
        spec, module = self.spec, self.get_submodule
        if spec.residual == "sequential":
            (x_BSD, input_BSD), attended = self._first_piece(x_BSD, context)
            if spec.mlp is not None:
                x_BSD = self._add(x_BSD, "mlp", module("mlp")(input_BSD), context.dropout)
            return x_BSD, attended
        attended = []
        input_BSD = module("mixer_norm")(x_BSD)
        of_mlp_BSD = input_BSD if spec.residual == "parallel_shared" else module("mlp_norm")(x_BSD)
        of_mixer_BSD = dropped(self._mixed(input_BSD, context, attended), "mixer", context.dropout)
        branches_BSD = of_mixer_BSD + dropped(module("mlp")(of_mlp_BSD), "mlp", context.dropout)
        return x_BSD + self._scaled(branches_BSD), attended

    def _mixed(self, input_BSD: Tensor, context: LayerContext, attended: list[Attended]) -> Tensor:
        """Output of the mixer. Adds what an observer sees."""
        state = None if context.states is None or context.encoder else context.states.layers[self.index]
        if context.observer is not None:
            context = replace(context, observer=_Recorder(attended))
        mixer = self.get_submodule("mixer")
        if isinstance(state, InputCache):
            return state.recompute(lambda x_BTD, of_text: mixer(x_BTD, of_text, None), input_BSD, context)
        out_BSD: Tensor = mixer(input_BSD, context, state)
        return out_BSD

    def _input(self, x_BSD: Tensor, place: str) -> Tensor:
        """The input of a part, with its norm."""
        name = f"{place}_norm"
        return self.get_submodule(name)(x_BSD) if name in self.spec.norms else x_BSD

    def _add(self, x_BSD: Tensor, place: str, out_BSD: Tensor, dropout: PlacedDropout | None) -> Tensor:
        """The stream and what a part made of it, with the norms after the part."""
        norms, module = self.spec.norms, self.get_submodule
        if f"{place}_out_norm" in norms:
            out_BSD = module(f"{place}_out_norm")(out_BSD)
        sum_BSD: Tensor = x_BSD + self._scaled(dropped(out_BSD, place, dropout))
        return module(f"{place}_sum_norm")(sum_BSD) if f"{place}_sum_norm" in norms else sum_BSD

    def _scaled(self, out_BSD: Tensor) -> Tensor:
        scale = self.spec.residual_scale
        return out_BSD if scale == 1 else out_BSD * scale


class _Recorder:
    """An `ActivationObserver` for the time in which a layer computes: notes what it is shown."""

    def __init__(self, attended: list[Attended]) -> None:
        self._attended = attended

    def attention(self, _: nn.Module, q_BSHE: Tensor, k_BTKE: Tensor, mask: AttentionMask, scale: float) -> None:
        self._attended.append((q_BSHE.detach(), k_BTKE.detach(), mask, scale))

    def output(self, block: nn.Module, x_BSD: Tensor) -> None:
        raise AssertionError("the block shows its output itself")
