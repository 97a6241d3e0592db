"""Gated delta rules (Yang et al. 2024; Kimi Team 2025), in PyTorch.

By head, with a state S of N x P numbers: S = exp(g) S, then S = S + beta k (v - S^T k)^T and o = S^T q. Within a chunk
what keys replace in each other is a unit triangular system; from chunk to chunk it is one state. A decay is one number
of a head, or one of each dimension of its key. Decays are exponentials of differences of sums, and a sum begins anew
with each document: so nothing of one document, not even a rounding, reaches the next.

It is an operation of its own: a compiler leaves its loop over chunks alone, and only its inputs are kept for the
backward pass, which computes all else again for some heads at a time.

Shapes: B batch, S positions, K key heads, H value heads, N size of a key head, P size of a value head, X decays of a
head, n chunks, Q positions of one, see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from pipeline.train.model.kernels.recurrence.chunks import Chunks
from pipeline.train.model.kernels.recurrence.delta.blocks import DeltaBlock, DeltaInputs, DeltaMasks, put
from pipeline.train.model.mixers.recurrent_spec import CHUNK

_RUN = 8
"""Value heads that a CPU computes at a time, at most: the backward pass keeps what it knows of all their chunks."""
_AT_ONCE = 16
"""Their chunks that it computes at a time, at most: matrices stay in its cache."""
_SCORES = 1 << 24
"""Numbers of scores that are in the memory of a GPU at a time."""


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
    """The rule: o [B, S, H, P] in the type of v, and the state after the last position [B, H, N, P] in fp32.

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
    masks = (chunks.same_BnQQ, chunks.enters_BnQ, chunks.leaves_BnQ, chunks.passes_Bn)
    results = _rule(q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, initial_BHNP, *masks, scale)
    return cast(tuple[Tensor, Tensor], results)


