"""The head: from the residual stream to logits, or to the loss."""

from __future__ import annotations

import math
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.loss import Criterion, DeferredLogits, TokenLosses, criterion_loss
from pipeline.train.model.norm import build_norm


class Head(nn.Module):
    """Logits of the padded vocabulary, or of the rows of it that this rank has (`first_row` is set then).

    The weight is an argument because it may be the embedding's. Shapes: B batch, S positions, K of them that are
    predicted, D width, V rows.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.first_row = 0
        """Token id of the weight's first row."""
        self.defers = False
        """True for a teacher: `DeferredLogits` in place of logits."""
        if not spec.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(spec.vocab_padded, spec.dim))
            nn.init.normal_(self.weight, std=0.02)
        if spec.head_transform is not None:
            self.dense = nn.Linear(spec.dim, spec.dim, bias=spec.head_transform_bias)
            self.norm = build_norm(spec.norm, spec.dim)
        if spec.head_bias:
            self.bias = nn.Parameter(torch.zeros(spec.vocab_padded))

    def forward(
        self,
        x_BSD: Tensor,
        weight_VD: Tensor,
        criterion: Criterion | None = None,
        predicted_BK: Tensor | None = None,
    ) -> Tensor | TokenLosses | DeferredLogits:
        """[B, S, D] and [V, D] -> logits [B, S, V] in the type of the weight, or the loss of a criterion.

        With a criterion and predicted positions only those are computed; at the others losses are 0.
        """
        bias_V = _own_part(self.bias) if self.spec.head_bias else None
        if self.defers:
            return DeferredLogits(self._transformed(x_BSD), partial(self._logits, weight_VD=weight_VD, bias_V=bias_V))
        if criterion is None:
            return self._logits(self._transformed(x_BSD), weight_VD, bias_V)
        if predicted_BK is None:
            return criterion_loss(self._logits, self._transformed(x_BSD), weight_VD, criterion, bias_V)
        x_BKD = self._transformed(at_positions(x_BSD, predicted_BK))
        losses = criterion_loss(self._logits, x_BKD, weight_VD, criterion.at(predicted_BK), bias_V)
        loss_BS = torch.zeros_like(criterion.weight_BS, dtype=losses.loss_BS.dtype)
        return losses._replace(loss_BS=loss_BS.scatter(1, predicted_BK, losses.loss_BS))

    def _transformed(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]: matrix, activation and norm, if the model has them."""
        if self.spec.head_transform is None:
            return x_BSD
        approximate = "tanh" if self.spec.head_transform == "gelu" else "none"
        x_BSD = F.gelu(_with_own_parts(self.dense, x_BSD), approximate=approximate)
        return _with_own_parts(self.norm, x_BSD)

    def _logits(self, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Padding of the vocabulary has -inf."""
        spec = self.spec
        if spec.logit_scale != 1:
            x_BSD = x_BSD * spec.logit_scale
        padding_V = self._padding(weight_VD)
        if bias_V is not None:
            # Not added to what exists: the logits of all tokens would be copied.
            bias_V = bias_V if padding_V is None else bias_V + padding_V
        if spec.logit_soft_cap is None:
            # The padding's -inf goes in as a constant bias: writing into the logits would copy their whole gradient.
            return F.linear(x_BSD, weight_VD, padding_V if bias_V is None else bias_V)
        logits_BSV = spec.logit_soft_cap * torch.tanh(F.linear(x_BSD, weight_VD, bias_V) / spec.logit_soft_cap)
        return logits_BSV if padding_V is None else logits_BSV + padding_V

    def _padding(self, weight_VD: Tensor) -> Tensor | None:
        """[V]: 0 for tokens, -inf for padding. None if these rows have no padding."""
        rows, tokens = weight_VD.shape[0], max(0, self.spec.vocab_size - self.first_row)
        if tokens >= rows:
            return None
        padding_V = weight_VD.new_zeros(rows)
        padding_V[tokens:] = -math.inf
        return padding_V


def _own_part(parameter: Tensor, rows: slice | None = None) -> Tensor:
    from pipeline.train.torch_compat.core import own_part  # and with it DTensor, which takes long to import

    return own_part(parameter, rows)


def _with_own_parts(module: nn.Module, x: Tensor) -> Tensor:
    """A module's output; with tp each rank knows a part of the gradients of its parameters, and their sum is taken."""
    parameters = dict(module.named_parameters())
    from torch.distributed.tensor import DTensor  # as in `_own_part`

    if not any(isinstance(each, DTensor) for each in parameters.values()):
        return cast(Tensor, module(x))
    own = {name: _own_part(each, slice(None)) for name, each in parameters.items()}
    return cast(Tensor, torch.func.functional_call(module, own, (x,)))


def at_positions(x_BSD: Tensor, positions_BK: Tensor) -> Tensor:
    """[B, S, D] -> [B, K, D]."""
    samples, length = x_BSD.shape[:2]
    first_B1 = torch.arange(samples, device=x_BSD.device)[:, None] * length
    return x_BSD.flatten(0, 1).index_select(0, (positions_BK + first_B1).flatten()).view(*positions_BK.shape, -1)
