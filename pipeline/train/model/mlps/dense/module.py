"""The feed-forward half of a block: one hidden layer, gated or not."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.mlps.dense.spec import MlpSpec


class Mlp(nn.Module):
    """GELU with the tanh approximation (GPT-2), or SwiGLU (Shazeer 2020): w1 gate, w3 up, w2 down."""

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.gated = spec.gated
        self.w1 = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.bias)
        self.w2 = nn.Linear(spec.ffn_dim, spec.dim, bias=spec.bias)
        if self.gated:
            self.w3 = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        if self.gated:
            hidden_BSF = F.silu(self.w1(x_BSD)) * self.w3(x_BSD)
        else:
            hidden_BSF = F.gelu(self.w1(x_BSD), approximate="tanh")
        out_BSD: Tensor = self.w2(hidden_BSF)
        return out_BSD
