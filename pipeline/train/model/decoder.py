"""The language model: embedding, blocks, norm, head.

Shapes: B batch, S positions, D width, V padded vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.train.model.attention import Context, KVCache, attention_mask
from pipeline.train.model.block import Block
from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.norm import build_norm
from pipeline.train.model.rope import rope_tables

__all__ = ["Context", "Decoder"]


class Decoder(nn.Module):
    """A decoder-only transformer.

    It holds parameters and no buffers, so that it can be built on the meta device, sharded, and only then be given
    memory; what depends on positions is computed in every forward pass.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_padded, spec.dim)
        if spec.learned_positions is not None:
            self.position_embedding = nn.Embedding(spec.learned_positions, spec.dim)
        # Keyed by index, so that a pipeline stage keeps the names of the layers that it has.
        self.layers = nn.ModuleDict({str(index): Block(layer, index) for index, layer in enumerate(spec.layers)})
        self.norm = build_norm(spec.norm, spec.dim)
        if not spec.tie_embeddings:
            self.head = nn.Linear(spec.dim, spec.vocab_padded, bias=False)

    def forward(self, tokens_BS: Tensor, context: Context) -> Tensor:
        """Logits [B, S, V] in the type of the parameters; those of the vocabulary's padding are -inf.

        Raises:
            UserError: More positions than a learned position embedding has rows.
        """
        spec = self.spec
        positions, context = self._prepare(tokens_BS, context)
        x_BSD = self.embedding(tokens_BS)
        if spec.learned_positions is not None:
            x_BSD = x_BSD + self.position_embedding(positions)
        for block in self.layers.values():
            x_BSD = block(x_BSD, context)
        x_BSD = self.norm(x_BSD)
        if spec.logit_scale != 1:
            x_BSD = x_BSD * spec.logit_scale
        weight_VD = self.embedding.weight if spec.tie_embeddings else self.head.weight
        padding_V = self._padding(weight_VD)
        if spec.logit_soft_cap is None:
            # The padding's -inf goes in as a constant bias: writing into the logits would copy their whole gradient.
            return F.linear(x_BSD, weight_VD, padding_V)
        logits_BSV = spec.logit_soft_cap * torch.tanh(F.linear(x_BSD, weight_VD) / spec.logit_soft_cap)
        return logits_BSV if padding_V is None else logits_BSV + padding_V

    def new_states(self) -> list[KVCache]:
        """An empty cache for every layer, for `Context.states`."""
        return [cast(Block, block).mixer.new_state() for block in self.layers.values()]

    def _prepare(self, tokens_BS: Tensor, context: Context) -> tuple[Tensor, Context]:
        """Positions ([S], or [B, S] when they differ by row) and the context with rotary tables and masks."""
        spec, device = self.spec, tokens_BS.device
        assert context.bounds_BS is None or context.states is None, "a cache holds one document"
        past = 0 if context.states is None else context.states[0].length
        queries = tokens_BS.shape[1]
        keys = past + queries
        if spec.learned_positions is not None and keys > spec.learned_positions:
            raise UserError(
                f"model.max_positions is {spec.learned_positions}, but there are {keys} positions; "
                "shorten the sequence, or train with a larger model.max_positions"
            )
        positions = context.positions_BS
        if positions is None:
            positions = torch.arange(past, keys, device=device)
            if context.bounds_BS is not None:
                positions = positions - context.bounds_BS
        windows = {layer.mixer.window for layer in spec.layers}
        return positions, replace(
            context,
            rope=None if spec.rope is None else rope_tables(spec.rope, positions),
            masks={window: attention_mask(context.bounds_BS, window, queries, keys, device) for window in windows},
        )

    def _padding(self, weight_VD: Tensor) -> Tensor | None:
        """[V]: 0 for tokens, -inf for padding."""
        if self.spec.vocab_padded == self.spec.vocab_size:
            return None
        padding_V = weight_VD.new_zeros(self.spec.vocab_padded)
        padding_V[self.spec.vocab_size :] = -math.inf
        return padding_V
