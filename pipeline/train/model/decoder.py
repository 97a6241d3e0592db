"""The language model: embedding, blocks, norm, head; or a part of it, for a stage of a pipeline.

Shapes: B batch, S positions, D width, V padded vocabulary, or the share of it that this rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.train.model.block import Block
from pipeline.train.model.context import Context, LayerContext, Mixer
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.dropout import Dropout, DropoutPlaces, PlacedDropout, dropped
from pipeline.train.model.head import Head
from pipeline.train.model.kernels.attention_mask import AttentionMask, Kernel, Prepared, mask_by_row
from pipeline.train.model.kernels.biased import Biased
from pipeline.train.model.kernels.recurrence.base import PLAIN
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.loss import DeferredLogits, TokenLosses
from pipeline.train.model.mixers.recomputed import InputCache
from pipeline.train.model.mixers.sequence import SequencePieces
from pipeline.train.model.mtp import MtpLayer, joined, losses_of_all
from pipeline.train.model.norm import build_norm
from pipeline.train.model.part_spec import LayerSpec, MixerSpec, Reach, RelativeSpec, Side
from pipeline.train.model.positions.relative import relative_bias
from pipeline.train.model.positions.rope import rope_tables
from pipeline.train.model.sides import SideSpan, both_sides, documents_of, order_by_shard, padded_documents
from pipeline.train.model.states import EncoderCache, MixerState, NoState, Places, States

__all__ = ["Context", "Decoder", "ModelPart"]

_BIASED = Biased()


@dataclass(frozen=True)
class ModelPart:
    """The part of a decoder that a pipeline stage has."""

    layers: range
    """Indices of its blocks, in the whole model; may be empty."""
    first: bool
    """It looks tokens up: its input is tokens [B, S], and otherwise the residual stream [B, S, D]."""
    last: bool
    """It has norm, head and multi-token prediction: its output is logits [B, S, V], and otherwise the residual
    stream."""

    @classmethod
    def whole(cls, spec: DecoderSpec) -> ModelPart:
        """The part that is a whole decoder."""
        return cls(range(len(spec.layers)), first=True, last=True)

    def blocks(self, spec: DecoderSpec) -> list[tuple[int, LayerSpec]]:
        """Index and spec of each block; those of multi-token prediction are numbered on after the layers."""
        blocks = [(index, spec.layers[index]) for index in self.layers]
        return [*blocks, *enumerate((each.layer for each in spec.mtp), len(spec.layers))] if self.last else blocks

    def relatives(self, spec: DecoderSpec) -> dict[str, RelativeSpec]:
        """Relative positions that its layers use, by side."""
        sides = {spec.layers[index].side for index in self.layers}
        return {side: each for side, each in spec.relatives.items() if side in sides}


class Decoder(nn.Module):
    """A transformer, a decoder alone or with an encoder, or a part of it under the parameter names of the whole.

    It holds parameters and the buffers of routers, which begin at 0, so that it can be built on the meta device,
    sharded, and only then be given memory; what depends on positions is computed in every forward pass.

    With tied embeddings or multi-token prediction the last part of several has a table `embedding.weight` of its own,
    equal to the first one's.

    Attributes:
        kernel: What computes attention, where there are no states.
        recurrent: What computes recurrences.
        stream_shard: With tensor parallelism that cuts the residual stream along the sequence, what gives of positions
            [1, S] those of this rank; of an encoder-decoder it cuts each side by itself.
        stream_shards: Number of the pieces.
        start_token: Of an encoder-decoder that writes text, the id that its decoder begins with; None: the end of a
            document.
    """

    def __init__(self, spec: DecoderSpec, part: ModelPart | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.part = part = part or ModelPart.whole(spec)
        self.kernel: Kernel = Sdpa()
        self.recurrent = PLAIN
        self.stream_shard: Callable[[Tensor], Tensor] | None = None
        self.stream_shards = 1
        self.start_token: int | None = None
        self._prepared = Prepared()
        self._dropout_places = DropoutPlaces(
            [
                *(["embedding"] if part.first else []),
                *(f"layers.{index}.{name}" for index, layer in part.blocks(spec) for name in layer.parts),
            ]
        )
        if part.first or (part.last and spec.last_embeds):
            self.embedding = nn.Embedding(spec.vocab_padded, spec.dim)
        if part.first and spec.learned_positions is not None:
            self.position_embedding = nn.Embedding(spec.learned_positions, spec.dim)
        if relatives := part.relatives(spec):
            self.relative = nn.ParameterDict(
                {side: nn.Parameter(torch.empty(each.buckets, each.heads)) for side, each in relatives.items()}
            )
        if part.first and spec.token_types is not None:
            self.type_embedding = nn.Embedding(spec.token_types, spec.dim)
        if part.first and spec.embedding_norm:
            self.embedding_norm = build_norm(spec.norm, spec.dim)
        # Keyed by index, so that a pipeline stage keeps the names of the layers that it has.
        self.layers = nn.ModuleDict({str(index): Block(spec.layers[index], index) for index in part.layers})
        if part.last and spec.final_norm:
            self.norm = build_norm(spec.norm, spec.dim)
        if part.last:
            self.head = Head(spec)
        if part.last and spec.mtp:
            self.mtp = nn.ModuleList(MtpLayer(each, index) for index, each in enumerate(spec.mtp, len(spec.layers)))

    @property
    def mtp_layers(self) -> list[MtpLayer]:
        """Depths of multi-token prediction that it has."""
        return [cast(MtpLayer, layer) for layer in self.mtp] if self.part.last and self.spec.mtp else []

    @property
    def blocks(self) -> list[Block]:
        """Layers, and the blocks of multi-token prediction."""
        return [*(cast(Block, block) for block in self.layers.values()), *(each.layer for each in self.mtp_layers)]

    def forward(self, x: Tensor, context: Context) -> Tensor | TokenLosses | DeferredLogits:
        """The part's output for its input, see `ModelPart`; logits of the vocabulary's padding are -inf.

        Where the context has a criterion, the last part gives the losses in place of the logits. Of an encoder-decoder
        the logits are those of the decoder's positions, [B, T, V], and losses of the encoder's positions are 0. With
        states and positions of the encoder alone the states get what the decoder needs of them, and there is no head.

        Raises:
            UserError: More positions than a learned position embedding has rows.
        """
        spec, part = self.spec, self.part
        positions, dropout, contexts = self._prepare(x, context)
        if part.first:
            if context.encoder and self.stream_shards > 1:
                x = x[:, order_by_shard(context.encoder, x.shape[1], self.stream_shards, x.device)]
            x = self._embed(x)
            if spec.token_types is not None:
                x = x + self.type_embedding(torch.zeros_like(positions[:1]))
            if spec.learned_positions is not None:
                x = x + self.position_embedding(positions)
            if spec.embedding_norm:
                x = self.embedding_norm(x)
            x = dropped(x, "embedding", dropout)
        x, weight, ahead = self._inputs_of_end(x, context)
        for block, of_layer in zip(self.layers.values(), contexts, strict=False):
            x = block(x, of_layer)
        if context.states is not None and context.encoder:
            context.states.encoder_lengths = list(context.counts or [x.shape[1]] * x.shape[0])
            return x
        if context.states is not None:
            counts = context.counts or [x.shape[1]] * x.shape[0]
            context.states.advance(counts)
            if context.last_only:
                last_B = torch.tensor([count - 1 for count in counts], device=x.device)
                x = x[torch.arange(len(counts), device=x.device), last_B][:, None]
        if part.last:
            criterion, predicted_BK, encoder = context.criterion, context.predicted_BK, context.encoder
            if encoder:
                x = x[:, encoder // self.stream_shards :]
                predicted_BK = None if predicted_BK is None else predicted_BK - encoder
                if criterion is not None:
                    targets_BT, weight_BT = criterion.targets_BS[:, encoder:], criterion.weight_BS[:, encoder:]
                    criterion = replace(criterion, targets_BS=targets_BT, weight_BS=weight_BT)
            x = self.norm(x) if spec.final_norm else x
            if context.ahead is not None:
                assert context.criterion is not None and weight is not None
                streams = [x]
                for layer, embedded, of_layer in zip(self.mtp_layers, ahead, contexts[len(self.layers) :], strict=True):
                    streams.append(layer(embedded, streams[-1], of_layer))
                return losses_of_all(self.head, streams, weight, context.criterion, context.ahead)
            losses_or_logits: Tensor | TokenLosses | DeferredLogits = self.head(x, weight, criterion, predicted_BK)
            if encoder and isinstance(losses_or_logits, TokenLosses):
                losses = F.pad(losses_or_logits.loss_BS, (encoder, 0))
                return losses_or_logits._replace(loss_BS=losses)
            return losses_or_logits
        return x

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.embedding(tokens_BS)
        scale = self.spec.embedding_scale
        # Rounded to the type of the weights, as published models of 16 bits were trained.
        return x_BSD if scale == 1 else x_BSD * torch.full((), scale, dtype=x_BSD.dtype, device=x_BSD.device)

    def _inputs_of_end(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The stream, the head's weight, and by depth of multi-token prediction what it embeds, if these are here."""
        if not self.part.last:
            return x, None, []
        tied = self.spec.tie_embeddings
        weight: Tensor = self.embedding.weight if tied else self.head.weight
        if context.ahead is None:
            return x, weight, []
        assert context.criterion is not None
        tokens = [context.criterion.targets_BS, *context.ahead.targets_BNS.unbind(1)[:-1]]
        ahead = [self._embed(tokens_BS) for tokens_BS in tokens]
        if not self.part.first:
            x, *ahead = joined(x, *ahead, *([weight] if tied else []))
            weight = ahead.pop() if tied else weight
        return x, weight, ahead

    def new_states(self, rows: int, max_length: int | None = None) -> States:
        """Empty states, for `Context.states`.

        Args:
            rows: Texts; may be 0, as others can join.
            max_length: Positions of a row at most; memory is taken as it is needed.
        """
        blocks = [cast(Block, block) for block in self.layers.values()]
        states = [_new_state(block, max_length) for block in blocks]
        cross = {index: EncoderCache(None) for index, block in enumerate(blocks) if block.spec.cross is not None}
        return States(rows, states, cross)

    def _prepare(self, x: Tensor, context: Context) -> tuple[Tensor, PlacedDropout | None, list[LayerContext]]:
        """Positions, [1, S] or [B, S] when they differ by row, what is dropped, and the context of each of `blocks`."""
        spec, device = self.spec, x.device
        assert context.bounds_BS is None or context.states is None, "states hold one document per row"
        assert context.cut is None or not spec.sided, "cp does not cut sides"
        queries = x.shape[1] if context.length is None else context.length
        # Of an encoder the states keep what is made of its end.
        places = None if context.states is None or context.encoder else context.states.places(queries, device)
        keys = queries if places is None else places.keys
        if spec.learned_positions is not None and keys > spec.learned_positions:
            raise UserError(
                f"model.max_positions is {spec.learned_positions}, but there are {keys} positions; "
                "shorten the sequence, or train with a larger model.max_positions"
            )
        common = LayerContext(
            context.bounds_BS,
            context.states,
            context.counts,
            context.observer,
            context.cut,
            self.kernel,
            places=places,
            dropout=None if context.dropout is None else self._place_dropout(context.dropout, context, keys),
            routing=context.routing,
            on_routed=context.on_routed,
            encoder=context.encoder // self.stream_shards,
        )
        contexts: dict[int, LayerContext] = {}
        positions: list[Tensor] = []
        stretches = self._stretches(context, keys, device)
        for stretch in stretches:
            own = context.positions_BS
            if own is None:
                own = stretch.positions(device) if places is None else places.positions_BS
            if context.cut is not None:
                own = context.cut.shard(own)
            positions.append(own)
            specs = [block.spec for block in self.blocks if block.spec.side == stretch.side]
            contexts |= self._contexts_of(stretch, stretches[0], specs, common, own, x.shape[0])
        mixers = [id(block.spec.mixer) for block in self.blocks]
        # Of a side that is not in the pass nothing is computed.
        return torch.cat(positions, dim=1), common.dropout, [contexts.get(mixer, common) for mixer in mixers]

    def _stretches(self, context: Context, length: int, device: torch.device) -> list[SideSpan]:
        """The sides of the sequence that this pass has, or all of it."""
        if not self.spec.sided:
            return [SideSpan(None, 0, length, documents_of(context))]
        if context.states is not None:
            side: Side = "encoder" if context.encoder else "decoder"
            documents = None
            if context.encoder and context.counts is not None:
                documents = padded_documents(context.counts, length, device)
            return [SideSpan(side, 0, length, documents)]
        assert 0 < context.encoder < length, "an encoder-decoder's sequence has positions of both sides"
        return both_sides(context, length)

    def _contexts_of(
        self,
        stretch: SideSpan,
        first: SideSpan,
        layers: Sequence[LayerSpec],
        common: LayerContext,
        positions: Tensor,
        rows: int,
    ) -> dict[int, LayerContext]:
        """Contexts of the layers of a side, by the identity of their mixer: layers of a kind share one.

        Args:
            stretch: Their side.
            first: The encoder, if there is one in this pass.
            layers: Specs.
            common: What all contexts have.
            positions: Of this side, of those that this process has.
            rows: Samples.
        """
        device, places = positions.device, common.places
        if common.dropout is not None and stretch.side is not None:
            encoder = common.encoder
            own = slice(0, encoder) if stretch.side == "encoder" else slice(encoder, None)
            dropped_at = common.dropout.positions_S[own]
            common = replace(common, dropout=replace(common.dropout, positions_S=dropped_at))
        different = {id(layer.mixer): layer.mixer for layer in layers if layer.mixer is not None}
        uses = {key: mixer.kernel for key, mixer in different.items()}
        demands = dict.fromkeys((use.reach, use.bias) for use in uses.values() if use is not None)
        if places is not None:
            assert common.cut is None, "states hold whole texts"
            seen = {each: replace(common, mask=_mask_of_states(places, *each, device)) for each in demands}
        else:
            seen = {each: self._sight(common, stretch, *each, rows, device) for each in demands}
        pieces = None
        if places is None and any(mixer.recurrent for mixer in different.values()):
            pieces = SequencePieces.of(stretch.length, common.bounds_BS, common.cut)
        ropes = dict.fromkeys(mixer.rope for mixer in different.values() if mixer.rope is not None)
        tables = {spec: rope_tables(spec, positions) for spec in ropes}
        # Of keys in the sequence, not in their documents: the distance is the same.
        queries = torch.arange(stretch.length, device=device)[None] if places is None else places.positions_BS
        biases = self._biases(different.values(), queries, stretch.length if places is None else places.keys)
        cross = None
        if any(layer.cross is not None for layer in layers):
            cross = self._cross_sight(common, stretch, first, rows, device)
        contexts = {id(None): common}
        for key, mixer in different.items():
            use, rope = uses[key], mixer.rope
            looking = common if use is None else seen[use.reach, use.bias]
            looking = replace(looking, pieces=pieces, recurrent=self.recurrent) if mixer.recurrent else looking
            if mixer.relative is not None:
                looking = replace(looking, bias=biases[mixer.relative])
            looking = looking if cross is None else replace(looking, cross=cross)
            contexts[key] = looking if rope is None else replace(looking, rope=tables[rope])
        return contexts

    def _biases(self, mixers: Iterable[MixerSpec], queries: Tensor, keys: int) -> dict[RelativeSpec, Tensor]:
        """Biases of layers with relative positions, see `relative_bias`."""
        relatives = dict.fromkeys(mixer.relative for mixer in mixers if mixer.relative is not None)
        if not relatives:
            return {}
        from pipeline.train.torch_compat.core import own_part  # and with it DTensor

        return {each: relative_bias(own_part(self.relative[each.side]), queries, keys, each) for each in relatives}

    def _place_dropout(self, dropout: Dropout, context: Context, length: int) -> PlacedDropout:
        """Dropout of a pass for the rows of the residual stream that this process has."""
        positions_1S = torch.arange(length, device=dropout.samples_B.device)[None]
        if context.cut is not None:
            positions_1S = context.cut.shard(positions_1S)
        if self.stream_shard is not None:
            sides = (positions_1S[:, : context.encoder], positions_1S[:, context.encoder :])
            positions_1S = torch.cat([self.stream_shard(side) for side in sides], dim=1)
        return self._dropout_places.draw(dropout, positions_1S[0])

    def _sight(
        self, context: LayerContext, stretch: SideSpan, reach: Reach, biased: bool, samples: int, device: torch.device
    ) -> LayerContext:
        """A context with what queries see that reach so far, and what the kernel prepares for it."""
        length = stretch.length
        pieces = ((0, length),) if context.cut is None else context.cut.pieces(length)
        sights = tuple(AttentionMask.of(samples, piece, reach, device, stretch.documents, length) for piece in pieces)
        kernel = _BIASED if biased else self.kernel
        prepared = tuple(self._prepared(kernel, sight) for sight in sights)
        return replace(context, kernel=kernel, sights=sights, prepared=prepared)

    def _cross_sight(
        self, context: LayerContext, stretch: SideSpan, encoder: SideSpan, samples: int, device: torch.device
    ) -> LayerContext:
        """A context of the decoder's queries that look at the encoder's positions."""
        # An observer is shown attention of a layer to itself.
        context = replace(context, observer=None)
        if context.states is not None:
            lengths_B = torch.tensor(context.states.encoder_lengths, device=device)
            keys_T = torch.arange(max(context.states.encoder_lengths), device=device)
            return replace(context, mask=(keys_T < lengths_B[:, None])[:, None, None])
        documents = None
        if stretch.documents is not None and encoder.documents is not None:
            documents = stretch.documents, encoder.documents
        sight = AttentionMask.across(samples, (0, stretch.length), encoder.length, device, documents)
        return replace(context, sights=(sight,), prepared=(self._prepared(self.kernel, sight),))


def _new_state(block: Block, max_length: int | None) -> MixerState:
    """An empty state of a layer; of a mixer without a state of its own one that keeps its inputs.

    Raises:
        UserError: The mixer has none, and needs the context of one.
    """
    spec, mixer = block.spec.mixer, cast(Mixer | None, getattr(block, "mixer", None))
    if spec is None or mixer is None or block.spec.side == "encoder":
        return NoState()
    if hasattr(mixer, "new_state"):
        return mixer.new_state(max_length)
    if spec.kernel is not None or spec.rope is not None or spec.recurrent:
        raise UserError(
            f"{spec.label} cannot continue texts: {type(mixer).__name__} has no new_state, see docs/plugins.md"
        )
    return InputCache(max_length)


def _mask_of_states(places: Places, reach: Reach, biased: bool, device: torch.device) -> Tensor | None:
    """Mask of the keys that are seen by queries which follow the positions in states."""
    if places.past is not None and not biased:
        return AttentionMask.of(1, (places.past, places.keys), reach, device).mask()
    return mask_by_row(places.positions_BS, reach, places.keys)
