"""Products of keys with keys and of queries with keys within chunks, decayed between the two, and their gradients.

Shapes as in `blocks.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.train.model.kernels.recurrence.chunks import share
from pipeline.train.model.mixers.recurrent_spec import CHUNK

_SIZES = (32, 16, 8, 4)
"""Positions of sub-blocks that are halves of the one before, where each dimension of a key has a decay of its own."""


def over_sharers(x_nBKR: Tensor) -> Tensor:
    """The sum over value heads that share a key head, [n, B, K, 1, ...]."""
    return x_nBKR if x_nBKR.shape[3] == 1 else x_nBKR.sum(3, keepdim=True)


def add_product(to: Tensor, one: Tensor, other: Tensor, factor: int = 1) -> Tensor:
    """A factor times a matrix product, added to a contiguous tensor in place."""
    to.view(-1, *to.shape[-2:]).baddbmm_(one.flatten(0, -3), other.flatten(0, -3), alpha=factor)
    return to


class ProductsByHead:
    """Products of keys and queries of heads that decay at one rate."""

    def __init__(self, q_nBK1QN: Tensor, k_nBK1QN: Tensor, sums_nBKRQ1: Tensor, visible_nB11QQ: Tensor) -> None:
        self._q, self._k = q_nBK1QN, k_nBK1QN
        self._decays_nBKRQQ = share(sums_nBKRQ1 - sums_nBKRQ1.mT, visible_nB11QQ)
        self.kept_nBKRQQ = (k_nBK1QN @ k_nBK1QN.mT * self._decays_nBKRQQ).tril_(-1)
        """Of a key with those before it."""
        self.scores_nBKRQQ = q_nBK1QN @ k_nBK1QN.mT * self._decays_nBKRQQ
        """Of a query with the keys up to its own."""

    def gradients(self, into_kept_nBKRQQ: Tensor, into_scores_nBKRQQ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and sums. Overwrites the arguments; what is hidden in them does not matter."""
        into_kept_nBKRQQ.tril_(-1)
        # A query reads its own key without a decay: no gradient of sums, not the rounding of two that cancel.
        between_nBKRQQ = (into_scores_nBKRQQ * self.scores_nBKRQQ).tril_(-1)
        between_nBKRQQ.addcmul_(into_kept_nBKRQQ, self.kept_nBKRQQ)
        into_sums_nBKRQ1 = between_nBKRQQ.sum(-1, keepdim=True).sub_(between_nBKRQQ.sum(-2)[..., None])
        kept_nBK1QQ = over_sharers(into_kept_nBKRQQ.mul_(self._decays_nBKRQQ))
        scores_nBK1QQ = over_sharers(into_scores_nBKRQQ.mul_(self._decays_nBKRQQ))
        into_k_nBK1QN = (kept_nBK1QQ + kept_nBK1QQ.mT) @ self._k
        add_product(into_k_nBK1QN, scores_nBK1QQ.mT, self._q)
        return scores_nBK1QQ @ self._k, into_k_nBK1QN, into_sums_nBKRQ1


