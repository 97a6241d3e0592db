"""The feed-forward half of a block: one hidden layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.mlps.dense.spec import MlpSpec


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_exact": F.gelu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "geglu_exact": F.gelu,
    "relu": F.relu,
    "relu2": _relu2,
}


class Mlp(nn.Module):
    """An activation of w1, gated by w3 (Shazeer 2020) or not, and w2 down to the stream."""

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.gated = spec.gated
        self.activation = _ACTIVATIONS[spec.kind]
        self.w1 = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.bias)
        self.w2 = nn.Linear(spec.ffn_dim, spec.dim, bias=spec.bias)
        if self.gated:
            self.w3 = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        hidden_BSF = self.activation(self.w1(x_BSD))
        if self.gated:
            hidden_BSF = hidden_BSF * self.w3(x_BSD)
        out_BSD: Tensor = self.w2(hidden_BSF)
        return out_BSD
