"""Leaders: in rank order, a document is removed if an earlier kept document is equal or similar, else it is kept.

Two documents are similar if they share a band of their signatures and the Jaccard similarity of their sets of shingles,
counted, is at least `min_similarity`. Whether a document is removed depends on its pairs with earlier ones alone, never
on which others are in its cluster.

Pages of one template share bands with each other by the thousands, and must not be compared in all pairs. So a
document is only compared with leaders that have one of its rare shingles (prefix filter, as in Chaudhuri, Ganti and
Kaushik 2006 and PPJoin, Xiao et al. 2008). Put the shingles of every set into the same order, the rarest first. If sets
of a and b shingles have similarity t, they share at least o = t / (1 + t) * (a + b) shingles, so the first a - o + 1 of
the one and the first b - o + 1 of the other have one in common. In pages of a template these first ones occur in no
other page. The filter loses no pair: the result is that of comparing all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

EXACT, URL, NEAR = 1, 2, 3
CAN_LEAD, CANNOT_LEAD, MUST_LEAD = 0, 1, 2
"""Roles: a document; one that a rule removes, which keeps nothing out; one of a finished curation, which never goes."""
_SLACK = 1e-6
"""Products of a bound and a size are rounded so that an error of their last bits keeps a pair."""
_COUNTERS = 28
"""Most bits of the number of counters of shingles."""
Hashes = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Members:
    """Documents of clusters in rank order.

    Attributes:
        shingles: uint32 of shape (shingles,): the set of each document, ascending, one behind the other.
        starts: int64 of shape (documents + 1,): where each set begins; empty if the document is similar to none.
        bands: uint64 of shape (documents, bands): hashes of the bands of signatures.
        exact: int64 of shape (documents,): equal for equal texts, at least 0.
        url: the same for addresses.
        roles: uint8 of shape (documents,).
    """

    shingles: Hashes
    starts: Places
    bands: npt.NDArray[np.uint64]
    exact: Places
    url: Places
    roles: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.roles)

    def part(self, low: int, high: int) -> Members:
        """Documents [low, high)."""
        first, end = int(self.starts[low]), int(self.starts[high])
        return Members(
            self.shingles[first:end],
            self.starts[low : high + 1] - first,
            self.bands[low:high],
            self.exact[low:high],
            self.url[low:high],
            self.roles[low:high],
        )


@dataclass(frozen=True)
class LeaderChoice:
    """Outcome for each document.

    Attributes:
        leader: int64 of shape (documents,): place of the kept document that it is removed for; -1 if it is kept.
        rule: uint8: `EXACT`, `URL` or `NEAR`; 0 if it is kept.
        similarity: float64: Jaccard similarity to that document, for `NEAR`; 1 for other rules.
    """

    leader: Places
    rule: npt.NDArray[np.uint8]
    similarity: npt.NDArray[np.float64]


class Leaders(Protocol):
    """Kept documents of some clusters."""

    def add(self, block: Members) -> LeaderChoice:
        """Choose among the next documents; places of leaders count from the first document of the first block."""


def empty_choice(documents: int) -> LeaderChoice:
    """All are kept."""
    return LeaderChoice(np.full(documents, -1, np.int64), np.zeros(documents, np.uint8), np.ones(documents))


class Frequencies:
    """Number of documents that have a shingle, by which shingles are ordered. Some share a counter; that is harmless.

    Args:
        shingles: of all documents, about.
    """

    def __init__(self, shingles: int) -> None:
        self.counts = np.zeros(2 ** min(max(shingles, 1).bit_length() + 1, _COUNTERS), np.uint32)
        self.longest = 0
        """Shingles of the largest set."""

    def add(self, shingles: Hashes, starts: Places) -> None:
        """Count the shingles of sets."""
        np.add.at(self.counts, shingles & np.uint32(len(self.counts) - 1), np.uint32(1))
        self.longest = max(self.longest, int(np.diff(starts).max(initial=0)))

    def order(self, shingles: Hashes) -> npt.NDArray[np.uint64]:
        """Sort shingles, the rarest first: uint64 of frequency * 2^32 + hash."""
        counts = self.counts[shingles & np.uint32(len(self.counts) - 1)].astype(np.uint64)
        return np.sort(counts << np.uint64(32) | shingles)


def fewest_common(one: int, other: int, bound: float) -> int:
    """Fewest common shingles of sets of these sizes whose similarity may reach the bound."""
    return max(1, math.ceil(bound / (1 + bound) * (one + other) - _SLACK))


def prefix_size(size: int, bound: float) -> int:
    """Shingles of a set that are looked at: the shortest set that can be similar has bound * size shingles."""
    return size - max(1, math.ceil(bound * size - _SLACK)) + 1


def largest_other(size: int, place: int, bound: float, longest: int) -> int:
    """Largest set that may be similar if the first common shingle is at a place of a set of a size.

    Args:
        size: of the set.
        place: in its order, from 0.
        bound: of the similarity.
        longest: there is no larger set.
    """
    if bound <= 0:
        return longest
    return min(longest, math.floor((size - place) * (1 + bound) / bound - size + _SLACK))


def size_class(size: int) -> int:
    """Class of sets of about one size: 32 for each power of two, ascending."""
    shift = max(size.bit_length() - 6, 0)
    return shift * 32 + (size >> shift)
