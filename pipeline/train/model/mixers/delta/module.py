"""Gated delta rules: gated delta net (Yang et al. 2024) and Kimi delta attention (Kimi Team 2025).

Shapes: B batch, S positions, D width, K key heads, H value heads, N size of a key head, P size of a value head; with
pieces of a sequence B and S are theirs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.delta_rule import delta_step
from pipeline.train.model.mixers.delta.spec import DeltaSpec, KdaSpec
from pipeline.train.model.mixers.fp32_vectors import Fp32Vectors
from pipeline.train.model.mixers.recurrence import Convolution, RecurrentState, convolve, counted, tail
from pipeline.train.model.mixers.sequence import SequencePieces
from pipeline.train.model.norm import build_norm
from pipeline.train.model.states import MixerState
from pipeline.train.torch_compat.core import own_part

_EPS = 1e-6
"""Added to the sum of squares of a query or key head."""


class GatedDelta(nn.Module):
    """A state of each value head, in which a key replaces a share beta of its old value by a new one.

    S = exp(g) S; S = S + beta k (v - S^T k)^T; o = S^T q / sqrt(N). Queries, keys and values come through causal
    convolutions; queries and keys have length 1. The result of a head is normalized, and then gated: by silu, or
    where each dimension of a key decays at a rate of its own by a sigmoid. With tensor parallelism a rank has some of
    the key heads and the value heads that share them, and K and H are those it has.
    """

    def __init__(self, spec: DeltaSpec) -> None:
        super().__init__()
        self.spec = spec
        for matrix in spec.matrices:
            self.add_module(matrix.name, nn.Linear(matrix.columns, matrix.rows, bias=False))
        self.conv_q = Convolution(spec.keys_dim, spec.conv_size, bias=False)
        self.conv_k = Convolution(spec.keys_dim, spec.conv_size, bias=False)
        self.conv_v = Convolution(spec.values_dim, spec.conv_size, bias=False)
        self.decay = Fp32Vectors(spec, "decay")
        self.norm = build_norm(spec.norm, spec.value_dim)

    def new_state(self, max_length: int | None) -> RecurrentState:
        """An empty state for generation; see `Decoder.new_states`."""
        return RecurrentState()

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        assert state is None or isinstance(state, RecurrentState)
        module = self.get_submodule
        inputs = [module(name)(x_BSD) for name in ("wq", "wk", "wv")]
        beta_BSH = self.spec.beta_max * torch.sigmoid(module("wb")(x_BSD).float())
        o_BSHP = self._heads(inputs, beta_BSH, self._decays(x_BSD), context, state)
        out_BSHP = self.norm(o_BSHP).float() * torch.unflatten(self._gate(x_BSD), -1, (-1, self.spec.value_dim))
        out_BSD: Tensor = module("wo")(out_BSHP.flatten(2).to(o_BSHP.dtype))
        return out_BSD

    def _decays(self, x_BSD: Tensor) -> Tensor:
        """Logarithms of decays in fp32, [B, S, H] of heads, or [B, S, H, N] of the dimensions of keys."""
        module = self.get_submodule
        a_log_H, bias = (own_part(self.decay.get_parameter(name)) for name in ("a_log", "dt_bias"))
        if not isinstance(self.spec, KdaSpec):
            return -torch.exp(a_log_H) * F.softplus(module("wa")(x_BSD).float() + bias)
        steps_BSC = F.softplus(module("wab")(module("waa")(x_BSD)).float() + bias)
        return -torch.exp(a_log_H)[:, None] * torch.unflatten(steps_BSC, -1, (-1, self.spec.key_dim))

    def _gate(self, x_BSD: Tensor) -> Tensor:
        """Factors on the results of all heads, fp32 [B, S, H * P]."""
        module = self.get_submodule
        if isinstance(self.spec, KdaSpec):
            return torch.sigmoid(module("wzb")(module("wza")(x_BSD)).float())
        return F.silu(module("wz")(x_BSD).float())

    def _heads(
        self, inputs: list[Tensor], beta_BSH: Tensor, g: Tensor, context: LayerContext, state: RecurrentState | None
    ) -> Tensor:
        """Results of the heads, [B, S, H, P]; the inputs are queries, keys and values ahead of their convolutions."""
        spec, pieces = self.spec, context.pieces
        before_BKC, entering_BHNP = (None, None) if state is None else state.read(len(beta_BSH))
        convolved, inputs_BSC = convolve((self.conv_q, self.conv_k, self.conv_v), inputs, context, before_BKC)
        q_BSKN, k_BSKN = (_of_length_1(torch.unflatten(each, -1, (-1, spec.key_dim))) for each in convolved[:2])
        v_BSHP = torch.unflatten(convolved[2], -1, (-1, spec.value_dim))
        rule = context.recurrent.delta_rule
        if state is not None:
            g, beta_BSH = counted(context, g), counted(context, beta_BSH)
            inputs_of_rule = (q_BSKN, k_BSKN, v_BSHP, g, beta_BSH)
            if g.shape[1] == 1 and entering_BHNP is not None:  # a chunk for one token would cost as much as for 64
                o_BSHP, last_BHNP = _step(*inputs_of_rule, entering_BHNP)
            else:
                o_BSHP, last_BHNP = rule(*inputs_of_rule, Chunks(g.shape[1]), entering_BHNP)
            state.write(tail(context, inputs_BSC, before_BKC, spec.conv_size), last_BHNP)
            return o_BSHP
        assert pieces is not None
        g, beta_BSH = pieces.split(g), pieces.split(beta_BSH)
        if pieces.cut is not None:
            entering_BHNP = self._entering(q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, context, pieces)
        o_BSHP, _ = rule(q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, pieces.chunks, entering_BHNP)
        return pieces.join(o_BSHP)

    def _entering(
        self,
        q_BSKN: Tensor,
        k_BSKN: Tensor,
        v_BSHP: Tensor,
        g: Tensor,
        beta_BSH: Tensor,
        context: LayerContext,
        pieces: SequencePieces,
    ) -> Tensor:
        """The state that enters each piece.

        What a piece makes of an entering state is a matrix times it, plus a state. With the columns of the identity
        after those of an empty state, and no values for them, both come out at once.
        """
        keys, values = self.spec.key_dim, self.spec.value_dim
        start_BHNW = torch.eye(keys, keys + values, device=g.device).roll(values, dims=1)
        start_BHNW = start_BHNW.expand(len(v_BSHP), v_BSHP.shape[2], -1, -1)
        wide_BSHW = F.pad(v_BSHP, (0, keys))
        _, last_BHNW = context.recurrent.delta_rule(q_BSKN, k_BSKN, wide_BSHW, g, beta_BSH, pieces.chunks, start_BHNW)

        def follow(sent: Tensor, state: Tensor) -> Tensor:
            return sent[..., values:] @ state + sent[..., :values]

        return pieces.entering(last_BHNW, last_BHNW[..., :values], follow)


def _step(
    q_B1KN: Tensor, k_B1KN: Tensor, v_B1HP: Tensor, g: Tensor, beta_B1H: Tensor, state_BHNP: Tensor
) -> tuple[Tensor, Tensor]:
    """Output of sequences of one position, by `delta_step`."""
    g_BHX = g[:, 0] if g.ndim == 4 else g[:, 0, :, None]
    o_BHP, last_BHNP = delta_step(q_B1KN[:, 0], k_B1KN[:, 0], v_B1HP[:, 0], g_BHX, beta_B1H[:, 0], state_BHNP)
    return o_BHP[:, None], last_BHNP


def _of_length_1(x_BSKN: Tensor) -> Tensor:
    """[B, S, K, N], each head divided by its length."""
    x = x_BSKN.float()
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)).to(x_BSKN.dtype)
