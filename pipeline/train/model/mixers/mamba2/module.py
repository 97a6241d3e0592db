"""Mamba-2 (Dao and Gu 2024).

Shapes: B batch, S positions, D width, H heads, P size of a head, I = H * P, G groups, N size of the state; with pieces
of a sequence B and S are theirs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.train.model.context import LayerContext
from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.ssd import ssd_decay, ssd_entering, ssd_step
from pipeline.train.model.mixers.fp32_vectors import Fp32Vectors
from pipeline.train.model.mixers.mamba2.spec import Mamba2Spec
from pipeline.train.model.mixers.recurrence import Convolution, RecurrentState, convolve, counted, tail
from pipeline.train.model.mixers.sequence import SequencePieces
from pipeline.train.model.norm import GroupedRMSNorm
from pipeline.train.model.states import MixerState
from pipeline.train.torch_compat.core import own_part


class Mamba2(nn.Module):
    """A state of each head, h = exp(dt A) h + dt x B^T, which is read as y = h C + d x.

    x, B and C come through a causal convolution, and each has its own matrix, so that tp cuts them by heads and by
    groups. The result is gated, normalized by groups of heads, and multiplied out. With tensor parallelism a rank has
    some of the heads and their groups, and H and G are those it has.
    """

    def __init__(self, spec: Mamba2Spec) -> None:
        super().__init__()
        self.spec = spec
        for matrix in spec.matrices:
            self.add_module(matrix.name, nn.Linear(matrix.columns, matrix.rows, bias=False))
        self.conv_x = Convolution(spec.inner_dim, spec.conv_size, bias=spec.conv_bias)
        self.conv_b = Convolution(spec.group_dim, spec.conv_size, bias=spec.conv_bias)
        self.conv_c = Convolution(spec.group_dim, spec.conv_size, bias=spec.conv_bias)
        self.decay = Fp32Vectors(spec, "decay")
        self.norm = GroupedRMSNorm(spec.norm, spec.inner_dim, spec.norm_groups)

    def new_state(self, max_length: int | None) -> RecurrentState:
        """An empty state for generation; see `Decoder.new_states`."""
        return RecurrentState()

    def forward(self, x_BSD: Tensor, context: LayerContext, state: MixerState | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        assert state is None or isinstance(state, RecurrentState)
        module = self.get_submodule
        z_BSI, dt_BSH = module("wz")(x_BSD), module("wdt")(x_BSD)
        y_BSI = self._heads([module(name)(x_BSD) for name in ("wx", "wb", "wc")], dt_BSH, context, state)
        y_BSI = self.norm(y_BSI * F.silu(z_BSI.float())).to(z_BSI.dtype)
        out_BSD: Tensor = module("wo")(y_BSI)
        return out_BSD

    def _heads(
        self, inputs: list[Tensor], dt_BSH: Tensor, context: LayerContext, state: RecurrentState | None
    ) -> Tensor:
        """Results of all heads, fp32 [B, S, I]; the inputs are x, B and C."""
        spec, pieces = self.spec, context.pieces
        before_BKC, entering_BHPN = (None, None) if state is None else state.read(len(dt_BSH))
        convolved, inputs_BSC = convolve((self.conv_x, self.conv_b, self.conv_c), inputs, context, before_BKC)
        x_BSHP = torch.unflatten(convolved[0], -1, (-1, spec.head_dim))
        b_BSGN, c_BSGN = (torch.unflatten(each, -1, (-1, spec.state_dim)) for each in convolved[1:])
        a_log_H, bias_H, d_H = (own_part(self.decay.get_parameter(name)) for name in ("a_log", "dt_bias", "d"))
        a_H = -torch.exp(a_log_H)
        dt_BSH = self._steps(dt_BSH if pieces is None else pieces.split(dt_BSH), bias_H)
        if state is not None:
            dt_BSH = counted(context, dt_BSH)
            if dt_BSH.shape[1] == 1 and entering_BHPN is not None:  # a chunk for one token would cost as much as for 64
                one = (x_BSHP[:, 0], dt_BSH[:, 0], a_H, b_BSGN[:, 0], c_BSGN[:, 0])
                y_BHP, last_BHPN = ssd_step(*one, entering_BHPN)
                y_BSHP = y_BHP[:, None]
            else:
                chunks = Chunks(dt_BSH.shape[1])
                y_BSHP, last_BHPN = context.recurrent.ssd(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, chunks, entering_BHPN)
            state.write(tail(context, inputs_BSC, before_BKC, spec.conv_size), last_BHPN)
        else:
            assert pieces is not None
            y_BSHP, last_BHPN = context.recurrent.ssd(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, pieces.chunks)
            if pieces.cut is not None:
                factor_BH = ssd_decay(dt_BSH, a_H, pieces.chunks)
                entering_BHPN = self._entering(factor_BH, last_BHPN, pieces)
                y_BSHP = y_BSHP + ssd_entering(dt_BSH, a_H, c_BSGN, pieces.chunks, entering_BHPN)
        y_BSI = (y_BSHP.float() + d_H[:, None] * x_BSHP.float()).flatten(2)
        return y_BSI if pieces is None else pieces.join(y_BSI)

    def _steps(self, dt_BSH: Tensor, bias_H: Tensor) -> Tensor:
        """Steps of time, fp32."""
        spec = self.spec
        dt_BSH = F.softplus(dt_BSH.float() + bias_H)
        return dt_BSH if spec.dt_min == 0 and spec.dt_max is None else dt_BSH.clamp(spec.dt_min, spec.dt_max)

    def _entering(self, factor_BH: Tensor, last_BHPN: Tensor, pieces: SequencePieces) -> Tensor:
        """The state that enters each piece, of what each multiplies it with and adds to it."""
        shape = last_BHPN.shape[-2:]

        def follow(sent: Tensor, state: Tensor) -> Tensor:
            return sent[..., -1, None, None] * state + torch.unflatten(sent[..., :-1], -1, shape)

        sent = torch.cat((last_BHPN.flatten(2), factor_BH[..., None]), dim=-1)
        return pieces.entering(sent, last_BHPN, follow)
