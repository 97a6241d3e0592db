"""The choice of experts: one router for all families.

Shapes: T tokens, D width, E experts, K of them a token goes to, G groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from pipeline.train.model.mlps.experts.spec import RouterSpec

_SMALLEST_SUM = 1e-20
"""Added to a sum of scores before it divides; that of sigmoids may be 0 in fp32."""


class Choice(NamedTuple):
    """Experts of some tokens."""

    ids_TK: Tensor
    """int64."""
    gates_TK: Tensor
    """fp32, the weights of their results."""
    shares_TE: Tensor
    """fp32, the scores of all experts, whose sum is 1."""
    logits_TE: Tensor
    """fp32."""


class Router(nn.Module):
    """Logits, scores, groups, the choice with its bias, and weights of what was chosen, all in fp32.

    Attributes:
        score_bias: [E] fp32, if the choice has a bias; a buffer, as gradients do not move it.
        loads: [E] fp32, how often each expert was chosen in the step before, by all tokens.
        force: Experts are dealt in turn.
        wide_products: Logits are one product of 16 bits with a result of fp32 also where no GPU is, as on fake tensors.
    """

    def __init__(self, spec: RouterSpec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.count, dim))
        self.bias = nn.Parameter(torch.empty(spec.count)) if spec.bias else None
        self.score_bias: Tensor | None
        self.loads: Tensor
        self.register_buffer("score_bias", torch.zeros(spec.count, dtype=torch.float32) if spec.score_bias else None)
        self.register_buffer("loads", torch.zeros(spec.count, dtype=torch.float32))
        self.force = False
        self.wide_products = False

    def forward(self, x_TD: Tensor, ids_TK: Tensor | None = None) -> Choice:
        """The experts of tokens; with `ids_TK` those, and only their weights are computed."""
        spec = self.spec
        logits_TE = self._logits(x_TD)
        scores_TE = logits_TE.softmax(-1) if spec.score == "softmax" else logits_TE.sigmoid()
        if ids_TK is None:
            ids_TK = self.choose(scores_TE.detach())
        gates_TK = scores_TE.gather(1, ids_TK)
        if spec.normalize:
            gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + _SMALLEST_SUM)
        shares_TE = scores_TE
        if spec.score == "sigmoid":
            shares_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return Choice(ids_TK, gates_TK * spec.scale if spec.scale != 1 else gates_TK, shares_TE, logits_TE)

    def choose(self, scores_TE: Tensor) -> Tensor:
        """Ids of the experts with the best scores [T, K], int64."""
        spec = self.spec
        if self.force:
            choices = len(scores_TE) * spec.top_k
            return (torch.arange(choices, device=scores_TE.device) % spec.count).view(-1, spec.top_k)
        if self.score_bias is not None:
            scores_TE = scores_TE + self.score_bias
        if spec.groups is not None:
            assert spec.top_groups is not None
            by_group_TGN = scores_TE.view(len(scores_TE), spec.groups, spec.count // spec.groups)
            best = 2 if spec.group_score == "top2_sum" else 1
            groups = by_group_TGN.topk(best, dim=-1).values.sum(-1).topk(spec.top_groups, dim=-1, sorted=False).indices
            others_TG = torch.ones_like(by_group_TGN[..., 0], dtype=torch.bool).scatter(1, groups, False)
            scores_TE = by_group_TGN.masked_fill(others_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(spec.top_k, dim=-1, sorted=False).indices

    def _logits(self, x_TD: Tensor) -> Tensor:
        weight_ED = _summed(self.weight)
        if (x_TD.is_cuda or self.wide_products) and x_TD.dtype != torch.float32:
            logits_TE = cast(Tensor, _WideProduct.apply(x_TD, weight_ED))  # type: ignore[no-untyped-call]
        else:
            logits_TE = F.linear(x_TD.float(), weight_ED.float())
        return logits_TE if self.bias is None else logits_TE + _summed(self.bias).float()


def _summed(parameter: Tensor) -> Tensor:
    """A parameter that all ranks of tp have, and whose gradient is a sum over them: each has other tokens."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


class _WideProduct(torch.autograd.Function):
    """x w^T of 16 bits with a result of fp32, on tensor cores."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return torch.mm(x_TD, weight_ED.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weight_ED = ctx.saved_tensors
        gradient_TE = gradients[0]
        # A bf16 gradient of logits would keep 8 bits of what all experts' scores have in common.
        return (gradient_TE @ weight_ED.float()).to(x_TD.dtype), (gradient_TE.T @ x_TD.float()).to(weight_ED.dtype)
