"""Mamba-2's scan, "state space duality" (Dao and Gu, 2024), in PyTorch.

By head, with a state h of P x N numbers: h[t] = exp(dt a) h[t-1] + dt x[t] B[t]^T and y[t] = h[t] C[t]. Within a chunk
it is a product of masked scores, C B^T times decays; from chunk to chunk it is one state. Decays are exponentials of
differences of sums, never quotients, and a sum begins anew with each document: so nothing of one document, not even a
rounding, reaches the next.

It is an operation of its own: a compiler leaves its loop over chunks alone, and only its inputs are kept for the
backward pass, which computes states and scores again, a few chunks at a time.

Shapes: B batch, S positions, H heads, P size of a head, G groups of heads with the same B and C, R heads of a group,
N state size, K chunks at a time, n chunks, Q positions of one, see `chunks.py`. States lie as [B, G, N, R P] here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from pipeline.train.model.kernels.chunks import CHUNK, Chunks

_SCORES = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Numbers of scores that are in memory at a time: on a CPU they stay in its cache."""


def ssd(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    chunks: Chunks,
    initial_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan: y [B, S, H, P] in the type of x, and the state behind the last position [B, H, P, N] in fp32.

    Args:
        x_BSHP: Inputs.
        dt_BSH: Step sizes in fp32, from 0 on; a position with 0 changes nothing.
        a_H: Decay rates in fp32, below 0.
        b_BSGN: What inputs are written by; H / G heads in a row share a group.
        c_BSGN: What outputs are read by.
        chunks: Those of the sequence.
        initial_BHPN: State ahead of the first position; None: zeros.
    """
    masks = (chunks.same_BnQQ, chunks.enters_BnQ, chunks.leaves_BnQ, chunks.passes_Bn)
    return cast(tuple[Tensor, Tensor], _scan(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, initial_BHPN, *masks))


def ssd_entering(dt_BSH: Tensor, a_H: Tensor, c_BSGN: Tensor, chunks: Chunks, state_BHPN: Tensor) -> Tensor:
    """Part of y that comes of a state that enters the sequence, [B, S, H, P] in the type of the state.

    The scan is linear in states: this is for one that is known only when the scan is done.
    """
    (B, S, G, _), (_, H, P, _) = c_BSGN.shape, state_BHPN.shape
    g_BnQH = chunks.cut(dt_BSH * a_H)
    # A document that began before is the first one: no sum of it runs through another.
    within_BnQH = Chunks.causal(g_BnQH.device).to(g_BnQH.dtype) @ g_BnQH
    earlier_nn = torch.ones(chunks.count, chunks.count, dtype=g_BnQH.dtype, device=g_BnQH.device).tril(-1)
    before_BnH = earlier_nn @ within_BnQH[:, :, -1]
    factor_BSH = chunks.join(within_BnQH + before_BnH[:, :, None]).exp()
    if chunks.bounds_BS is not None:
        factor_BSH = factor_BSH * (chunks.bounds_BS < 0)[..., None]
    read_BGSX = c_BSGN.to(state_BHPN.dtype).transpose(1, 2) @ _by_groups(state_BHPN, G)
    return read_BGSX.transpose(1, 2).reshape(B, S, H, P) * factor_BSH[..., None]


def ssd_decay(dt_BSH: Tensor, a_H: Tensor, chunks: Chunks) -> Tensor:
    """Factor on an entering state by the end of the sequence, [B, H]; 0 where a document begins in the sequence."""
    decay_BH = (dt_BSH * a_H).sum(1).exp()
    return decay_BH if chunks.bounds_BS is None else decay_BH * (chunks.bounds_BS[:, -1:] < 0)


def ssd_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """One position of `ssd`: y [B, H, P] in the type of x, and the state behind it."""
    repeats = x_BHP.shape[1] // b_BGN.shape[1]
    b_BHN, c_BHN = (m_BGN.to(state_BHPN.dtype).repeat_interleave(repeats, dim=1) for m_BGN in (b_BGN, c_BGN))
    written_BHPN = (x_BHP * dt_BH[..., None])[..., None] * b_BHN[:, :, None]
    state_BHPN = state_BHPN * (dt_BH * a_H).exp()[..., None, None] + written_BHPN
    return (state_BHPN @ c_BHN[..., None])[..., 0].to(x_BHP.dtype), state_BHPN


def _by_groups(state_BHPN: Tensor, groups: int) -> Tensor:
    """[B, H, P, N] -> [B, G, N, R P]."""
    B, _, _, N = state_BHPN.shape
    return state_BHPN.reshape(B, groups, -1, N).transpose(2, 3)


def _by_heads(state_BGNX: Tensor, heads: int) -> Tensor:
    """The reverse of `_by_groups`."""
    B, _, N, _ = state_BGNX.shape
    return state_BGNX.transpose(2, 3).reshape(B, heads, -1, N)


@dataclass(frozen=True)
class _Inputs:
    """Tensors that a scan is of."""

    x_BSHP: Tensor
    dt_BSH: Tensor
    a_H: Tensor
    b_BSGN: Tensor
    c_BSGN: Tensor
    same_BnQQ: Tensor | None
    enters_BnQ: Tensor | None
    leaves_BnQ: Tensor | None
    passes_Bn: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """That of all that is computed."""
        return torch.promote_types(self.x_BSHP.dtype, torch.float32)

    @property
    def groups(self) -> int:
        return self.b_BSGN.shape[2]

    def blocks(self) -> list[_Block]:
        """The chunks of the sequence, as many at a time as may be in memory."""
        B, S, H, _ = self.x_BSHP.shape
        most = _SCORES["cpu" if self.x_BSHP.device.type == "cpu" else "cuda"]
        size, count = max(1, most // (B * H * CHUNK * CHUNK)), -(-S // CHUNK)
        return [_Block(self, begin, min(begin + size, count)) for begin in range(0, count, size)]

    def first(self, initial_BHPN: Tensor | None) -> Tensor:
        """The state ahead of the sequence."""
        if initial_BHPN is not None:
            return _by_groups(initial_BHPN.to(self.dtype), self.groups)
        (B, _, H, P), (_, _, G, N) = self.x_BSHP.shape, self.b_BSGN.shape
        return self.x_BSHP.new_zeros(B, G, N, H // G * P, dtype=self.dtype)


@dataclass(frozen=True)
class _Block:
    """Some chunks of a sequence and what is computed of them."""

    inputs: _Inputs
    begin: int
    end: int

    def cut(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] -> [B, K, Q, ...], filled up with zeros."""
        x_BS = x_BS[:, self.begin * CHUNK : self.end * CHUNK].to(self.inputs.dtype)
        if missing := (self.end - self.begin) * CHUNK - x_BS.shape[1]:
            x_BS = F.pad(x_BS, (0, 0) * (x_BS.ndim - 2) + (0, missing))
        return _split(x_BS, 1, self.end - self.begin)

    def put(self, x_BKQ: Tensor, to_BS: Tensor) -> None:
        """The reverse of `cut`: write them to their place."""
        place_BS = to_BS[:, self.begin * CHUNK : self.end * CHUNK]
        place_BS.copy_(x_BKQ.flatten(1, 2)[:, : place_BS.shape[1]])

    def grouped(self, x_BKQHP: Tensor) -> Tensor:
        """-> [B, K, G, Q, R P]."""
        return _split(x_BKQHP, 3, self.inputs.groups).flatten(4).transpose(2, 3)

    def headed(self, x_BKGQX: Tensor) -> Tensor:
        """The reverse of `grouped`."""
        B, K, _, Q, _ = x_BKGQX.shape
        return x_BKGQX.transpose(2, 3).reshape(B, K, Q, self.inputs.x_BSHP.shape[2], -1)

    def state_heads(self, state_BKGNX: Tensor) -> Tensor:
        """-> [B, K, H, P, N]."""
        return (
            _split(state_BKGNX, 4, self.inputs.x_BSHP.shape[2] // self.inputs.groups)
            .permute(0, 1, 2, 4, 5, 3)
            .flatten(2, 3)
        )

    @cached_property
    def x_BKQHP(self) -> Tensor:
        return self.cut(self.inputs.x_BSHP)

    @cached_property
    def dt_BKQH(self) -> Tensor:
        return self.cut(self.inputs.dt_BSH)

    @cached_property
    def b_BKGQN(self) -> Tensor:
        return self.cut(self.inputs.b_BSGN).transpose(2, 3)

    @cached_property
    def c_BKGQN(self) -> Tensor:
        return self.cut(self.inputs.c_BSGN).transpose(2, 3)

    @cached_property
    def same_BKQQ(self) -> Tensor:
        same_BnQQ = self.inputs.same_BnQQ
        if same_BnQQ is None:
            return Chunks.causal(self.inputs.x_BSHP.device)[None, None]
        return same_BnQQ[:, self.begin : self.end]

    @cached_property
    def sums_BKQH(self) -> Tensor:
        """Logarithm of the decay since the chunk or the document began."""
        return self.same_BKQQ.to(self.inputs.dtype) @ (self.dt_BKQH * self.inputs.a_H.to(self.inputs.dtype))

    @cached_property
    def enter_BKQH(self) -> Tensor:
        """Share of the entering state that a position sees."""
        return self._hidden(self.sums_BKQH, self.inputs.enters_BnQ).exp()

    @cached_property
    def leave_BKQH(self) -> Tensor:
        """Share of what a position writes in the leaving state."""
        return self._hidden(self.sums_BKQH[:, :, -1:] - self.sums_BKQH, self.inputs.leaves_BnQ).exp()

    @cached_property
    def pass_BKH(self) -> Tensor:
        """Share of the entering state in the leaving one."""
        return self._hidden(self.sums_BKQH[:, :, -1], self.inputs.passes_Bn).exp()

    def _hidden(self, logarithm_BK: Tensor, seen_Bn: Tensor | None) -> Tensor:
        if seen_Bn is None:
            return logarithm_BK
        return logarithm_BK.masked_fill(~seen_Bn[:, self.begin : self.end, ..., None], -torch.inf)

    @cached_property
    def decays_BKHQQ(self) -> Tensor:
        """Share of what position j writes that i reads."""
        sums_BKHQ = self.sums_BKQH.transpose(2, 3).contiguous()
        hidden_BKQQ = torch.zeros_like(self.same_BKQQ, dtype=sums_BKHQ.dtype).masked_fill(~self.same_BKQQ, -torch.inf)
        return (sums_BKHQ[..., None] - sums_BKHQ[..., None, :]).add_(hidden_BKQQ[:, :, None]).exp_()

    @cached_property
    def products_BKGQQ(self) -> Tensor:
        """C B^T."""
        return self.c_BKGQN @ self.b_BKGQN.mT

    def times_products(self, m_BKHQQ: Tensor) -> Tensor:
        """The products of the group of each head times this."""
        m_BKGRQQ = _split(m_BKHQQ, 2, self.inputs.groups)
        return (m_BKGRQQ * self.products_BKGQQ[:, :, :, None]).flatten(2, 3)

    @cached_property
    def dx_BKQHP(self) -> Tensor:
        """Inputs times their step sizes."""
        return self.x_BKQHP * self.dt_BKQH[..., None]

    @cached_property
    def kept_BKGQX(self) -> Tensor:
        """Inputs by step size and by their share in the leaving state."""
        return self.grouped(self.x_BKQHP * (self.dt_BKQH * self.leave_BKQH)[..., None])

    def chain(self, state_BGNX: Tensor) -> tuple[Tensor, Tensor]:
        """The state that enters each chunk, [B, K, G, N, R P], and the one that leaves the last."""
        written = (self.b_BKGQN.mT @ self.kept_BKGQX).unbind(1)
        states = [state_BGNX]
        for written_BGNX, pass_BG1X in zip(written, self.by_numbers(self.pass_BKH), strict=True):
            states.append(torch.addcmul(written_BGNX, states[-1], pass_BG1X))
        return _stack(states[:-1]), states[-1]

    def by_numbers(self, factor_BKH: Tensor) -> tuple[Tensor, ...]:
        """Factors on states, by chunk: [B, G, 1, R P]."""
        size = self.inputs.x_BSHP.shape[3]
        factor_BKGR = _split(factor_BKH, 2, self.inputs.groups)
        return factor_BKGR.repeat_interleave(size, dim=3)[:, :, :, None].unbind(1)


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """A dimension becomes two, the first of this size."""
    return x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])


