"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): layers that predict tokens after the next one.

Depth d = 1, 2, ... predicts the token d + 1 places ahead of a position. It reads the embedding of the token d places
ahead and the stream of the depth before it, of the model after its last norm for the first one, and gives its own
after a norm; embedding and head are the model's. So does `MtpModel` of transformers 5. A position that is within its
document sees what the same one sees in the model, and tokens ahead of it in the input alone.

Shapes: B batch, S positions, N depths, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.train.model.block import Block
from pipeline.train.model.context import Ahead, LayerContext
from pipeline.train.model.loss import Criterion, TokenLosses
from pipeline.train.model.norm import build_norm
from pipeline.train.model.part_spec import MtpSpec


class MtpLayer(nn.Module):
    """A depth of multi-token prediction.

    Two matrices stand for one on both inputs beside each other, of which the embedding is the first half in published
    files (`eh_proj`).

    Args:
        spec: Its parts.
        index: Of its block: these are numbered on after the model's layers.
    """

    def __init__(self, spec: MtpSpec, index: int) -> None:
        super().__init__()
        self.embedding_norm = build_norm(spec.norm, spec.dim)
        self.stream_norm = build_norm(spec.norm, spec.dim)
        for matrix in spec.inputs:
            self.add_module(matrix.name, nn.Linear(matrix.columns, matrix.rows, bias=False))
        self.layer = Block(spec.layer, index)
        self.norm = build_norm(spec.norm, spec.dim)

    def forward(self, embedded_BSD: Tensor, stream_BSD: Tensor, context: LayerContext) -> Tensor:
        """[B, S, D] each -> the stream [B, S, D] after a norm.

        Args:
            embedded_BSD: Embeddings of the tokens ahead.
            stream_BSD: Of the depth before, or of the model, after a norm.
            context: Of the block.
        """
        of_embedding, of_stream = (self.get_submodule(f"of_{name}") for name in ("embedding", "stream"))
        x_BSD = of_embedding(self.embedding_norm(embedded_BSD)) + of_stream(self.stream_norm(stream_BSD))
        # Statistics are those of the model's layers.
        out_BSD: Tensor = self.norm(self.layer(x_BSD, replace(context, observer=None)))
        return out_BSD


def losses_of_all(
    head: Callable[[Tensor, Tensor, Criterion], TokenLosses],
    streams_BSD: Sequence[Tensor],
    weight: Tensor,
    criterion: Criterion,
    ahead: Ahead,
) -> TokenLosses:
    """The losses of the next token and of all depths, in one pass through the head.

    So chunks of it, and with tp its sums, are as with a batch that is 1 + N times as large.

    Args:
        head: Gives the losses of a criterion from a stream and the weight.
        streams_BSD: Of the model and of each depth, after their norms.
        weight: Of the head.
        criterion: Of the next token.
        ahead: Targets and weights of the depths.
    """
    all_targets = torch.cat([criterion.targets_BS, *ahead.targets_BNS.unbind(1)])
    all_weights = torch.cat([criterion.weight_BS, *ahead.weight_BNS.unbind(1)])
    whole = replace(criterion, targets_BS=all_targets, weight_BS=all_weights)
    total, loss = head(torch.cat(list(streams_BSD)), weight, whole)[:2]
    loss_BS, *of_depths = loss.chunk(len(streams_BSD))
    return TokenLosses(total, loss_BS, tuple(of_depths))


def joined(*tensors: Tensor) -> list[Tensor]:
    """Tensors that are tied together: their gradients are passed on when all of them are there.

    A schedule that splits backward passes begins the gradient of a parameter where its paths meet those of the stage's
    input. The embedding would meet them in each depth, one after the other, and torch would go through all between
    again. Joined with the input, all of its uses meet it in one place.
    """
    return list(cast(tuple[Tensor, ...], _Joined.apply(*tensors)))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """Identity of several tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients
