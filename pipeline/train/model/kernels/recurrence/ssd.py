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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from pipeline.train.model.kernels.recurrence.chunks import LEAST, Chunks, share
from pipeline.train.model.mixers.recurrent_spec import CHUNK

_RUN = 16
"""Heads that a CPU computes at a time, at most, in one chunk of one row: their state and scores stay in its cache."""
_SCORES = 1 << 26
"""Numbers of scores that are in the memory of a GPU at a time."""


def ssd(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    chunks: Chunks,
    initial_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan: y [B, S, H, P] in the type of x, and the state after the last position [B, H, P, N] in fp32.

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
    state_BGNX = state_BHPN.reshape(B, G, H // G * P, -1).transpose(2, 3)
    read_BGSX = c_BSGN.to(state_BHPN.dtype).transpose(1, 2) @ state_BGNX
    return read_BGSX.transpose(1, 2).reshape(B, S, H, P) * factor_BSH[..., None]


def ssd_decay(dt_BSH: Tensor, a_H: Tensor, chunks: Chunks) -> Tensor:
    """Factor on an entering state by the end of the sequence, [B, H]; 0 where a document begins in the sequence."""
    decay_BH = (dt_BSH * a_H).sum(1).exp()
    return decay_BH if chunks.bounds_BS is None else decay_BH * (chunks.bounds_BS[:, -1:] < 0)


def ssd_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """One position of `ssd`: y [B, H, P] in the type of x, and the state after it."""
    repeats = x_BHP.shape[1] // b_BGN.shape[1]
    b_BHN, c_BHN = (m_BGN.to(state_BHPN.dtype).repeat_interleave(repeats, dim=1) for m_BGN in (b_BGN, c_BGN))
    written_BHPN = (x_BHP * dt_BH[..., None])[..., None] * b_BHN[:, :, None]
    state_BHPN = state_BHPN * (dt_BH * a_H).exp()[..., None, None] + written_BHPN
    return (state_BHPN @ c_BHN[..., None])[..., 0].to(x_BHP.dtype), state_BHPN


@dataclass(frozen=True)
class _Documents:
    """Masks of the chunks of some rows, see `Chunks`, and the functions that apply them."""

    length: int
    dtype: torch.dtype
    same_BnQQ: Tensor
    enters_BnQ: Tensor | None
    leaves_BnQ: Tensor | None
    passes_Bn: Tensor | None

    def cut(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] -> [B, n, Q, ...], filled up with zeros."""
        return Chunks(self.length).cut(x_BS.to(self.dtype))

    @cached_property
    def ones_BnQQ(self) -> Tensor:
        return self.same_BnQQ.to(self.dtype)


@dataclass(frozen=True)
class _Heads:
    """Some heads of a group: logarithms and factors of decays for all positions."""

    heads: slice
    x_BSRP: Tensor
    dt_BnQR: Tensor
    a_R: Tensor
    sums_BnQR: Tensor
    """Logarithm of the decay since the chunk or the document began."""
    enter_BnQR: Tensor
    """Share of the entering state that a position sees."""
    leave_BnQR: Tensor
    """Share of what a position writes in the leaving state."""
    pass_BnR: Tensor
    """Share of the entering state in the leaving one."""

    @classmethod
    def of(cls, heads: slice, x_BSRP: Tensor, dt_BSR: Tensor, a_R: Tensor, documents: _Documents) -> _Heads:
        dt_BnQR, a_R = documents.cut(dt_BSR), a_R.to(documents.dtype)
        sums_BnQR = documents.ones_BnQQ @ (dt_BnQR * a_R)
        last_BnR = sums_BnQR[:, :, -1]
        return cls(
            heads,
            x_BSRP,
            dt_BnQR,
            a_R,
            sums_BnQR,
            share(sums_BnQR, _of_heads(documents.enters_BnQ)),
            share(last_BnR[:, :, None] - sums_BnQR, _of_heads(documents.leaves_BnQ)),
            share(last_BnR, _of_heads(documents.passes_Bn)),
        )

    @cached_property
    def written_BnQR(self) -> Tensor:
        """Factor on what a position leaves behind."""
        return self.dt_BnQR * self.leave_BnQR

    @cached_property
    def rows_BnRQ(self) -> Tensor:
        return self.sums_BnQR.transpose(2, 3).contiguous()


def _of_heads(mask_Bn: Tensor | None) -> Tensor | None:
    """A mask for decays whose last dimension is heads."""
    return None if mask_Bn is None else mask_Bn[..., None]


@dataclass(frozen=True)
class _Group:
    """Heads of one group in some rows."""

    documents: _Documents
    runs: tuple[_Heads, ...]
    """Heads that are computed at a time."""
    blocks: tuple[slice, ...]
    """Chunks that are."""
    b_BnQN: Tensor
    c_BnQN: Tensor

    @cached_property
    def products_BnQQ(self) -> Tensor:
        """C B^T, 0 where a position is hidden."""
        return (self.c_BnQN @ self.b_BnQN.mT).mul_(self.documents.ones_BnQQ)

    @cached_property
    def products_of_others_BnQQ(self) -> Tensor:
        """C B^T as `products_BnQQ`, without the product of a position with itself."""
        return self.products_BnQQ.tril(-1)

    def cut(self, x_BSRP: Tensor, block: slice) -> Tensor:
        """A block of x, [B, K, Q, R, P]."""
        x_BSRP = x_BSRP[:, block.start * CHUNK : block.stop * CHUNK].to(self.documents.dtype)
        if missing := (block.stop - block.start) * CHUNK - x_BSRP.shape[1]:
            x_BSRP = F.pad(x_BSRP, (0, 0, 0, 0, 0, missing))
        return torch.unflatten(x_BSRP, 1, (-1, CHUNK))

    def put(self, x_BKQRP: Tensor, to_BSRP: Tensor, block: slice) -> None:
        """The reverse of `cut`: to its place."""
        place_BSRP = to_BSRP[:, block.start * CHUNK : block.stop * CHUNK]
        place_BSRP.copy_(x_BKQRP.flatten(1, 2)[:, : place_BSRP.shape[1]])

    def decays(self, run: _Heads, block: slice) -> Tensor:
        """Share of what position j writes that i reads, or anything where it is hidden, [B, K, R, Q, Q]."""
        rows_BKRQ = run.rows_BnRQ[:, block]
        return (rows_BKRQ[..., None] - rows_BKRQ[..., None, :]).clamp_(LEAST, 0).exp_()

    def chain(self, run: _Heads, block: slice, x_BKQRP: Tensor, state_BNX: Tensor) -> tuple[Tensor, Tensor]:
        """The state that enters each chunk, [B, K, N, R P], and the one that leaves the last."""
        kept_BKQX = (x_BKQRP * run.written_BnQR[:, block, :, :, None]).flatten(3)
        written_BKNX = self.b_BnQN[:, block].mT @ kept_BKQX
        return _chain(written_BKNX, run.pass_BnR[:, block], state_BNX, reverse=False)


def _chain(written_BKNX: Tensor, pass_BKR: Tensor, state_BNX: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """The state ahead of each chunk, or with `reverse` after it, and the one at the other end; in place."""
    (B, K, N, X), R = written_BKNX.shape, pass_BKR.shape[2]
    state_BNRP, states = state_BNX.view(B, N, R, X // R), list[Tensor]()
    chunks = list(zip(written_BKNX.view(B, K, N, R, X // R).unbind(1), pass_BKR.unbind(1), strict=True))
    for written_BNRP, pass_BR in reversed(chunks) if reverse else chunks:
        states.append(state_BNRP)
        state_BNRP = written_BNRP.addcmul_(state_BNRP, pass_BR[:, None, :, None])
    states = states[::-1] if reverse else states
    stacked_BKNRP = torch.stack(states, 1) if K > 1 else states[0][:, None]
    return stacked_BKNRP.flatten(3), state_BNRP.flatten(2)


def _groups(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    same_BnQQ: Tensor | None,
    enters_BnQ: Tensor | None,
    leaves_BnQ: Tensor | None,
    passes_Bn: Tensor | None,
) -> Iterator[tuple[slice, int, _Group]]:
    """Parts of a scan that are computed one after the other: rows, a group, and what is known of them."""
    (B, S, H, _), G = x_BSHP.shape, b_BSGN.shape[2]
    per_group, count, dtype = H // G, -(-S // CHUNK), torch.promote_types(x_BSHP.dtype, torch.float32)
    if x_BSHP.device.type == "cpu":
        rows, run, block = 1, max(size for size in range(1, _RUN + 1) if per_group % size == 0), 1
    else:
        rows, run, block = B, per_group, max(1, _SCORES // (B * per_group * CHUNK * CHUNK))
    blocks = tuple(slice(begin, min(begin + block, count)) for begin in range(0, count, block))
    for row in range(0, B, rows):
        part = slice(row, row + rows)
        same = Chunks.causal(x_BSHP.device)[None, None] if same_BnQQ is None else same_BnQQ[part]
        masks = (None if mask is None else mask[part] for mask in (enters_BnQ, leaves_BnQ, passes_Bn))
        documents = _Documents(S, dtype, same, *masks)
        for group in range(G):
            begins = range(group * per_group, (group + 1) * per_group, run)
            runs = tuple(
                _Heads.of(heads, x_BSHP[part, :, heads], dt_BSH[part, :, heads], a_H[heads], documents)
                for heads in (slice(begin, begin + run) for begin in begins)
            )
            b_BnQN, c_BnQN = (documents.cut(m_BSGN[part, :, group]) for m_BSGN in (b_BSGN, c_BSGN))
            yield part, group, _Group(documents, runs, blocks, b_BnQN, c_BnQN)


def _first(state_BHPN: Tensor | None, rows: slice, run: _Heads, group: _Group) -> Tensor:
    """A state as it is computed with, [B, N, R P]; None: zeros."""
    if state_BHPN is not None:
        return state_BHPN[rows, run.heads].to(group.documents.dtype).permute(0, 3, 1, 2).flatten(2)
    (B, _, _, N), (R, P) = group.b_BnQN.shape, run.x_BSRP.shape[2:]
    return group.b_BnQN.new_zeros(B, N, R * P)


def _put_state(state_BNX: Tensor, to_BHPN: Tensor, rows: slice, run: _Heads) -> None:
    """The reverse of `_first`: to its place."""
    place_BRPN = to_BHPN[rows, run.heads]
    place_BRPN.copy_(torch.unflatten(state_BNX, 2, place_BRPN.shape[1:3]).permute(0, 2, 3, 1))


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
    y_BSHP, last_BHPN = _empty_results(x_BSHP, b_BSGN)
    masks = (same_BnQQ, enters_BnQ, leaves_BnQ, passes_Bn)
    for rows, _, group in _groups(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, *masks):
        for run in group.runs:
            state_BNX, to_BSRP = _first(initial_BHPN, rows, run, group), y_BSHP[rows, :, run.heads]
            for block in group.blocks:
                x_BKQRP = group.cut(run.x_BSRP, block)
                entering_BKNX, state_BNX = group.chain(run, block, x_BKQRP, state_BNX)
                scores_BKRQQ = group.decays(run, block).mul_(group.products_BnQQ[:, block, None])
                within_BKRQP = scores_BKRQQ @ (x_BKQRP * run.dt_BnQR[:, block, :, :, None]).transpose(2, 3)
                entered_BKQRP = (group.c_BnQN[:, block] @ entering_BKNX).view_as(x_BKQRP)
                entered_BKQRP = entered_BKQRP.mul_(run.enter_BnQR[:, block, :, :, None])
                group.put(entered_BKQRP.add_(within_BKRQP.transpose(2, 3)), to_BSRP, block)
            _put_state(state_BNX, last_BHPN, rows, run)
    return y_BSHP, last_BHPN


def _empty_results(x_BSHP: Tensor, b_BSGN: Tensor) -> tuple[Tensor, Tensor]:
    (B, S, H, P), N = x_BSHP.shape, b_BSGN.shape[-1]
    dtype = torch.promote_types(x_BSHP.dtype, torch.float32)
    return x_BSHP.new_empty(B, S, H, P), x_BSHP.new_empty(B, H, P, N, dtype=dtype)


@_scan.register_fake
def _(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(x_BSHP, b_BSGN)


@torch.library.custom_op("pipeline::ssd_backward", mutates_args=())
def _scan_backward(
    dy_BSHP: Tensor,
    dlast_BHPN: Tensor,
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
    into_x, into_dt, into_a, into_b, into_c, into_initial = _empty_gradients(
        x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, dlast_BHPN
    )
    into_a.zero_()
    masks = (same_BnQQ, enters_BnQ, leaves_BnQ, passes_Bn)
    for rows, number, group in _groups(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, *masks):
        shared = _SharedGradients(*map(torch.zeros_like, (group.products_BnQQ, group.b_BnQN, group.c_BnQN)))
        for run in group.runs:
            state_BNX, entering = _first(initial_BHPN, rows, run, group), list[Tensor]()
            for block in group.blocks:
                entering_BKNX, state_BNX = group.chain(run, block, group.cut(run.x_BSRP, block), state_BNX)
                entering.append(entering_BKNX)
            into_state_BNX = _first(dlast_BHPN, rows, run, group)
            into_sums_BnQR, into_dt_BnQR = torch.empty_like(run.sums_BnQR), torch.empty_like(run.sums_BnQR)
            dy_BSRP, into_x_BSRP = dy_BSHP[rows, :, run.heads], into_x[rows, :, run.heads]
            for block in reversed(group.blocks):
                into_dx_BKQRP, into_sums_BnQR[:, block], into_state_BNX = _differentiate_block(
                    group, run, block, group.cut(dy_BSRP, block), entering.pop(), into_state_BNX, shared
                )
                into_dt_BnQR[:, block] = (into_dx_BKQRP * group.cut(run.x_BSRP, block)).sum(-1)
                group.put(into_dx_BKQRP.mul_(run.dt_BnQR[:, block, :, :, None]), into_x_BSRP, block)
            into_logarithm_BnQR = group.documents.ones_BnQQ.mT @ into_sums_BnQR
            into_a[run.heads] += (into_logarithm_BnQR * run.dt_BnQR).sum((0, 1, 2))
            into_dt_BnQR += into_logarithm_BnQR * run.a_R
            into_dt[rows, :, run.heads] = into_dt_BnQR.flatten(1, 2)[:, : dt_BSH.shape[1]]
            _put_state(into_state_BNX, into_initial, rows, run)
        into_b_BnQN, into_c_BnQN = shared.of_products(group)
        into_b[rows, :, number] = into_b_BnQN.flatten(1, 2)[:, : dt_BSH.shape[1]]
        into_c[rows, :, number] = into_c_BnQN.flatten(1, 2)[:, : dt_BSH.shape[1]]
    return into_x, into_dt, into_a, into_b, into_c, into_initial


@dataclass(frozen=True)
class _SharedGradients:
    """Gradients that all heads of a group add to."""

    products_BnQQ: Tensor
    b_BnQN: Tensor
    c_BnQN: Tensor

    def of_products(self, group: _Group) -> tuple[Tensor, Tensor]:
        """Those of B and C, with what comes of their products."""
        products_BnQQ = self.products_BnQQ * group.documents.ones_BnQQ
        into_b_BnQN = self.b_BnQN + products_BnQQ.mT @ group.c_BnQN
        return into_b_BnQN, self.c_BnQN + products_BnQQ @ group.b_BnQN


def _differentiate_block(
    group: _Group,
    run: _Heads,
    block: slice,
    dy_BKQRP: Tensor,
    entering_BKNX: Tensor,
    into_state_BNX: Tensor,
    shared: _SharedGradients,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inputs times step sizes, of sums [B, K, Q, R] and of the entering state, from the leaving one's."""
    x_BKQRP = group.cut(run.x_BSRP, block)
    b_BKQN, c_BKQN, products_BKQQ = group.b_BnQN[:, block], group.c_BnQN[:, block], group.products_BnQQ[:, block]
    (B, K, _, N), (R, P) = b_BKQN.shape, x_BKQRP.shape[3:]
    # States, from the last chunk to the first.
    read_BKQRP = dy_BKQRP * run.enter_BnQR[:, block, :, :, None]
    from_reads_BKNX = c_BKQN.mT @ read_BKQRP.flatten(3)
    pass_BKR = run.pass_BnR[:, block]
    leaving_BKNX, into_state_BNX = _chain(from_reads_BKNX, pass_BKR, into_state_BNX, reverse=True)
    into_pass_BKR = (entering_BKNX * leaving_BKNX).view(B, K, N, R, P).sum((2, 4)) * pass_BKR
    # Scores. A position reads what it writes without a decay: no gradient of sums, not the rounding of two that cancel.
    dx_BKQRP = x_BKQRP * run.dt_BnQR[:, block, :, :, None]
    decays_BKRQQ = group.decays(run, block)
    dy_BKRQP = dy_BKQRP.transpose(2, 3)
    into_decays_BKRQQ = (dy_BKRQP @ dx_BKQRP.permute(0, 1, 3, 4, 2)).mul_(decays_BKRQQ)
    shared.products_BnQQ[:, block] += into_decays_BKRQQ.sum(2)
    into_scores_BKRQQ = into_decays_BKRQQ.mul_(group.products_of_others_BnQQ[:, block, None])
    into_sums_BKRQ = into_scores_BKRQQ.sum(-1).sub_(into_scores_BKRQQ.sum(-2))
    # C, with the entering states.
    entering_BKRPN = entering_BKNX.view(B, K, N, R, P).permute(0, 1, 3, 4, 2)
    seen_BKRQN = read_BKQRP.transpose(2, 3) @ entering_BKRPN
    shared.c_BnQN[:, block] += seen_BKRQN.sum(2)
    into_sums_BKRQ += seen_BKRQN.mul_(c_BKQN[:, :, None]).sum(-1)
    # B and inputs, with the leaving states.
    kept_BKQX = (x_BKQRP * run.written_BnQR[:, block, :, :, None]).flatten(3)
    shared.b_BnQN[:, block] += kept_BKQX @ leaving_BKNX.mT
    into_dx_BKQRP = (b_BKQN @ leaving_BKNX).view_as(x_BKQRP).mul_(run.leave_BnQR[:, block, :, :, None])
    into_leave_BKQR = (into_dx_BKQRP * dx_BKQRP).sum(-1)
    scores_BKRQQ = decays_BKRQQ.mul_(products_BKQQ[:, :, None])
    into_dx_BKQRP += (scores_BKRQQ.mT @ dy_BKRQP).transpose(2, 3)
    into_leave_BKQR[:, :, -1] = 0
    into_sums_BKQR = into_sums_BKRQ.transpose(2, 3) - into_leave_BKQR
    into_sums_BKQR[:, :, -1] += into_leave_BKQR.sum(2) + into_pass_BKR
    return into_dx_BKQRP, into_sums_BKQR, into_state_BNX


def _empty_gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, dt, a, b, c, state = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in inputs)
    return x, dt, a, b, c, state


@_scan_backward.register_fake
def _(dy_BSHP: Tensor, dlast_BHPN: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(*inputs[:5], dlast_BHPN)


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
