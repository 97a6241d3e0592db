"""Contexts of a forward pass: from its caller, and for its layers.

Shapes: B batch, S positions, T keys, D width, H query heads, K key and value heads, E head size, V size of a
value head; with a cut L positions of a share and C of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from pipeline.data.loading.batch import Batch
from pipeline.train.host.host_copy import to_device
from pipeline.train.model.dropout import Dropout, PlacedDropout
from pipeline.train.model.kernels.attention_mask import AttentionMask, Kernel
from pipeline.train.model.kernels.recurrence.base import PLAIN, RecurrentKernels
from pipeline.train.model.loss import Criterion
from pipeline.train.model.mixers.sequence import SequenceCut, SequencePieces
from pipeline.train.model.mlps.experts.routing import Routed, Routing
from pipeline.train.model.states import MixerState, Places, States


class ActivationObserver(Protocol):
    """An observer of what a forward pass computes in its layers; it changes nothing of it."""

    def attention(self, mixer: nn.Module, q_BSHE: Tensor, k_BTKE: Tensor, mask: AttentionMask, scale: float) -> None:
        """Queries and keys as they are multiplied, which keys a query sees, and the factor on the products."""

    def output(self, block: nn.Module, x_BSD: Tensor) -> None:
        """The residual stream after a block; of an encoder-decoder the positions of the block's side."""


RoutingObserver = Callable[[int, Routed], None]
"""An observer of routers: gets the index of a layer and what its tokens chose in a forward pass."""


@dataclass(frozen=True)
class Ahead:
    """Targets of multi-token prediction for N depths, cut as the input of the model is."""

    targets_BNS: Tensor
    """int64 ids: at d - 1 those d + 1 places ahead of each position. A depth's are the input of the next one, as the
    model's own targets are that of the first."""
    weight_BNS: Tensor
    """fp32, see `Criterion`."""


@dataclass(frozen=True)
class Context:
    """Arguments of a forward pass besides its input.

    Attributes:
        bounds_BS: For every position the first one that it may attend to: where its document begins. None: the
            sequence is one document.
        starts: With bounds, what `Batch.starts` is, on the host. None: taken from the bounds, for which the host waits.
        positions_BS: Position of every token, for the position embedding. None: they restart at every bound, or
            follow what the states hold.
        states: What the mixers keep of the rows so far, for generation. Not together with bounds.
        counts: With states: how many tokens of each row count; the rest is padding on the right. None: all.
        last_only: With states: only the last token of each row that counts gets logits, [B, 1, V].
        length: Positions of the sequence, where the input of the model does not show them: a part of a model may get
            only its share of the residual stream.
        criterion: What the head is to give the loss of; None: it gives logits.
        observer: Is shown what the layers compute.
        cut: The input is a share of the sequence; bounds, positions and length are the whole's. Not with states.
        dropout: What is dropped; None: nothing, as outside of training steps.
        routing: What routers of experts are trained for; None: nothing, as outside of training steps.
        on_routed: Is shown what tokens chose, with `routing` or without.
        ahead: With a criterion: targets of multi-token prediction; None: it is left out.
        predicted_BK: With a criterion: the positions of the input that the head scores; None: all.
        prefix_BS: See `Batch.prefix`; the whole sequence's, as bounds are.
        encoder: Positions of the sequence that are the encoder's, see `Batch`.
    """

    bounds_BS: Tensor | None = None
    starts: Tensor | None = None
    positions_BS: Tensor | None = None
    states: States | None = None
    counts: Sequence[int] | None = None
    last_only: bool = False
    length: int | None = None
    criterion: Criterion | None = None
    observer: ActivationObserver | None = None
    cut: SequenceCut | None = None
    dropout: Dropout | None = None
    routing: Routing | None = None
    on_routed: RoutingObserver | None = None
    ahead: Ahead | None = None
    predicted_BK: Tensor | None = None
    prefix_BS: Tensor | None = None
    encoder: int = 0


