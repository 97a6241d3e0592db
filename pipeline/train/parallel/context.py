"""Context parallelism: attention to a sequence of which every rank of the cp axis has a share.

All of a layer but attention works on single tokens, and so on the share alone. Two ways to attend to the rest:

- `GatheredKeys` collects the keys and values of all ranks (Grattafiori et al. 2024, section 3.3.2). A causal query
  needs those before it alone, so the sequence is cut into 2 cp pieces of which rank r has the r-th from either end: all
  ranks multiply as much, as they do where queries see both sides. It takes any number of heads; every rank has the
  keys and values of the whole sequence.
- `ExchangedHeads` trades the share of all heads for some heads of the whole sequence (DeepSpeed-Ulysses, Jacobs et al.
  2023). It sends less the more ranks there are, and takes no more of them than there are heads.

torch's own `context_parallel` is not used: in 2.11 and 2.13 DTensor has no rule for the attention of CPUs.

Shapes: B batch, S positions of the sequence, L = S / cp those of a rank, H query heads, K key and value heads, E head
size, V size of a value head, P pieces that the queries are cut into, C = L / P positions of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.parallel import ParallelConfig
from pipeline.data.loading.batch import Batch
from pipeline.train.model.mixers.sequence import AttentionFn, SequenceCut
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.torch_compat.core import all_gather, all_to_all, reduce_scatter


def build_cut(mesh: Mesh, parallel: ParallelConfig) -> SequenceCut | None:
    """The cut of every sequence over cp; None without it. Heads and lengths must fit, see the rules."""
    if mesh.size("cp") == 1:
        return None
    way = GatheredKeys if parallel.cp_method == "all_gather" else ExchangedHeads
    return way(mesh.role("cp").get_group(), mesh.rank("cp"), mesh.size("cp"))


def sequence_shard(batch: Batch, cut: SequenceCut | None) -> Batch:
    """A batch with this rank's share of every sequence. Targets follow their inputs.

    Its document starts are gone, as a document may begin on another rank: what they say is taken from the whole batch.
    """
    if cut is None:
        return batch
    tokens, targets, weight = (cut.shard(x) for x in (batch.tokens, batch.targets, batch.weight))
    predicted = None if batch.predicted is None else _own_predicted(batch.predicted, batch.tokens.shape[1], cut)
    ahead_targets, ahead_weight = (
        None if x is None else cut.shard(x, 2) for x in (batch.ahead_targets, batch.ahead_weight)
    )
    return replace(
        batch,
        tokens=tokens,
        targets=targets,
        weight=weight,
        loss_weight=None if batch.loss_weight is None else cut.shard(batch.loss_weight),
        ahead_loss_weight=None if batch.ahead_loss_weight is None else cut.shard(batch.ahead_loss_weight, 2),
        starts=batch.starts[:0],
        ahead_targets=ahead_targets,
        ahead_weight=ahead_weight,
        predicted=predicted,
        conversation=None if batch.conversation is None else cut.shard(batch.conversation),
    )


def _own_predicted(predicted_BK: Tensor, length: int, cut: SequenceCut) -> Tensor:
    """Predicted positions in this rank's share, as positions of it; on the host.

    Ranks have unequal numbers of them. Rows with fewer than others are filled up with positions that do not count; one
    with none too, so that every rank has something to differentiate.
    """
    marks_BS = torch.zeros(len(predicted_BK), length, dtype=torch.uint8).scatter_(1, predicted_BK, 1)
    marks_BL = cut.shard(marks_BS)
    from torch._subclasses.fake_tensor import FakeTensor  # which imports the compiler

    if isinstance(predicted_BK, FakeTensor):  # of a plan, whose ranks have equally many
        own = max(1, predicted_BK.shape[1] * marks_BL.shape[1] // length)
        return torch.empty(len(predicted_BK), own, dtype=torch.int64)
    most = max(1, int(marks_BL.sum(1).max()))
    return marks_BL.argsort(dim=1, descending=True, stable=True)[:, :most].sort(dim=1).values


@dataclass(frozen=True)
class _ContextAxis:
    """The cp axis as one of its processes has it."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class GatheredKeys(_ContextAxis):
    """Every rank has two pieces of the sequence, and collects the keys and values of all."""

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """See `SequenceCut`: pieces r and 2 cp - 1 - r of 2 cp."""
        pieces = x.chunk(2 * self.size, dim)
        assert len(pieces) == 2 * self.size and pieces[0].shape == pieces[-1].shape, f"{x.shape} over cp {self.size}"
        return torch.cat([pieces[place] for place in self._places(self.rank)], dim)

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """See `SequenceCut`."""
        size = length // (2 * self.size)
        return tuple((place * size, (place + 1) * size) for place in self._places(self.rank))

    def own_pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """See `SequenceCut`."""
        return self.pieces(length)

    def gather_pieces(self, x_P: Tensor) -> Tensor:
        """See `SequenceCut`."""
        of_ranks = cast(Tensor, _GatherPieces.apply(x_P, self))  # type: ignore[no-untyped-call]
        # The second pieces of the ranks follow each other from the end on.
        return torch.cat((of_ranks[:, 0], of_ranks[:, 1].flip(0)))

    def own_heads(self, x_H: Tensor) -> Tensor:
        """See `SequenceCut`: all."""
        return x_H

    def attend(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKV: Tensor,
        core: AttentionFn,
        keys: Sequence[int],
    ) -> Tensor:
        """See `SequenceCut`."""
        return self._attend(q_BLHE, *self._gather_both(k_BLKE, v_BLKV), core, keys)

    def attend_latent(
        self,
        q_BLHE: Tensor,
        g_BLG: Tensor,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]],
        core: AttentionFn,
        keys: Sequence[int],
    ) -> Tensor:
        """See `SequenceCut`: every rank makes the keys and values of the whole sequence."""
        # No piece sees what is after the longest.
        return self._attend(q_BLHE, *expand(self.gather(g_BLG)[:, : max(keys)]), core, keys)

    def gather(self, x_BLC: Tensor) -> Tensor:
        """[B, S, ...] of the whole sequence; its gradient is summed over the ranks, each of which gets its share."""
        return cast(Tensor, _Gather.apply(x_BLC[None], self))[0]  # type: ignore[no-untyped-call]

    @staticmethod
    def _attend(q_BLHE: Tensor, k_BTKE: Tensor, v_BTKV: Tensor, core: AttentionFn, keys: Sequence[int]) -> Tensor:
        """Attention of the two pieces of this rank."""
        outs = []
        for piece, q_BCHE in enumerate(q_BLHE.chunk(2, dim=1)):
            end = keys[piece]
            outs.append(core(q_BCHE, k_BTKE[:, :end], v_BTKV[:, :end], piece))
        return torch.cat(outs, dim=1)

    def _gather_both(self, k_BLKE: Tensor, v_BLKV: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence, in one collective."""
        sizes = [k_BLKE.shape[-1], v_BLKV.shape[-1]]
        if sizes[0] == sizes[1]:
            k_BSKE, v_BSKV = cast(Tensor, _Gather.apply(torch.stack((k_BLKE, v_BLKV)), self)).unbind()  # type: ignore[no-untyped-call]
            return k_BSKE, v_BSKV
        k_BSKE, v_BSKV = torch.split(self.gather(torch.cat((k_BLKE, v_BLKV), dim=-1)), sizes, dim=-1)
        return k_BSKE, v_BSKV

    def _places(self, rank: int) -> tuple[int, int]:
        """The pieces of a rank, counted from the beginning of the sequence."""
        return rank, 2 * self.size - 1 - rank

    def ordered(self, gathered: Sequence[Tensor]) -> Tensor:
        """The shards of the ranks, [N, B, 2, C, ...] each, as the sequence: [N, B, S, ...]."""
        pieces: dict[int, Tensor] = {}
        for rank, both in enumerate(gathered):
            pieces |= dict(zip(self._places(rank), both.unbind(2), strict=True))
        return torch.cat([pieces[place] for place in sorted(pieces)], dim=2)

    def dealt(self, x_NBSKE: Tensor) -> Tensor:
        """The reverse of `ordered`: [cp, N, B, L, K, E]."""
        pieces = x_NBSKE.chunk(2 * self.size, dim=2)
        return torch.stack(
            [torch.cat([pieces[place] for place in self._places(rank)], dim=2) for rank in range(self.size)]
        )


class _Gather(torch.autograd.Function):
    """Keys and values, or latents, of the whole sequence [N, B, S, K, E] from those of each rank [N, B, L, K, E].

    K and E stand for any dimensions. The gradient of a rank's own is the sum over all ranks, whose queries have seen
    them.
    """

    @staticmethod
    def forward(ctx: Any, x_NBLKE: Tensor, cut: GatheredKeys) -> Tensor:
        ctx.cut = cut
        samples, positions, *heads = x_NBLKE.shape[1:]
        gathered = all_gather(x_NBLKE, cut.group).view(cut.size, -1, samples, 2, positions // 2, *heads)
        return cut.ordered(gathered.unbind())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(ctx.cut.dealt(gradients[0]), ctx.cut.group), None


class _GatherPieces(torch.autograd.Function):
    """[P, ...] of each rank -> [cp, P, ...]; the gradient of a rank's own is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, cut: _ContextAxis) -> Tensor:
        ctx.cut = cut
        return all_gather(x_P, cut.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], ctx.cut.group), None


