"""From the residual stream to logits, or to the loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.loss import Criterion, TokenLosses, criterion_loss


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
        if not spec.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(spec.vocab_padded, spec.dim))
            nn.init.normal_(self.weight, std=0.02)

    def forward(
        self,
        x_BSD: Tensor,
        weight_VD: Tensor,
        criterion: Criterion | None = None,
        predicted_BK: Tensor | None = None,
    ) -> Tensor | TokenLosses:
        """[B, S, D] and [V, D] -> logits [B, S, V] in the type of the weight, or the loss of a criterion.

        With a criterion and predicted positions only those are computed; at the others losses are 0.
        """
        if criterion is None:
            return self._logits(x_BSD, weight_VD)
        if predicted_BK is None:
            return criterion_loss(self._logits, x_BSD, weight_VD, criterion)
        x_BKD = at_positions(x_BSD, predicted_BK)
        losses = criterion_loss(self._logits, x_BKD, weight_VD, criterion.at(predicted_BK))
        loss_BS = torch.zeros_like(criterion.weight_BS, dtype=losses.loss_BS.dtype)
        return losses._replace(loss_BS=loss_BS.scatter(1, predicted_BK, losses.loss_BS))

    def _logits(self, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Padding of the vocabulary has -inf."""
        spec = self.spec
        if spec.logit_scale != 1:
            x_BSD = x_BSD * spec.logit_scale
        padding_V = self._padding(weight_VD)
        if spec.logit_soft_cap is None:
            # The padding's -inf goes in as a constant bias: writing into the logits would copy their whole gradient.
            return F.linear(x_BSD, weight_VD, padding_V)
        logits_BSV = spec.logit_soft_cap * torch.tanh(F.linear(x_BSD, weight_VD) / spec.logit_soft_cap)
        return logits_BSV if padding_V is None else logits_BSV + padding_V

    def _padding(self, weight_VD: Tensor) -> Tensor | None:
        """[V]: 0 for tokens, -inf for padding. None if these rows have no padding."""
        rows, tokens = weight_VD.shape[0], max(0, self.spec.vocab_size - self.first_row)
        if tokens >= rows:
            return None
        padding_V = weight_VD.new_zeros(rows)
        padding_V[tokens:] = -math.inf
        return padding_V


def at_positions(x_BSD: Tensor, positions_BK: Tensor) -> Tensor:
    """[B, S, D] -> [B, K, D]."""
    samples, length = x_BSD.shape[:2]
    first_B1 = torch.arange(samples, device=x_BSD.device)[:, None] * length
    return x_BSD.flatten(0, 1).index_select(0, (positions_BK + first_B1).flatten()).view(*positions_BK.shape, -1)