def _stack(states: list[Tensor]) -> Tensor:
    return torch.stack(states, 1) if len(states) > 1 else states[0][:, None]


@torch.library.custom_op("pipeline::ssd", mutates_args=())
def _scan(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    initial_BHPN: Tensor | None,
    same_BnQQ: Tensor | None,
    enters_BnQ: Tensor | None,
    leaves_BnQ: Tensor | None,
    passes_Bn: Tensor | None,
) -> tuple[Tensor, Tensor]:
    inputs = _Inputs(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, same_BnQQ, enters_BnQ, leaves_BnQ, passes_Bn)
    y_BSHP = torch.empty_like(x_BSHP, memory_format=torch.contiguous_format)
    state_BGNX = inputs.first(initial_BHPN)
    for block in inputs.blocks():
        entering_BKGNX, state_BGNX = block.chain(state_BGNX)
        within_BKHQP = block.times_products(block.decays_BKHQQ) @ block.dx_BKQHP.transpose(2, 3)
        entered_BKQHP = block.headed(block.c_BKGQN @ entering_BKGNX)
        out_BKQHP = torch.addcmul(within_BKHQP.transpose(2, 3), entered_BKQHP, block.enter_BKQH[..., None])
        block.put(out_BKQHP, y_BSHP)
    return y_BSHP, _by_heads(state_BGNX, x_BSHP.shape[2]).clone(memory_format=torch.contiguous_format)


