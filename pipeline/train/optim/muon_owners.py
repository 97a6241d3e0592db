"""Matrices that are cut over processes, each computed whole by one of them.

What is a function of a whole matrix, as its orthogonalization, would otherwise need every matrix on every process, and
all would compute the same. Here each process owns some: it gets their pieces, computes, and sends the pieces of the
result back, which is one exchange each way for as many matrices as there are processes.

Of experts whole ones are on a process, which then needs no other. Where there are more processes than experts, each is
cut, and its matrices are dealt as others are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from pipeline.train.distributed.process_group import COLLECTIVE_TIMEOUT
from pipeline.train.model.init import local_range

Piece = tuple[range, range]
"""Rows and columns of the whole matrix."""


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The processes of the mesh that a parameter is placed on, which is all of one stage. Every process calls this.

    The mesh of experts has other axes than that of other parameters, and the same processes in the same order.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    # Stages come one after the other in the order of the ranks. Every process makes the groups of all stages, in the
    # same order: `new_group` is a collective of all ranks, whoever is a member.
    size = mesh.size()
    members = [range(start, start + size) for start in range(0, dist.get_world_size(), size)]
    groups: list[dist.ProcessGroup] = [dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT) for ranks in members]
    return groups[dist.get_rank() // size]


@dataclass(frozen=True)
class _Cut:
    """Pieces of matrices of one shape, by rank of the group."""

    shape: torch.Size
    pieces: tuple[Piece, ...]
    replicas: tuple[tuple[int, ...], ...]
    """Ranks among which there is every piece once, of the same numbers: those that an owner gets its pieces from."""

    @classmethod
    def of(cls, parameter: DTensor, expert: int | None = None) -> _Cut:
        """Cut of a matrix; with `expert`, of its matrix in a stack, of which processes with others have nothing."""
        mesh, placements = parameter.device_mesh, parameter.placements
        # Of the ranks with the same coordinates on the axes of copies.
        copies = [axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate)]
        places = list(product(*map(range, mesh.shape)))
        which = [tuple(place[axis] for axis in copies) for place in places]
        together: dict[tuple[int, ...], tuple[int, ...]] = {
            key: tuple(rank for rank, other in enumerate(which) if other == key) for key in dict.fromkeys(which)
        }
        first = parameter.ndim - 2
        pieces = tuple(
            (local_range(parameter, first, place), local_range(parameter, first + 1, place))
            if expert is None or expert in local_range(parameter, 0, place)
            else (range(0), range(0))
            for place in places
        )
        return cls(parameter.shape[first:], pieces, tuple(together[key] for key in which))

    def numel(self, rank: int) -> int:
        rows, columns = self.pieces[rank]
        return len(rows) * len(columns)


class Owners:
    """Deals matrices to the processes of a stage.

    Args:
        cuts: Of the matrices, in the same order on all processes of the stage.
        group: From `group_of`.
    """

    def __init__(self, cuts: Sequence[_Cut], group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        assert all(len(cut.pieces) == self._size for cut in cuts), "a mesh of other processes"
        self._cuts = cuts
        # Matrices of about the same size together, so that owners compute equally long.
        self._order = sorted(range(len(cuts)), key=lambda place: -self._cuts[place].shape.numel())

    @classmethod
    def of_matrices(cls, matrices: Sequence[DTensor], group: dist.ProcessGroup) -> Owners:
        """Owners of matrices that this process has pieces of."""
        known: dict[tuple[object, ...], _Cut] = {}
        cuts = []
        for matrix in matrices:
            key = _key(matrix)
            known[key] = known.get(key) or _Cut.of(matrix)
            cuts.append(known[key])
        return cls(cuts, group)

    @classmethod
    def of_experts(cls, stacks: Sequence[DTensor], group: dist.ProcessGroup) -> dict[Tensor, Owners]:
        """Owners of the matrices of each stack, [E, R, C]; a stack whose matrices are whole needs none."""
        known: dict[tuple[object, ...], Owners | None] = {}
        found: dict[Tensor, Owners] = {}
        for stack in stacks:
            key = _key(stack)
            if key not in known:
                cut = not has_whole_experts(stack)
                known[key] = cls([_Cut.of(stack, expert) for expert in range(stack.shape[0])], group) if cut else None
            if owners := known[key]:
                found[stack] = owners
        return found

    def rounds(self) -> Iterator[list[int]]:
        """Places of matrices that are dealt together, one to a process at most, in the order of their owners."""
        for start in range(0, len(self._order), self._size):
            yield self._order[start : start + self._size]

    def compute(
        self, places: Sequence[int], pieces: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """This process's pieces of `function(matrix)`, from those of each matrix.

        All processes of the stage call this for the same round.

        Args:
            places: A round.
            pieces: Of its matrices, those that this process has, all of one dtype.
            function: Of a whole matrix; keeps shape and dtype.
        """
        cuts = [self._cuts[place] for place in places]
        if self._size == 1:
            return [function(piece) for piece in pieces]
        mine = cuts[self._rank] if self._rank < len(cuts) else None
        sources = mine.replicas[self._rank] if mine else ()
        idle = [0] * (self._size - len(cuts))
        # To every owner, if it gets its pieces from this rank.
        sent = [
            piece if self._rank in cut.replicas[owner] else piece[:0]
            for owner, (piece, cut) in enumerate(zip(pieces, cuts, strict=True))
        ]
        received = self._exchange(
            sent,
            [piece.numel() for piece in sent] + idle,
            [mine.numel(rank) if mine and rank in sources else 0 for rank in range(self._size)],
        )
        results: list[Tensor] = []
        if mine:
            whole = received[0].new_empty(mine.shape)
            for rank in sources:
                _view(whole, mine.pieces[rank]).copy_(received[rank].view(_size(mine.pieces[rank])))
            result = function(whole)
            results = [_view(result, piece) for piece in mine.pieces]
        back = self._exchange(
            results or [pieces[0].new_empty(0)],
            [result.numel() for result in results] or [0] * self._size,
            [cut.numel(self._rank) for cut in cuts] + idle,
        )
        return [flat.view(piece.shape) for flat, piece in zip(back, pieces, strict=False)]

    def compute_experts(self, stack: DTensor, piece: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """This process's piece of `function` of each matrix of a stack, for the owners of its experts.

        Args:
            stack: The parameter.
            piece: Numbers in its place, those of this process.
            function: See `compute`.
        """
        experts = local_range(stack, 0)
        result = torch.empty_like(piece)
        for places in self.rounds():
            own = [experts.index(place) if place in experts else None for place in places]
            given = [piece.new_empty(0, 0) if place is None else piece[place] for place in own]
            for place, computed in zip(own, self.compute(places, given, function), strict=True):
                if place is not None:
                    result[place] = computed
        return result

    def _exchange(self, tensors: Sequence[Tensor], to: list[int], come: list[int]) -> tuple[Tensor, ...]:
        """Elements that each rank sends to this one, flat. Sizes are in elements, by rank."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        received = flat.new_empty(sum(come))
        dist.all_to_all_single(received, flat, come, to, group=self._group)
        return torch.split(received, come)


def _key(parameter: DTensor) -> tuple[object, ...]:
    """Key of a parameter's cut, which equal parameters of other layers share."""
    return parameter.shape, parameter.device_mesh, parameter.placements


def has_whole_experts(stack: DTensor) -> bool:
    """True if no matrix of a stack is cut: every process has some whole ones, or all."""
    places = product(*map(range, stack.device_mesh.shape))
    return all(len(local_range(stack, dim, place)) == stack.shape[dim] for place in places for dim in (1, 2))


def _view(whole: Tensor, piece: Piece) -> Tensor:
    rows, columns = piece
    return whole[rows.start : rows.start + len(rows), columns.start : columns.start + len(columns)]


def _size(piece: Piece) -> tuple[int, int]:
    return len(piece[0]), len(piece[1])
