"""Gated delta rules (Yang et al. 2024; Kimi Team 2025), in PyTorch.

By head, with a state S of N x P numbers: S = exp(g) S, then S = S + beta k (v - S^T k)^T and o = S^T q. Within a chunk
what keys replace in each other is a unit triangular system; from chunk to chunk it is one state. A decay is one number
of a head, or one of each dimension of its key. Decays are exponentials of differences of sums, and a sum begins anew
with each document: so nothing of one document, not even a rounding, reaches the next.

The loop over chunks is an operation of its own, which a compiler leaves alone. Only inputs are kept for the backward
pass, which computes all else again; of compiled layers the compiler decides that.

Shapes: B batch, S positions, K key heads, H value heads, N size of a key head, P size of a value head, n chunks, Q
positions of one, see `chunks.py`; M sub-blocks of a chunk and R positions of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from pipeline.train.model.kernels.chunks import Chunks
from pipeline.train.model.mixers.recurrent_spec import CHUNK

_BLOCK = 16
"""Positions of a sub-block, where each dimension of a key decays at a rate of its own."""


def delta_rule(
    q_BSKN: Tensor,
    k_BSKN: Tensor,
    v_BSHP: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    chunks: Chunks,
    initial_BHNP: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule: o [B, S, H, P] in the type of v, and the state behind the last position [B, H, N, P] in fp32.

    Args:
        q_BSKN: Queries; H / K heads of values in a row share one.
        k_BSKN: Keys, of length 1.
        v_BSHP: Values.
        g: Logarithms of decays in fp32, up to 0: [B, S, H], or [B, S, H, N] for each dimension of a key.
        beta_BSH: Share of the old value that is replaced, from 0 to 2; a position with 0 writes nothing.
        chunks: Those of the sequence.
        initial_BHNP: State ahead of the first position; None: zeros.
        scale: Factor on the results; None: 1 / sqrt(N).
    """
    scale = q_BSKN.shape[-1] ** -0.5 if scale is None else scale
    inputs = (q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, initial_BHNP)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _plain(*inputs, chunks, scale)
    return cast(tuple[Tensor, Tensor], _Again.apply(*inputs, chunks, scale))  # type: ignore[no-untyped-call]


def delta_step(
    q_BKN: Tensor, k_BKN: Tensor, v_BHP: Tensor, g_BHX: Tensor, beta_BH: Tensor, state_BHNP: Tensor
) -> tuple[Tensor, Tensor]:
    """One position of `delta_rule`: o [B, H, P] in the type of v, and the state behind it.

    Args:
        q_BKN: Queries.
        k_BKN: Keys, of length 1.
        v_BHP: Values.
        g_BHX: Logarithms of decays, [B, H, 1], or [B, H, N] for each dimension of a key.
        beta_BH: Share of the old value that is replaced.
        state_BHNP: State ahead of the position.
    """
    repeats = v_BHP.shape[1] // q_BKN.shape[1]
    q_BHN, k_BHN = (x.to(state_BHNP.dtype).repeat_interleave(repeats, dim=1) for x in (q_BKN, k_BKN))
    state_BHNP = state_BHNP * g_BHX.exp()[..., None]
    written_BHP = beta_BH[..., None] * (v_BHP - (k_BHN[..., None, :] @ state_BHNP)[..., 0, :])
    state_BHNP = state_BHNP + k_BHN[..., None] * written_BHP[..., None, :]
    o_BHP = (q_BHN[..., None, :] @ state_BHNP)[..., 0, :] * q_BKN.shape[-1] ** -0.5
    return o_BHP.to(v_BHP.dtype), state_BHNP


