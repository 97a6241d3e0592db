"""Names of a part's tensors in Hugging Face's formats, and how their rows lie there.

An order is an array of row numbers, computed when a tensor is converted: mapping a model makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

RowNumbers = NDArray[np.int64]


@dataclass(frozen=True)
class RowOrder:
    """The order in which a tensor of theirs has the rows of ours, which are counted one tensor below the other."""

    text: str
    """Name of it for the docs, like "head by head"."""
    rows: Callable[[Any], RowNumbers]
    """From the spec of the part: for each row of theirs which row of ours it is. A permutation."""

    def of(self, part: Any) -> RowNumbers:
        """For each row of theirs the one of ours."""
        return _numbers(self, part)[0]

    def back(self, part: Any) -> RowNumbers:
        """For each row of ours the one of theirs."""
        return _numbers(self, part)[1]


@lru_cache(maxsize=64)  # layers share their specs
def _numbers(order: RowOrder, part: Any) -> tuple[RowNumbers, RowNumbers]:
    ours = order.rows(part)
    theirs = np.empty_like(ours)
    theirs[ours] = np.arange(len(ours))
    return ours, theirs


def by_group(groups: int, *sizes: int) -> RowNumbers:
    """Rows group by group, where ours has tensor by tensor.

    Args:
        groups: Heads, for instance.
        sizes: Rows of a group in each tensor of ours. `by_group(heads, dim, dim, dim)` is [heads, 3, dim] there.
    """
    starts = np.cumsum([0, *(groups * size for size in sizes)])
    tensors = [
        start + np.arange(groups * size).reshape(groups, size) for start, size in zip(starts, sizes, strict=False)
    ]
    return np.concatenate(tensors, axis=1).reshape(-1)


def rope_pairs(heads: int, head_dim: int, rotated: int | None = None, *, first: int = 0) -> RowNumbers:
    """Rows of heads whose rotary pairs are neighbours there; here dimension i goes with i + rotated / 2.

    Args:
        heads: Of queries or of keys.
        head_dim: Rows of a head.
        rotated: Rows of a head, from `first` on, that are rotated; by default all.
        first: The first row that is rotated.
    """
    rotated = head_dim - first if rotated is None else rotated
    pairs = first + np.arange(rotated).reshape(2, rotated // 2).T.reshape(-1)
    of_head = np.concatenate((np.arange(first), pairs, np.arange(first + rotated, head_dim)))
    return (head_dim * np.arange(heads)[:, None] + of_head).reshape(-1)


ExpertFiles = Literal["numbered", "stacked"]
"""How files have the matrices of experts, which are one parameter [experts, ...] here: each is a tensor with its number
in the name, or a tensor has all of them, too."""
EXPERT = "{e}"
"""Placeholder for the number of an expert in names."""


@dataclass(frozen=True)
class TensorNames:
    """A tensor of theirs within a layer, and those of ours within the part that it has one below the other.

    `ours` are parameters where the first has a dot (`q_norm.weight`), or else modules, which have a weight and perhaps
    a bias.
    """

    theirs: str
    ours: tuple[str, ...]
    order: RowOrder | None = None
    """None: the rows are in our order."""
    parameter: bool = False
    """`ours` are parameters of the part itself, whose names have no dot (`Vector`)."""
    unit_dims: tuple[int, ...] = ()
    """Dimensions of theirs that have size 1 and that ours lacks, in ascending order: (1,) of the weights of a
    convolution by channel."""
    experts: ExpertFiles | None = None
    """Ours are parameters of experts, and all that is said here is true of the matrix of each."""
    transposed: bool = False
    """Theirs is [in, out], of parameters; see `Names.transposed` for modules."""
    where: Callable[[Any], bool] | None = None
    """Of the spec of the part: true where it has this one. None: always."""

    @property
    def of_parameters(self) -> bool:
        """True if the names are those of parameters, and False if of modules."""
        return self.parameter or "." in self.ours[0]


PartTable = Sequence[TensorNames | tuple[str, tuple[str, ...]]]
"""All tensors of a kind of part; a pair is `TensorNames` with nothing special."""


def named(table: PartTable) -> list[TensorNames]:
    """Its entries in one form."""
    return [entry if isinstance(entry, TensorNames) else TensorNames(*entry) for entry in table]
