"""Some chunks of some heads of the gated delta rule: results and states, and the gradients of all inputs.

Position i of a chunk writes new[i], where T new = beta v - beta enter k S for the state S that enters the chunk, T is
the unit triangular matrix of what keys replace in each other, and enter the decay since the chunk began. Gradients are
those of this formula, by hand: that of the right side is T^-T times that of new.

Shapes: B batch, n chunks, K key heads, R value heads that share one, Q positions of a chunk, N size of a key head, P
size of a value head, X decays of a head: 1, or N. Chunks come first here: so
what belongs to one of them lies together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.train.model.kernels.recurrence.chunks import Chunks, share
from pipeline.train.model.kernels.recurrence.delta.products import (
    ProductsByChannel,
    ProductsByHead,
    add_product,
    over_sharers,
)
from pipeline.train.model.mixers.recurrent_spec import CHUNK


@dataclass(frozen=True)
class DeltaInputs:
    """DeltaInputs of the rule for some rows and heads, and where the gradients of such inputs go."""

    q_BSKN: Tensor
    k_BSKN: Tensor
    v_BSHP: Tensor
    g_BSHX: Tensor
    beta_BSH1: Tensor

    @classmethod
    def of(cls, q_BSKN: Tensor, k_BSKN: Tensor, v_BSHP: Tensor, g: Tensor, beta_BSH: Tensor) -> DeltaInputs:
        """Inputs of `delta_rule`."""
        return cls(q_BSKN, k_BSKN, v_BSHP, g if g.ndim == 4 else g[..., None], beta_BSH[..., None])

    def part(self, rows: slice, keys: slice, heads: slice) -> DeltaInputs:
        """Inputs of some rows and key heads, with the value heads that share them."""
        return DeltaInputs(
            self.q_BSKN[rows, :, keys],
            self.k_BSKN[rows, :, keys],
            self.v_BSHP[rows, :, heads],
            self.g_BSHX[rows, :, heads],
            self.beta_BSH1[rows, :, heads],
        )


@dataclass(frozen=True)
class DeltaMasks:
    """Masks of documents for some rows and chunks, see `Chunks`."""

    identity_QQ: Tensor
    visible_nBQQ: Tensor
    enters_nB11Q1: Tensor | None
    leaves_nB11Q1: Tensor | None
    passes_nB1111: Tensor | None

    @classmethod
    def of(
        cls,
        like: Tensor,
        same_BnQQ: Tensor | None,
        enters_BnQ: Tensor | None,
        leaves_BnQ: Tensor | None,
        passes_Bn: Tensor | None,
    ) -> DeltaMasks:
        """Masks of all rows and chunks in the type of another tensor; all None: of one document."""
        same_BnQQ = Chunks.causal(like.device)[None, None] if same_BnQQ is None else same_BnQQ
        enters, leaves, passes = (
            None if mask is None else mask.transpose(0, 1).to(like.dtype)
            for mask in (enters_BnQ, leaves_BnQ, passes_Bn)
        )
        return cls(
            torch.eye(CHUNK, dtype=like.dtype, device=like.device),
            same_BnQQ.transpose(0, 1).to(like.dtype),
            None if enters is None else enters[:, :, None, None, :, None],
            None if leaves is None else leaves[:, :, None, None, :, None],
            None if passes is None else passes[:, :, None, None, None, None],
        )

    def part(self, rows: slice, chunks: slice) -> DeltaMasks:
        """Masks of some rows and chunks."""
        if self.enters_nB11Q1 is None or self.leaves_nB11Q1 is None or self.passes_nB1111 is None:
            return self
        return DeltaMasks(
            self.identity_QQ,
            self.visible_nBQQ[chunks, rows],
            self.enters_nB11Q1[chunks, rows],
            self.leaves_nB11Q1[chunks, rows],
            self.passes_nB1111[chunks, rows],
        )


def cut(x_BSH: Tensor, chunks: slice, key_heads: int, dtype: torch.dtype) -> Tensor:
    """Some chunks of a tensor, [B, S, H, ...] -> [n, B, K, R, Q, ...], filled up with zeros; a copy."""
    count = chunks.stop - chunks.start
    x_BTH = x_BSH[:, chunks.start * CHUNK : chunks.stop * CHUNK]
    if missing := count * CHUNK - x_BTH.shape[1]:
        x_BTH = F.pad(x_BTH, (0, 0) * (x_BTH.ndim - 2) + (0, missing))
    x_nBHQ = torch.unflatten(x_BTH, 1, (count, CHUNK)).movedim(3, 1).movedim(2, 0)
    x_nBKRQ = torch.unflatten(x_nBHQ, 2, (key_heads, -1))
    return torch.empty(x_nBKRQ.shape, dtype=dtype, device=x_BSH.device).copy_(x_nBKRQ)


def put(x_nBKRQ: Tensor, to_BSH: Tensor, chunks: slice) -> None:
    """The reverse of `cut`: to its place."""
    place_BTH = to_BSH[:, chunks.start * CHUNK : chunks.stop * CHUNK]
    place_BTH.copy_(x_nBKRQ.flatten(2, 3).movedim(0, 1).movedim(2, 3).flatten(1, 2)[:, : place_BTH.shape[1]])


class DeltaBlock:
    """Numbers of some chunks of some rows and heads that do not depend on states."""

    def __init__(self, inputs: DeltaInputs, masks: DeltaMasks, chunks: slice, scale: float) -> None:
        dtype, K = masks.visible_nBQQ.dtype, inputs.q_BSKN.shape[2]
        self.masks, self.chunks, self.scale, self.by_channel = masks, chunks, scale, inputs.g_BSHX.shape[3] > 1
        self.q_nBK1QN = cut(inputs.q_BSKN, chunks, K, dtype).mul_(scale)
        self.k_nBK1QN = cut(inputs.k_BSKN, chunks, K, dtype)
        self.v_nBKRQP = cut(inputs.v_BSHP, chunks, K, dtype)
        self.beta_nBKRQ1 = cut(inputs.beta_BSH1, chunks, K, dtype)
        g_nBKRQX = cut(inputs.g_BSHX, chunks, K, dtype)
        visible_nB11QQ = masks.visible_nBQQ[:, :, None, None]
        sums_nBKRQX = visible_nB11QQ @ g_nBKRQX
        last_nBKR1X = sums_nBKRQX[..., -1:, :]
        self.enter_nBKRQX = share(sums_nBKRQX, masks.enters_nB11Q1)
        self.leave_nBKRQX = share(last_nBKR1X - sums_nBKRQX, masks.leaves_nB11Q1)
        self.pass_nBKRX1 = share(last_nBKR1X, masks.passes_nB1111).mT
        kind = ProductsByChannel if self.by_channel else ProductsByHead
        self.products = kind(self.q_nBK1QN, self.k_nBK1QN, sums_nBKRQX, visible_nB11QQ)
        system_nBKRQQ = self.products.kept_nBKRQQ * self.beta_nBKRQ1
        # Of the two orders of the factors this one is solved faster.
        self.inverse_nBKRQQ = torch.linalg.solve_triangular(
            system_nBKRQQ, masks.identity_QQ.expand_as(system_nBKRQQ), upper=False, left=False, unitriangular=True
        )
        self.keeping_nBKRQN = self.k_nBK1QN * self.leave_nBKRQX
        """What a chunk writes with."""
        self.of_keys_nBKRQN = self.k_nBK1QN * (self.enter_nBKRQX * self.beta_nBKRQ1)
        """What the entering state is multiplied with for what is replaced in it."""
        self.of_queries_nBKRQN = self.q_nBK1QN * self.enter_nBKRQX
        """The same for what is read of it."""
        self._new, self._entering = list[Tensor](), list[Tensor]()

    def write(self, state_BKRNP: Tensor) -> Tensor:
        """The state after the last chunk, from the one ahead of the first."""
        right_nBKRQP = self.v_nBKRQP * self.beta_nBKRQ1
        for chunk, right_BKRQP in enumerate(right_nBKRQP):
            add_product(right_BKRQP, self.of_keys_nBKRQN[chunk], state_BKRNP, -1)
            new_BKRQP = self.inverse_nBKRQQ[chunk] @ right_BKRQP
            self._entering.append(state_BKRNP)
            self._new.append(new_BKRQP)
            state_BKRNP = add_product(state_BKRNP * self.pass_nBKRX1[chunk], self.keeping_nBKRQN[chunk].mT, new_BKRQP)
        return state_BKRNP

    def read(self) -> Tensor:
        """Results [n, B, K, R, Q, P] after `write`."""
        o_nBKRQP = self.of_queries_nBKRQN @ _stacked(self._entering)
        return add_product(o_nBKRQP, self.products.scores_nBKRQQ, _stacked(self._new))

    def differentiate(self, into_o_BSHP: Tensor, into_state_BKRNP: Tensor, into: DeltaInputs) -> Tensor:
        """The gradient of the entering state, from that of the leaving one; those of inputs are put into their places.

        After `write`.
        """
        into_o_nBKRQP = cut(into_o_BSHP, self.chunks, self.v_nBKRQP.shape[2], self.v_nBKRQP.dtype)
        new_nBKRQP, entering_nBKRNP = _stacked(self._new), _stacked(self._entering)
        into_right_nBKRQP, into_leaving_nBKRNP, into_state_BKRNP = self._back(into_o_nBKRQP, into_state_BKRNP)
        put(into_right_nBKRQP * self.beta_nBKRQ1, into.v_BSHP, self.chunks)
        into_beta_nBKRQ1 = (into_right_nBKRQP * self.v_nBKRQP).sum(-1, keepdim=True)
        taken_nBKRQP = into_right_nBKRQP.neg_()
        # Products within chunks.
        into_system_nBKRQQ = taken_nBKRQP @ new_nBKRQP.mT
        into_beta_nBKRQ1 += (into_system_nBKRQQ * self.products.kept_nBKRQQ).sum(-1, keepdim=True)
        into_q_nBK1QN, into_k_nBK1QN, into_sums_nBKRQX = self.products.gradients(
            into_system_nBKRQQ.mul_(self.beta_nBKRQ1), into_o_nBKRQP @ new_nBKRQP.mT
        )
        # Reads of the entering state.
        into_reads_nBKRQN = into_o_nBKRQP @ entering_nBKRNP.mT
        into_sums_nBKRQX += self._of_decays(into_reads_nBKRQN * self.of_queries_nBKRQN)
        into_q_nBK1QN += over_sharers(into_reads_nBKRQN.mul_(self.enter_nBKRQX))
        put(into_q_nBK1QN.mul_(self.scale), into.q_BSKN, self.chunks)
        into_reads_nBKRQN = (taken_nBKRQP @ entering_nBKRNP.mT).mul_(self.enter_nBKRQX)
        into_decays_nBKRQX = self._of_decays(into_reads_nBKRQN * self.k_nBK1QN)
        into_sums_nBKRQX.addcmul_(into_decays_nBKRQX, self.beta_nBKRQ1)
        into_beta_nBKRQ1 += into_decays_nBKRQX.sum(-1, keepdim=True)
        put(into_beta_nBKRQ1, into.beta_BSH1, self.chunks)
        into_keys_nBKRQN = into_reads_nBKRQN.mul_(self.beta_nBKRQ1)
        # What the leaving state has of them, and of the entering one.
        into_keeping_nBKRQN = new_nBKRQP @ into_leaving_nBKRNP.mT
        into_leave_nBKRQX = self._of_decays(into_keeping_nBKRQN * self.keeping_nBKRQN)
        into_leave_nBKRQX[..., -1:, :] = 0
        into_sums_nBKRQX -= into_leave_nBKRQX
        into_pass_nBKR1N = (into_leaving_nBKRNP * entering_nBKRNP).sum(-1)[..., None, :]
        into_last_nBKR1X = into_leave_nBKRQX.sum(-2, keepdim=True)
        into_last_nBKR1X.addcmul_(self._of_decays(into_pass_nBKR1N), self.pass_nBKRX1.mT)
        into_sums_nBKRQX[..., -1:, :] += into_last_nBKR1X
        into_k_nBK1QN += over_sharers(into_keys_nBKRQN.addcmul_(into_keeping_nBKRQN, self.leave_nBKRQX))
        put(into_k_nBK1QN, into.k_BSKN, self.chunks)
        put(self.masks.visible_nBQQ.mT[:, :, None, None] @ into_sums_nBKRQX, into.g_BSHX, self.chunks)
        return into_state_BKRNP

    def _back(self, into_o_nBKRQP: Tensor, into_state_BKRNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the right sides and of the state that leaves each chunk, and that of the entering one."""
        into_new_nBKRQP = self.products.scores_nBKRQQ.mT @ into_o_nBKRQP
        rights, leaving = list[Tensor](), list[Tensor]()
        for chunk in reversed(range(len(into_new_nBKRQP))):
            leaving.append(into_state_BKRNP)
            into_new_BKRQP = add_product(into_new_nBKRQP[chunk], self.keeping_nBKRQN[chunk], into_state_BKRNP)
            into_right_BKRQP = self.inverse_nBKRQQ[chunk].mT @ into_new_BKRQP
            rights.append(into_right_BKRQP)
            into_state_BKRNP = into_state_BKRNP * self.pass_nBKRX1[chunk]
            add_product(into_state_BKRNP, self.of_queries_nBKRQN[chunk].mT, into_o_nBKRQP[chunk])
            add_product(into_state_BKRNP, self.of_keys_nBKRQN[chunk].mT, into_right_BKRQP, -1)
        return _stacked(rights[::-1]), _stacked(leaving[::-1]), into_state_BKRNP

    def _of_decays(self, x_nBKRQN: Tensor) -> Tensor:
        """Numbers of each dimension of a key as those of its decays."""
        return x_nBKRQN if self.by_channel else x_nBKRQN.sum(-1, keepdim=True)


def _stacked(x: list[Tensor]) -> Tensor:
    """Tensors of chunks as one, without a copy where there is a single one."""
    return x[0][None] if len(x) == 1 else torch.stack(x)