@_scan.register_fake
def _(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, _, H, P = x_BSHP.shape
    dtype = torch.promote_types(x_BSHP.dtype, torch.float32)
    state_BHPN = x_BSHP.new_empty(B, H, P, b_BSGN.shape[3], dtype=dtype)
    return torch.empty_like(x_BSHP, memory_format=torch.contiguous_format), state_BHPN


@torch.library.custom_op("pipeline::ssd_backward", mutates_args=())
def _scan_backward(
    dy_BSHP: Tensor,
    dstate_BHPN: Tensor,
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    initial_BHPN: Tensor | None,
    same_BnQQ: Tensor | None,
    enters_BnQ: Tensor | None,
    leaves_BnQ: Tensor | None,
    passes_Bn: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six inputs, that of the initial state also where there is none."""
    inputs = _Inputs(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, same_BnQQ, enters_BnQ, leaves_BnQ, passes_Bn)
    into_x, into_dt, into_b, into_c = (
        torch.empty_like(m_BS, memory_format=torch.contiguous_format) for m_BS in (x_BSHP, dt_BSH, b_BSGN, c_BSGN)
    )
    into_a_H = torch.zeros_like(a_H, dtype=inputs.dtype)
    steps, state_BGNX = [], inputs.first(initial_BHPN)
    for block in inputs.blocks():
        entering_BKGNX, state_BGNX = block.chain(state_BGNX)
        steps.append(entering_BKGNX)
    into_state_BGNX = inputs.first(dstate_BHPN)
    for block in reversed(inputs.blocks()):
        into_state_BGNX = _differentiate_block(
            block, steps.pop(), into_state_BGNX, dy_BSHP, into_x, into_dt, into_a_H, into_b, into_c
        )
    into_state_BHPN = _by_heads(into_state_BGNX, x_BSHP.shape[2]).clone(memory_format=torch.contiguous_format)
    return into_x, into_dt, into_a_H.to(a_H.dtype), into_b, into_c, into_state_BHPN


def _differentiate_block(
    block: _Block,
    entering_BKGNX: Tensor,
    into_state_BGNX: Tensor,
    dy_BSHP: Tensor,
    into_x_BSHP: Tensor,
    into_dt_BSH: Tensor,
    into_a_H: Tensor,
    into_b_BSGN: Tensor,
    into_c_BSGN: Tensor,
) -> Tensor:
    """Write the gradients of a block's inputs; the gradient of its leaving state becomes that of its entering one."""
    groups, inputs = block.inputs.groups, block.inputs
    dy_BKQHP = block.cut(dy_BSHP)
    # States, from the last chunk to the first.
    read_BKQHP = dy_BKQHP * block.enter_BKQH[..., None]
    from_reads = (block.c_BKGQN.mT @ block.grouped(read_BKQHP)).unbind(1)
    later: list[Tensor] = []
    for from_read_BGNX, pass_BG1X in reversed(list(zip(from_reads, block.by_numbers(block.pass_BKH), strict=True))):
        later.insert(0, into_state_BGNX)
        into_state_BGNX = torch.addcmul(from_read_BGNX, into_state_BGNX, pass_BG1X)
    leaving_BKGNX = _stack(later)
    into_pass_BKH = block.state_heads(entering_BKGNX * leaving_BKGNX).sum((3, 4)) * block.pass_BKH
    # Scores.
    into_decays_BKHQQ = (dy_BKQHP.transpose(2, 3) @ block.dx_BKQHP.permute(0, 1, 3, 4, 2)).mul_(block.decays_BKHQQ)
    into_products_BKGQQ = _split(into_decays_BKHQQ, 2, groups).sum(3)
    into_scores_BKHQQ = block.times_products(into_decays_BKHQQ)
    # What a position writes it reads without a decay: no gradient, and not the rounding of two that cancel.
    into_scores_BKHQQ.diagonal(dim1=-2, dim2=-1).zero_()
    into_sums_BKHQ = into_scores_BKHQQ.sum(-1) - into_scores_BKHQQ.sum(-2)
    # C, with the entering states.
    seen_BKHQN = read_BKQHP.transpose(2, 3) @ block.state_heads(entering_BKGNX)
    seen_BKGRQN = _split(seen_BKHQN, 2, groups)
    into_sums_BKHQ += (seen_BKGRQN * block.c_BKGQN[:, :, :, None]).sum(-1).flatten(2, 3)
    into_c_BKGQN = into_products_BKGQQ @ block.b_BKGQN + seen_BKGRQN.sum(3)
    # B and x, with the leaving states.
    into_b_BKGQN = into_products_BKGQQ.mT @ block.c_BKGQN + block.kept_BKGQX @ leaving_BKGNX.mT
    from_state_BKQHP = block.headed(block.b_BKGQN @ leaving_BKGNX)
    from_state_BKQHP = from_state_BKQHP * block.leave_BKQH[..., None]
    scores_BKHQQ = block.times_products(block.decays_BKHQQ)
    into_dx_BKQHP = (scores_BKHQQ.mT @ dy_BKQHP.transpose(2, 3)).transpose(2, 3) + from_state_BKQHP
    # Sums, then what they are of.
    into_leave_BKQH = (from_state_BKQHP * block.dx_BKQHP).sum(-1)
    into_leave_BKQH[:, :, -1] = 0
    into_sums_BKQH = into_sums_BKHQ.transpose(2, 3) - into_leave_BKQH
    into_sums_BKQH[:, :, -1] += into_leave_BKQH.sum(2) + into_pass_BKH
    into_logarithm_BKQH = block.same_BKQQ.to(inputs.dtype).mT @ into_sums_BKQH
    into_a_H += (into_logarithm_BKQH * block.dt_BKQH).sum((0, 1, 2))
    into_dt_BKQH = into_logarithm_BKQH * inputs.a_H + (into_dx_BKQHP * block.x_BKQHP).sum(-1)
    block.put(into_dx_BKQHP * block.dt_BKQH[..., None], into_x_BSHP)
    block.put(into_dt_BKQH, into_dt_BSH)
    block.put(into_b_BKGQN.transpose(2, 3), into_b_BSGN)
    block.put(into_c_BKGQN.transpose(2, 3), into_c_BSGN)
    return into_state_BGNX


@_scan_backward.register_fake
def _(dy_BSHP: Tensor, dstate_BHPN: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    empty = [torch.empty_like(m, memory_format=torch.contiguous_format) for m in inputs[:5]]
    return *empty, torch.empty_like(dstate_BHPN, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy_BSHP: Tensor, dstate_BHPN: Tensor) -> tuple[Tensor | None, ...]:
    *into, into_initial = _scan_backward(dy_BSHP, dstate_BHPN, *ctx.saved_tensors)
    return *into, into_initial if ctx.needs_input_grad[5] else None, None, None, None, None


_scan.register_autograd(_differentiate, setup_context=_keep)


def _flops(x: Sequence[int], dt: Sequence[int], a: Sequence[int], b: Sequence[int], *others: Any, **_: Any) -> int:
    """Operations of a pass: states are written and read, scores of a chunk are made and multiplied."""
    (B, S, H, P), (G, N) = x, b[2:]
    positions = B * -(-S // CHUNK) * CHUNK
    return positions * (4 * H * P * N + 2 * CHUNK * (G * N + H * P))


def _backward_flops(dy: Sequence[int], dstate: Sequence[int], *inputs: Sequence[int], **_: Any) -> int:
    """States are written again and read for C, their gradients are made and read for B and x; scores, and theirs."""
    (B, S, H, P), (G, N) = inputs[0], inputs[3][2:]
    positions = B * -(-S // CHUNK) * CHUNK
    return positions * (10 * H * P * N + 2 * CHUNK * (3 * G * N + 2 * H * P))


register_flop_formula(torch.ops.pipeline.ssd)(_flops)
register_flop_formula(torch.ops.pipeline.ssd_backward)(_backward_flops)