def delta_step(
    q_BKN: Tensor, k_BKN: Tensor, v_BHP: Tensor, g_BHX: Tensor, beta_BH: Tensor, state_BHNP: Tensor
) -> tuple[Tensor, Tensor]:
    """One position of `delta_rule`: o [B, H, P] in the type of v, and the state after it.

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


@dataclass(frozen=True)
class _Run:
    """Some rows and heads, which are computed apart."""

    rows: slice
    keys: slice
    heads: slice
    key_heads: int
    steps: tuple[tuple[DeltaMasks, slice], ...]
    """Chunks of each step, and their masks."""

    def state(self, state_BHNP: Tensor) -> Tensor:
        """Their part of a state, [B, K, R, N, P]."""
        return torch.unflatten(state_BHNP[self.rows, self.heads], 1, (self.key_heads, -1))


def _at_once(v_BSHP: Tensor, K: int) -> tuple[int, int, int]:
    """Numbers of rows, of key heads and of chunks that are computed at a time, at most."""
    B, _, H, _ = v_BSHP.shape
    if v_BSHP.device.type != "cpu":
        return B, K, max(1, _SCORES // (B * H * CHUNK * CHUNK))
    sharers = H // K
    heads = max(size for size in range(1, max(1, _RUN // sharers) + 1) if K % size == 0)
    return 1, heads, max(1, _AT_ONCE // (heads * sharers))


def _runs(inputs: DeltaInputs, masks: DeltaMasks) -> Iterator[_Run]:
    """All rows and heads."""
    (B, S, H, _), K = inputs.v_BSHP.shape, inputs.q_BSKN.shape[2]
    count, sharers = -(-S // CHUNK), H // K
    rows, heads, block = _at_once(inputs.v_BSHP, K)
    blocks = [slice(begin, min(begin + block, count)) for begin in range(0, count, block)]
    for row in range(0, B, rows):
        part = slice(row, row + rows)
        steps = tuple((masks.part(part, block), block) for block in blocks)
        for begin in range(0, K, heads):
            end = begin + heads
            yield _Run(part, slice(begin, end), slice(begin * sharers, end * sharers), heads, steps)


@torch.library.custom_op("pipeline::delta_rule", mutates_args=())
def _rule(
    q_BSKN: Tensor,
    k_BSKN: Tensor,
    v_BSHP: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    initial_BHNP: Tensor | None,
    same_BnQQ: Tensor | None,
    enters_BnQ: Tensor | None,
    leaves_BnQ: Tensor | None,
    passes_Bn: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    o_BSHP, last_BHNP = _empty_results(q_BSKN, v_BSHP)
    inputs = DeltaInputs.of(q_BSKN, k_BSKN, v_BSHP, g, beta_BSH)
    masks = DeltaMasks.of(last_BHNP, same_BnQQ, enters_BnQ, leaves_BnQ, passes_Bn)
    for run in _runs(inputs, masks):
        part, to_last_BKRNP = inputs.part(run.rows, run.keys, run.heads), run.state(last_BHNP)
        state_BKRNP = _first(run, initial_BHNP, last_BHNP)
        for masks_of_step, chunks in run.steps:
            block = DeltaBlock(part, masks_of_step, chunks, scale)
            state_BKRNP = block.write(state_BKRNP)
            put(block.read(), o_BSHP[run.rows, :, run.heads], chunks)
        to_last_BKRNP.copy_(state_BKRNP)
    return o_BSHP, last_BHNP


def _empty_results(q_BSKN: Tensor, v_BSHP: Tensor) -> tuple[Tensor, Tensor]:
    B, S, H, P = v_BSHP.shape
    dtype = torch.promote_types(v_BSHP.dtype, torch.float32)
    return v_BSHP.new_empty(B, S, H, P), v_BSHP.new_empty(B, H, q_BSKN.shape[-1], P, dtype=dtype)


def _first(run: _Run, initial_BHNP: Tensor | None, like_BHNP: Tensor) -> Tensor:
    """The state ahead of the first position for some rows and heads; None: zeros."""
    if initial_BHNP is None:
        return torch.zeros_like(run.state(like_BHNP), memory_format=torch.contiguous_format)
    return run.state(initial_BHNP).to(like_BHNP.dtype).contiguous()


@_rule.register_fake
def _(q_BSKN: Tensor, k_BSKN: Tensor, v_BSHP: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q_BSKN, v_BSHP)


@torch.library.custom_op("pipeline::delta_rule_backward", mutates_args=())
def _rule_backward(
    into_o_BSHP: Tensor,
    into_last_BHNP: Tensor,
    q_BSKN: Tensor,
    k_BSKN: Tensor,
    v_BSHP: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    initial_BHNP: Tensor | None,
    same_BnQQ: Tensor | None,
    enters_BnQ: Tensor | None,
    leaves_BnQ: Tensor | None,
    passes_Bn: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six inputs, that of the initial state also where there is none."""
    *gradients, into_initial_BHNP = _empty_gradients(q_BSKN, k_BSKN, v_BSHP, g, beta_BSH, into_last_BHNP)
    inputs, into = DeltaInputs.of(q_BSKN, k_BSKN, v_BSHP, g, beta_BSH), DeltaInputs.of(*gradients)
    masks = DeltaMasks.of(into_last_BHNP, same_BnQQ, enters_BnQ, leaves_BnQ, passes_Bn)
    for run in _runs(inputs, masks):
        part, into_part = (each.part(run.rows, run.keys, run.heads) for each in (inputs, into))
        state_BKRNP, blocks = _first(run, initial_BHNP, into_last_BHNP), list[DeltaBlock]()
        for masks_of_step, chunks in run.steps:
            blocks.append(DeltaBlock(part, masks_of_step, chunks, scale))
            state_BKRNP = blocks[-1].write(state_BKRNP)
        into_o_BSRP = into_o_BSHP[run.rows, :, run.heads]
        into_state_BKRNP = run.state(into_last_BHNP).contiguous()
        while blocks:
            into_state_BKRNP = blocks.pop().differentiate(into_o_BSRP, into_state_BKRNP, into_part)
        run.state(into_initial_BHNP).copy_(into_state_BKRNP)
    q, k, v, g, beta = gradients
    return q, k, v, g, beta, into_initial_BHNP


def _empty_gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g, beta, state = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in inputs)
    return q, k, v, g, beta, state


@_rule_backward.register_fake
def _(into_o_BSHP: Tensor, into_last_BHNP: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(*inputs[:5], into_last_BHNP)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, into_o_BSHP: Tensor, into_last_BHNP: Tensor) -> tuple[Tensor | None, ...]:
    *into, into_initial = _rule_backward(into_o_BSHP, into_last_BHNP, *ctx.saved_tensors, ctx.scale)
    return *into, into_initial if ctx.needs_input_grad[5] else None, None, None, None, None, None


_rule.register_autograd(_differentiate, setup_context=_keep)


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *others: Any, **_: Any) -> int:
    """States are written, and read twice; scores are made, the system is solved, and both are multiplied."""
    (B, S, K, N), (H, P) = q, v[2:]
    positions = B * -(-S // CHUNK) * CHUNK
    return positions * (6 * H * N * P + CHUNK * (4 * K * N + 4 * H * P + H * CHUNK))


def _backward_flops(
    into_o: Any, into_last: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *others: Any, **_: Any
) -> int:
    """FLOPs of backward: all but the results again, gradients of states and their results, of scores and system."""
    (B, S, K, N), (H, P) = q, v[2:]
    positions = B * -(-S // CHUNK) * CHUNK
    again = 4 * H * N * P + CHUNK * (4 * K * N + 2 * H * P + H * CHUNK)
    return positions * (again + 12 * H * N * P + CHUNK * (6 * K * N + 8 * H * P))


register_flop_formula(torch.ops.pipeline.delta_rule)(_flops)
register_flop_formula(torch.ops.pipeline.delta_rule_backward)(_backward_flops)