class _Again(torch.autograd.Function):
    """`_plain`, of which only the inputs are kept."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, ctx.chunks, ctx.scale = args
        ctx.save_for_backward(*inputs)
        return _plain(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        inputs = [None if each is None else each.detach().requires_grad_() for each in saved]
        with torch.enable_grad():
            results = _plain(*inputs, ctx.chunks, ctx.scale)  # type: ignore[call-arg,arg-type]
        given = [each for each in inputs if each is not None]
        found = list(torch.autograd.grad(results, given, gradients))
        return *[None if each is None else found.pop(0) for each in inputs], None, None


def _plain(
    q_BSKN: Tensor,
    k_BSKN: Tensor,
    v_BSHP: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    initial_BHNP: Tensor | None,
    chunks: Chunks,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The rule as operations that have gradients."""
    (B, _, H, P), N = v_BSHP.shape, q_BSKN.shape[-1]
    dtype, repeats = torch.promote_types(v_BSHP.dtype, torch.float32), H // q_BSKN.shape[2]
    enters_BnQ, leaves_BnQ, passes_Bn = chunks.enters_BnQ, chunks.leaves_BnQ, chunks.passes_Bn

    def by_head(x_BS: Tensor) -> Tensor:
        """[B, S, H, ...] -> [B, n, H, Q, ...]."""
        return chunks.cut(x_BS.to(dtype)).transpose(2, 3)

    same = Chunks.causal(v_BSHP.device)[None, None] if chunks.same_BnQQ is None else chunks.same_BnQQ
    visible_BnHQQ = same[:, :, None]
    q_BnKQN, k_BnKQN = by_head(q_BSKN) * scale, by_head(k_BSKN)
    v_BnHQP, beta_BnHQ1 = by_head(v_BSHP), by_head(beta_BSH)[..., None]
    by_channel = g.ndim == 4
    g_BnHQX = by_head(g if by_channel else g[..., None])
    sums_BnHQX = visible_BnHQQ.to(dtype) @ g_BnHQX
    last_BnH1X = sums_BnHQX[..., -1:, :]
    enter_BnHQX = _share(sums_BnHQX, None if enters_BnQ is None else enters_BnQ[:, :, None, :, None])
    leave_BnHQX = _share(last_BnH1X - sums_BnHQX, None if leaves_BnQ is None else leaves_BnQ[:, :, None, :, None])
    pass_BnHX1 = _share(last_BnH1X, None if passes_Bn is None else passes_Bn[..., None, None, None]).mT
    if by_channel:
        kept_BnHQQ, scores_BnHQQ = _products_by_channel(q_BnKQN, k_BnKQN, sums_BnHQX, visible_BnHQQ)
    else:
        decays_BnHQQ = _share(sums_BnHQX - sums_BnHQX.mT, visible_BnHQQ)
        of_keys_BnKQQ, of_queries_BnKQQ = k_BnKQN @ k_BnKQN.mT, q_BnKQN @ k_BnKQN.mT
        kept_BnHQQ = _repeated(of_keys_BnKQQ, repeats) * decays_BnHQQ
        scores_BnHQQ = _repeated(of_queries_BnKQQ, repeats) * decays_BnHQQ
    q_BnHQN, k_BnHQN = _repeated(q_BnKQN, repeats), _repeated(k_BnKQN, repeats)
    system_BnHQQ = (kept_BnHQQ * beta_BnHQ1).tril(-1)
    sides_BnHQW = torch.cat((v_BnHQP, k_BnHQN * enter_BnHQX), dim=-1) * beta_BnHQ1
    solved_BnHQW = torch.linalg.solve_triangular(system_BnHQQ, sides_BnHQW, upper=False, unitriangular=True)
    u_BnHQP, w_BnHQN = torch.split(solved_BnHQW, [P, N], dim=-1)
    state_BHNP = v_BnHQP.new_zeros(B, H, N, P) if initial_BHNP is None else initial_BHNP.to(dtype)
    leaving_BnHNQ = (k_BnHQN * leave_BnHQX).mT
    entering_BnHNP, last_BHNP = _states(u_BnHQP, w_BnHQN, leaving_BnHNQ, pass_BnHX1, state_BHNP)
    new_BnHQP = u_BnHQP - w_BnHQN @ entering_BnHNP
    o_BnHQP = scores_BnHQQ @ new_BnHQP + (q_BnHQN * enter_BnHQX) @ entering_BnHNP
    return chunks.join(o_BnHQP.transpose(2, 3)).to(v_BSHP.dtype), last_BHNP


def _share(logarithm: Tensor, seen: Tensor | None) -> Tensor:
    """A decay, or 0."""
    # Differences between documents are of either sign, and hidden.
    decay = logarithm.clamp(max=0).exp()
    return decay if seen is None else decay * seen


def _repeated(x_BnK: Tensor, repeats: int) -> Tensor:
    """Key heads as the value heads that share them."""
    return x_BnK if repeats == 1 else x_BnK.repeat_interleave(repeats, dim=2)


def _products_by_channel(
    q_BnHQN: Tensor, k_BnHQN: Tensor, sums_BnHQN: Tensor, visible_BnHQQ: Tensor
) -> tuple[Tensor, Tensor]:
    """Products of keys with keys and of queries with keys, [B, n, H, Q, Q], each dimension decayed between the two.

    A sub-block on the diagonal is computed by each dimension. Off it the decay goes through the first position of the
    rows, so that both factors are at most 1, whatever the decay is.
    """
    blocks = CHUNK // _BLOCK
    q, k, sums = (torch.unflatten(x, -2, (blocks, _BLOCK)) for x in (q_BnHQN, k_BnHQN, sums_BnHQN))
    rows = []
    for block in range(blocks):
        sums_RN, k_RN = sums[..., block, :, :], k[..., block, :, :]
        both_2RN = torch.stack((k_RN, q[..., block, :, :]), dim=-3)
        decays_RRN = (sums_RN[..., :, None, :] - sums_RN[..., None, :, :]).clamp(max=0).exp()
        parts = [(both_2RN[..., :, None, :] * (decays_RRN * k_RN[..., None, :, :])[..., None, :, :, :]).sum(-1)]
        if block:
            first_1N = sums_RN[..., :1, :]
            before = slice(0, block * _BLOCK)
            read_2RN = both_2RN * (sums_RN - first_1N).clamp(max=0).exp()[..., None, :, :]
            kept_TN = k_BnHQN[..., before, :] * (first_1N - sums_BnHQN[..., before, :]).clamp(max=0).exp()
            parts.insert(0, read_2RN @ kept_TN[..., None, :, :].mT)
        if block < blocks - 1:
            parts.append(parts[0].new_zeros(*parts[0].shape[:-1], CHUNK - (block + 1) * _BLOCK))
        rows.append(torch.cat(parts, dim=-1))
    products_2QQ = torch.cat(rows, dim=-2) * visible_BnHQQ[..., None, :, :]
    of_keys, of_queries = products_2QQ.unbind(-3)
    return of_keys, of_queries


