"""One layer of the decoder."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.train.model.attention import Attention, Context
from pipeline.train.model.config import LayerSpec
from pipeline.train.model.mlp import Mlp
from pipeline.train.model.norm import build_norm


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
        spec: Its parts.
        index: Which layer this is, to find its state in the context.
    """

    def __init__(self, spec: LayerSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.mixer_norm = build_norm(spec.norm, spec.mixer.dim)
        self.mixer = Attention(spec.mixer)
        self.mlp_norm = build_norm(spec.norm, spec.mlp.dim)
        self.mlp = Mlp(spec.mlp)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        state = None if context.states is None else context.states.layers[self.index]
        mixed_BSD: Tensor = x_BSD + self.mixer(self.mixer_norm(x_BSD), context, state)
        out_BSD: Tensor = mixed_BSD + self.mlp(self.mlp_norm(mixed_BSD))
        if context.watch is not None:
            context.watch.output(self, out_BSD)
        return out_BSD