def make_context(
    batch: Batch,
    document_attention: bool,
    criterion: Criterion | None = None,
    observer: ActivationObserver | None = None,
    cut: SequenceCut | None = None,
    dropout: Dropout | None = None,
    routing: Routing | None = None,
    on_routed: RoutingObserver | None = None,
    ahead: Ahead | None = None,
    predicted: Tensor | None = None,
) -> Context:
    """The context of a batch: all that the model needs besides the tokens.

    Args:
        batch: With whole sequences, also where the model gets a share of them.
        document_attention: Tokens attend to those of their document alone.
        criterion: Of what the model gets.
        observer: Is shown what the layers compute.
        cut: Which share of the sequences it gets.
        dropout: What a training drops.
        routing: What a training demands of routers.
        on_routed: Is shown what their tokens chose.
        ahead: Targets of multi-token prediction, of what it gets.
        predicted: Positions that the head scores, of what it gets, see `Batch`.
    """
    bounds, starts = (batch.bounds, batch.starts) if document_attention else (None, None)
    length = batch.tokens.shape[1]
    return Context(
        bounds_BS=bounds,
        starts=starts,
        length=length,
        criterion=criterion,
        observer=observer,
        cut=cut,
        dropout=dropout,
        routing=routing,
        on_routed=on_routed,
        ahead=ahead,
        predicted_BK=None if predicted is None else to_device(predicted, batch.tokens.device),
        prefix_BS=batch.prefix,
        encoder=batch.encoder,
    )


@dataclass
class LayerContext:
    """Arguments of a layer besides its input. Layers that look at the same keys by the same positions share one.

    Attributes:
        bounds_BS: See `Context`, as are `states`, `counts`, `observer`, `cut`, `routing` and `on_routed`.
        kernel: What computes attention, where there are no states.
        rope: cos and sin of the positions, if they are rotary.
        sights: Which keys are seen; with a cut for each piece, else one. Empty with states and without attention.
        prepared: What the kernel prepared for `sights`.
        mask: With states, which keys are seen, see `AttentionMask.mask`.
        places: Where the new positions go in the states.
        dropout: What is dropped in this pass, at the places of the part of the model, or within one layer.
        pieces: Pieces of the sequence that a recurrence is computed by, where there are no states.
        recurrent: What computes recurrences.
        routed: What the tokens of a layer chose goes here; None: nobody asks.
        chosen: What a pass of a layer chose that backward repeats; empty before it.
        encoder: Positions of the residual stream that are the encoder's, of those that this process has.
        bias: Bias of the scores of attention, [1 or B, H, C, T], which the kernel takes in place of sinks.
        cross: Context of attention to the encoder.
        memory_BED: What that attends to; None: the states have it.
    """

    bounds_BS: Tensor | None
    states: States | None
    counts: Sequence[int] | None
    observer: ActivationObserver | None
    cut: SequenceCut | None
    kernel: Kernel
    rope: tuple[Tensor, Tensor] | None = None
    sights: tuple[AttentionMask, ...] = ()
    prepared: tuple[Any, ...] = ()
    mask: Tensor | None = None
    places: Places | None = None
    dropout: PlacedDropout | None = None
    routing: Routing | None = None
    on_routed: RoutingObserver | None = None
    pieces: SequencePieces | None = None
    recurrent: RecurrentKernels = PLAIN
    routed: list[Routed] | None = None
    chosen: list[Any] | None = None
    encoder: int = 0
    bias: Tensor | None = None
    cross: LayerContext | None = None
    memory_BED: Tensor | None = None


class Mixer(Protocol):
    """The module of a mixer, besides what every `nn.Module` has.

    One of another package may lack `new_state`: generation then computes all positions again for each new one.
    """

    def new_state(self, max_length: int | None) -> MixerState:
        """An empty state for texts that are continued; see `Decoder.new_states`."""

    def __call__(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]; with tensor parallelism the input is a whole DTensor, and the output local."""