@torch.library.custom_op("pipeline::delta_states", mutates_args=())
def _states(
    u_BnHQP: Tensor, w_BnHQN: Tensor, leaving_BnHNQ: Tensor, pass_BnHX1: Tensor, initial_BHNP: Tensor
) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk [B, n, H, N, P], and the one that leaves the last: S = pass S + L (u - w S)."""
    entering_BnHNP, last_BHNP = _empty_states(u_BnHQP, initial_BHNP)
    state_BHNP = initial_BHNP
    for chunk in range(u_BnHQP.shape[1]):
        entering_BnHNP[:, chunk] = state_BHNP
        new_BHQP = u_BnHQP[:, chunk] - w_BnHQN[:, chunk] @ state_BHNP
        state_BHNP = (leaving_BnHNQ[:, chunk] @ new_BHQP).addcmul_(state_BHNP, pass_BnHX1[:, chunk])
    return entering_BnHNP, last_BHNP.copy_(state_BHNP)


def _empty_states(u_BnHQP: Tensor, initial_BHNP: Tensor) -> tuple[Tensor, Tensor]:
    (B, n), shape = u_BnHQP.shape[:2], initial_BHNP.shape
    return u_BnHQP.new_empty(B, n, *shape[1:]), u_BnHQP.new_empty(shape)


@_states.register_fake
def _(u_BnHQP: Tensor, w_BnHQN: Tensor, leaving: Tensor, passing: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_states(u_BnHQP, initial)


@torch.library.custom_op("pipeline::delta_states_backward", mutates_args=())
def _states_backward(
    of_entering_BnHNP: Tensor,
    of_last_BHNP: Tensor,
    u_BnHQP: Tensor,
    w_BnHQN: Tensor,
    leaving_BnHNQ: Tensor,
    pass_BnHX1: Tensor,
    entering_BnHNP: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs. What a chunk reads and writes has them all at once, once those of states are known."""
    of_u_BnHQP, of_leaving = torch.empty_like(u_BnHQP), torch.empty_like(entering_BnHNP)
    state_BHNP = of_last_BHNP
    for chunk in reversed(range(u_BnHQP.shape[1])):
        of_leaving[:, chunk] = state_BHNP
        of_u_BHQP = leaving_BnHNQ[:, chunk].mT @ state_BHNP
        of_u_BnHQP[:, chunk] = of_u_BHQP
        state_BHNP = state_BHNP * pass_BnHX1[:, chunk] + of_entering_BnHNP[:, chunk]
        state_BHNP = state_BHNP.sub_(w_BnHQN[:, chunk].mT @ of_u_BHQP)
    new_BnHQP = u_BnHQP - w_BnHQN @ entering_BnHNP
    of_pass_BnHN1 = (of_leaving * entering_BnHNP).sum(-1, keepdim=True)
    of_pass = of_pass_BnHN1.sum(-2, keepdim=True) if pass_BnHX1.shape[-2] == 1 else of_pass_BnHN1
    return of_u_BnHQP, -(of_u_BnHQP @ entering_BnHNP.mT), of_leaving @ new_BnHQP.mT, of_pass, state_BHNP.clone()


@_states_backward.register_fake
def _(
    of_entering_BnHNP: Tensor, of_last_BHNP: Tensor, *inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    u, w, leaving, passing = (each.new_empty(each.shape) for each in inputs[:4])
    return u, w, leaving, passing, of_last_BHNP.new_empty(of_last_BHNP.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[0])


def _differentiate(ctx: Any, of_entering_BnHNP: Tensor, of_last_BHNP: Tensor) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], _states_backward(of_entering_BnHNP, of_last_BHNP, *ctx.saved_tensors))


_states.register_autograd(_differentiate, setup_context=_keep)


def _flops(u: Sequence[int], w: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of the loop."""
    B, n, H, Q, P = u
    return 4 * B * n * H * Q * P * w[-1]


def _backward_flops(of_entering: Any, of_last: Any, u: Sequence[int], w: Sequence[int], *_: Any, **__: Any) -> int:
    return 5 * _flops(u, w) // 2


register_flop_formula(torch.ops.pipeline.delta_states)(_flops)
register_flop_formula(torch.ops.pipeline.delta_states_backward)(_backward_flops)