class ProductsByChannel:
    """Products of keys and queries of heads where each dimension of a key decays at a rate of its own.

    Of two positions in different halves of a sub-block the decay goes through the first position of the second half,
    so that both factors are at most 1, whatever the decay is. Within the smallest sub-blocks it is computed by pairs.
    For each position what its key and its query read lies side by side.
    """

    def __init__(self, q_nBK1QN: Tensor, k_nBK1QN: Tensor, sums_nBKRQN: Tensor, visible_nB11QQ: Tensor) -> None:
        self._q, self._k, self._sums, self._visible = q_nBK1QN, k_nBK1QN, sums_nBKRQN, visible_nB11QQ
        self._both = torch.stack((k_nBK1QN, q_nBK1QN), dim=-2)
        products_nBKRQ2Q = sums_nBKRQN.new_zeros(*sums_nBKRQN.shape[:-1], 2, CHUNK)
        for size in _SIZES:
            read, kept, _, _ = self._halves(size)
            _place_of_halves(products_nBKRQ2Q, size).copy_(torch.unflatten(read @ kept.mT, -2, (size, 2)))
        for distance in range(1, _SIZES[-1]):
            read, kept, _ = self._pairs(distance)
            _place_of_pairs(products_nBKRQ2Q, distance).copy_((read * kept[..., None, :]).sum(-1))
        self.kept_nBKRQQ = products_nBKRQ2Q[..., 0, :] * visible_nB11QQ
        """Of a key with those before it."""
        self.scores_nBKRQQ = products_nBKRQ2Q[..., 1, :] * visible_nB11QQ
        """Of a query with the keys up to its own."""
        self.scores_nBKRQQ.diagonal(dim1=-2, dim2=-1).copy_((q_nBK1QN * k_nBK1QN).sum(-1))

    def gradients(self, into_kept_nBKRQQ: Tensor, into_scores_nBKRQQ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and sums; what is hidden in the arguments does not matter."""
        into_products = torch.stack((into_kept_nBKRQQ, into_scores_nBKRQQ), dim=-2)
        into_products.mul_(self._visible[..., None, :])
        shape = self._sums.shape
        into_both_nBKRQ2N = self._sums.new_zeros(*shape[:-1], 2, shape[-1])
        into_k_nBKRQN = self._sums.new_zeros(shape)
        for size in _SIZES:
            read, kept, decays_of_read, decays_of_kept = self._halves(size)
            into = _place_of_halves(into_products, size).flatten(-3, -2)
            into_read = torch.unflatten(into @ kept, -2, (size, 2))
            _halves_of(into_both_nBKRQ2N, size, -3)[1].addcmul_(into_read, decays_of_read[..., None, :])
            _halves_of(into_k_nBKRQN, size, -2)[0].addcmul_(into.mT @ read, decays_of_kept)
        for distance in range(1, _SIZES[-1]):
            read, kept, decays = self._pairs(distance)
            into = _place_of_pairs(into_products, distance)[..., None]
            _pairs_of(into_both_nBKRQ2N, distance, -3)[1].addcmul_(into, kept[..., None, :])
            _pairs_of(into_k_nBKRQN, distance, -2)[0].addcmul_((into * read).sum(-2), decays)
        # A query reads its own key without a decay: no gradient of sums, not the rounding of two that cancel.
        into_rows_nBKRQN, into_q_nBKRQN = into_both_nBKRQ2N.unbind(-2)
        into_sums_nBKRQN = (into_rows_nBKRQN - into_k_nBKRQN).mul_(self._k).addcmul_(into_q_nBKRQN, self._q)
        own_nBKRQ1 = into_scores_nBKRQQ.diagonal(dim1=-2, dim2=-1)[..., None]
        into_q_nBKRQN = torch.addcmul(into_q_nBKRQN, own_nBKRQ1, self._k)
        into_k_nBKRQN.add_(into_rows_nBKRQN).addcmul_(own_nBKRQ1, self._q)
        return over_sharers(into_q_nBKRQN), over_sharers(into_k_nBKRQN), into_sums_nBKRQN

    def _halves(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Factors of second halves and of first ones, [..., size, N], and the decays of both."""
        (before, after), (kept, _) = _halves_of(self._sums, size, -2), _halves_of(self._k, size, -2)
        _, read = _halves_of(self._both, size, -3)
        decays_of_read, decays_of_kept = share(after - after[..., :1, :]), share(after[..., :1, :] - before)
        read = (read * decays_of_read[..., None, :]).flatten(-3, -2)
        return read, kept * decays_of_kept, decays_of_read, decays_of_kept

    def _pairs(self, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of positions and of those at a distance before them, decayed; the decays."""
        (before, after), (kept, _) = _pairs_of(self._sums, distance, -2), _pairs_of(self._k, distance, -2)
        _, read = _pairs_of(self._both, distance, -3)
        decays = share(after - before)
        return read, kept * decays, decays


def _halves_of(x: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Halves of sub-blocks of twice a size, the first and the second."""
    halves = torch.unflatten(x, dim, (-1, 2, size))
    return halves.select(dim - 1, 0), halves.select(dim - 1, 1)


def _pairs_of(x: Tensor, distance: int, dim: int) -> tuple[Tensor, Tensor]:
    """Positions of the smallest sub-blocks, and those at a distance after them."""
    smallest = _SIZES[-1]
    blocks = torch.unflatten(x, dim, (-1, smallest))
    return blocks.narrow(dim, 0, smallest - distance), blocks.narrow(dim, distance, smallest - distance)


def _place_of_halves(products_nBKRQ2Q: Tensor, size: int) -> Tensor:
    """Place of products of second halves with first ones, [..., sub-blocks, size, 2, size]."""
    blocks = torch.unflatten(torch.unflatten(products_nBKRQ2Q, -1, (-1, 2, size)), -5, (-1, 2, size))
    return blocks.select(-6, 1).select(-2, 0).diagonal(dim1=-5, dim2=-2).movedim(-1, -4)


def _place_of_pairs(products_nBKRQ2Q: Tensor, distance: int) -> Tensor:
    """Place of products of positions with those at a distance before them, [..., sub-blocks, positions, 2]."""
    size = _SIZES[-1]
    blocks = torch.unflatten(torch.unflatten(products_nBKRQ2Q, -1, (-1, size)), -4, (-1, size))
    own = blocks.diagonal(dim1=-5, dim2=-2)
    return own.diagonal(offset=-distance, dim1=-4, dim2=-2).movedim(-3, -1)
