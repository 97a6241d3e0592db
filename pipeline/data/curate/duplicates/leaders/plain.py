"""Leaders by Python and NumPy."""

from __future__ import annotations

import numpy as np

from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    URL,
    Frequencies,
    Hashes,
    LeaderChoice,
    Members,
    empty_choice,
    fewest_common,
    largest_other,
    prefix_size,
    size_class,
)


class PlainLeaders:
    """Leaders whose documents come in blocks, in rank order.

    Args:
        bound: of the similarity.
        frequencies: of the shingles of all documents.
    """

    def __init__(self, bound: float, frequencies: Frequencies) -> None:
        self._bound = bound
        self._frequencies = frequencies
        self._before = 0
        self._exact: dict[int, int] = {}
        self._url: dict[int, int] = {}
        self._numbers: list[int] = []
        self._sets: list[Hashes] = []
        self._bands: list[np.ndarray] = []
        self._slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By shingle and size class: leaders, and the largest set that may be similar to each if this is the first
        common shingle, which is of the class."""

    def add(self, block: Members) -> LeaderChoice:
        """Choose among the next documents; places of leaders count from the first document of the first block."""
        choice = empty_choice(len(block))
        for place, role in enumerate(block.roles.tolist()):
            shingles = block.shingles[block.starts[place] : block.starts[place + 1]]
            order = self._prefix(shingles)
            removed = role != MUST_LEAD and self._is_removed(block, place, shingles, order, choice)
            if not removed and role != CANNOT_LEAD:
                self._lead(block, place, shingles, order)
        self._before += len(block)
        return choice

    def _prefix(self, shingles: Hashes) -> list[tuple[int, int]]:
        """(place, shingle) of the shingles that are looked at, without those that no other document has."""
        order = self._frequencies.order(shingles)[: prefix_size(len(shingles), self._bound)].tolist()
        return [(place, key & 0xFFFFFFFF) for place, key in enumerate(order) if key >> 32 > 1]

    def _is_removed(
        self, block: Members, place: int, shingles: Hashes, order: list[tuple[int, int]], choice: LeaderChoice
    ) -> bool:
        for rule, value, table in ((EXACT, block.exact[place], self._exact), (URL, block.url[place], self._url)):
            if int(value) in table:
                choice.leader[place], choice.rule[place] = table[int(value)], rule
                return True
        for slot in sorted(self._proposed(len(shingles), order)):
            if (self._bands[slot] == block.bands[place]).any():
                similarity = jaccard(self._sets[slot], shingles)
                if similarity >= self._bound:
                    choice.leader[place], choice.rule[place] = self._numbers[slot], NEAR
                    choice.similarity[place] = similarity
                    return True
        return False

    def _proposed(self, size: int, order: list[tuple[int, int]]) -> set[int]:
        """Leaders that may be similar to a set of a size."""
        longest, found = self._frequencies.longest, set()
        for place, shingle in order:
            other = largest_other(size, place, self._bound, longest)
            last = size_class(largest_other(other, 0, self._bound, longest))
            for number in range(size_class(size), last + 1):
                for slot, largest in self._slots.get((shingle, number), ()):
                    common = fewest_common(size, len(self._sets[slot]), self._bound)
                    if largest >= size and size - place >= common:
                        found.add(slot)
        return found

    def _lead(self, block: Members, place: int, shingles: Hashes, order: list[tuple[int, int]]) -> None:
        number, slot = self._before + place, len(self._sets)
        self._exact.setdefault(int(block.exact[place]), number)
        self._url.setdefault(int(block.url[place]), number)
        if not len(shingles):
            return
        self._numbers.append(number)
        self._sets.append(shingles.copy())
        self._bands.append(block.bands[place].copy())
        for at, shingle in order:
            largest = largest_other(len(shingles), at, self._bound, self._frequencies.longest)
            self._slots.setdefault((shingle, size_class(largest)), []).append((slot, largest))


def jaccard(one: Hashes, other: Hashes) -> float:
    """Jaccard similarity of two sets."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