@dataclass(frozen=True)
class ExchangedHeads(_ContextAxis):
    """Every rank has one piece of the sequence, and some heads of all of it while it attends."""

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """See `SequenceCut`: piece r of cp."""
        pieces = x.chunk(self.size, dim)
        assert len(pieces) == self.size and pieces[0].shape == pieces[-1].shape, f"{x.shape} over cp {self.size}"
        return pieces[self.rank].contiguous()

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """See `SequenceCut`: one, as without cp."""
        return ((0, length),)

    def own_pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """See `SequenceCut`: piece r of cp."""
        size = length // self.size
        return ((self.rank * size, (self.rank + 1) * size),)

    def gather_pieces(self, x_P: Tensor) -> Tensor:
        """See `SequenceCut`."""
        return cast(Tensor, _GatherPieces.apply(x_P, self))[:, 0]  # type: ignore[no-untyped-call]

    def own_heads(self, x_H: Tensor) -> Tensor:
        """See `SequenceCut`: piece r of cp."""
        return x_H.chunk(self.size)[self.rank]

    def attend(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKV: Tensor,
        core: AttentionFn,
        keys: Sequence[int],
    ) -> Tensor:
        """See `SequenceCut`. Consecutive query heads share a key head, so that those of a rank stay with theirs."""
        if k_BLKE.shape[2] % self.size:
            assert self.size % k_BLKE.shape[2] == 0, f"{k_BLKE.shape[2]} key heads over cp {self.size}"
            copies = self.size // k_BLKE.shape[2]
            k_BLKE, v_BLKV = (x.repeat_interleave(copies, dim=2) for x in (k_BLKE, v_BLKV))
        # One exchange for the three: for each rank its heads of q, k and v, one after the other.
        three = (q_BLHE, k_BLKE, v_BLKV)
        by_rank = [self._pieces(x, 2).flatten(3) for x in three]
        mixed = cast(Tensor, _Exchange.apply(torch.cat(by_rank, dim=3).flatten(2), self, True))  # type: ignore[no-untyped-call]
        parts = torch.split(mixed, [x.shape[3] for x in by_rank], dim=2)
        q_BSHE, k_BSKE, v_BSKV = (
            part.reshape(*part.shape[:2], -1, x.shape[3]) for part, x in zip(parts, three, strict=True)
        )
        return cast(Tensor, _Exchange.apply(core(q_BSHE, k_BSKE, v_BSKV, 0), self, False))  # type: ignore[no-untyped-call]

    def attend_latent(
        self,
        q_BLHE: Tensor,
        g_BLG: Tensor,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]],
        core: AttentionFn,
        keys: Sequence[int],
    ) -> Tensor:
        """See `SequenceCut`: heads are exchanged as those of `attend`, since a rank needs some of them alone."""
        return self.attend(q_BLHE, *expand(g_BLG), core, keys)

    def to_heads(self, x_BLHE: Tensor) -> Tensor:
        """All heads of a piece -> some heads [B, S, H / cp, E] of the sequence; without E it is in H."""
        received = all_to_all(self._pieces(x_BLHE, 2).movedim(2, 0), self.group)
        return received.movedim(0, 1).flatten(1, 2)

    def to_positions(self, x_BSHE: Tensor) -> Tensor:
        """The reverse of `to_heads`."""
        received = all_to_all(self._pieces(x_BSHE, 1).movedim(1, 0), self.group)
        return received.movedim(0, 2).flatten(2, 3)

    def _pieces(self, x: Tensor, dim: int) -> Tensor:
        """A dimension as two, the first of which has a piece for each rank."""
        return torch.stack(x.chunk(self.size, dim), dim)


class _Exchange(torch.autograd.Function):
    """Exchange of shares of the sequence for shares of the heads (`to_heads`), or back; backward reverses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: ExchangedHeads, to_heads: bool) -> Tensor:
        ctx.cut, ctx.to_heads = cut, to_heads
        return cut.to_heads(x) if to_heads else cut.to_positions(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = ctx.cut.to_positions if ctx.to_heads else ctx.cut.to_heads
        return back(gradients[0]), None, None
