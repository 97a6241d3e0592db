"""Leaders, compiled: `plain.PlainLeaders` with tables of numbers for its dictionaries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import njit
from pipeline.data.curate.duplicates.leaders.leader_choice import _SLACK as SLACK
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    URL,
    Frequencies,
    LeaderChoice,
    Members,
    empty_choice,
    prefix_size,
)

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF, _LOW, _ONE = np.uint64(32), np.uint64(2**32 - 1), np.uint64(1)
_WORDS = 16
"""Words of 64 bits of a bitmap: 1,024 bits for sets of some hundred shingles."""
_TEN_BITS, _SIX_BITS, _IN_WORD = np.uint64(54), np.uint64(6), np.uint64(63)
_TWO, _FOUR, _TOP = np.uint64(2), np.uint64(4), np.uint64(56)
_PAIRS, _FOURS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_BYTES, _EACH_BYTE = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
NODE = np.dtype([("shingle", "<u4"), ("largest", "<i4"), ("slot", "<i8"), ("next", "<i8")])
"""A shingle of a leader: the largest set that may be similar if this is the first common one; the next in its chain."""


@njit
def _size_class(size: int) -> int:
    shift = 0
    while size >> shift >= 64:
        shift += 1
    return shift * 32 + (size >> shift)


@njit
def _largest_other(size: int, place: int, bound: float, longest: int) -> int:
    if bound <= 0:
        return longest
    return min(longest, math.floor((size - place) * (1 + bound) / bound - size + SLACK))


@njit
def _fewest_common(one: int, other: int, bound: float) -> int:
    return max(1, math.ceil(bound / (1 + bound) * (one + other) - SLACK))


@njit
def _prefix_size(size: int, bound: float) -> int:
    return size - max(1, math.ceil(bound * size - SLACK)) + 1


@njit
def _chain(shingle: Any, number: int, chains: int) -> int:
    """Chain of a shingle and a class of sizes; others may be in the same one."""
    key = (np.uint64(shingle) << _HALF | np.uint64(number)) * _SPREAD
    return int(key >> _HALF & np.uint64(chains - 1))


@njit
def _common(one: Any, other: Any, fewest: int) -> int:
    """Number of common shingles; less than `fewest` if it cannot be reached."""
    i, j, common = 0, 0, 0
    a, b = len(one), len(other)
    while i < a and j < b:
        x, y = one[i], other[j]
        if x == y:
            common += 1
            i += 1
            j += 1
        else:
            if common + min(a - i, b - j) < fewest:
                return common
            if x < y:
                i += 1
            else:
                j += 1
    return common


@njit
def _share_band(one: Any, other: Any) -> bool:
    equal = 0
    for band in range(len(one)):
        equal += one[band] == other[band]
    return equal > 0


@njit
def _set_bits(shingles: Any, bits: Any) -> None:
    """Write a bitmap of a set: each bit is the parity of the shingles that fall on it.

    Of two sets it differs in at most as many bits as there are shingles that only one of them has (bitmap filter, as in
    Sandes, Teodoro and Melo 2017).
    """
    bits[:] = 0
    for shingle in shingles:
        bit = np.uint64(shingle) * _SPREAD >> _TEN_BITS
        bits[bit >> _SIX_BITS] ^= _ONE << (bit & _IN_WORD)


@njit
def _differ_in_more(one: Any, other: Any, most: int) -> bool:
    """Tell whether two bitmaps differ in more than `most` bits."""
    count = 0
    for word in range(_WORDS):
        x = one[word] ^ other[word]
        x -= x >> _ONE & _PAIRS
        x = (x & _FOURS) + (x >> _TWO & _FOURS)
        x = x + (x >> _FOUR) & _BYTES
        count += int(x * _EACH_BYTE >> _TOP)
        if count > most:
            return True
    return False


@njit
def _similar(
    shingles: Any, bands: Any, bits: Any, order: Any, stamp: int, leaders: Any, table: Any, bound: float, longest: int
) -> tuple[int, float]:
    """(slot, similarity) of the first leader that is similar; slot -1 if none is."""
    kept, starts, kept_bands, kept_bits, seen = leaders
    nodes, firsts, _ = table
    size = len(shingles)
    best, similarity = -1, 0.0
    low = _size_class(size)
    for place in range(len(order)):
        if order[place] >> _HALF <= _ONE:
            continue
        shingle = np.uint32(order[place] & _LOW)
        other = _largest_other(size, place, bound, longest)
        high = _size_class(_largest_other(other, 0, bound, longest))
        for number in range(low, high + 1):
            node = firsts[_chain(shingle, number, len(firsts))]
            while node >= 0:
                slot = nodes[node].slot
                if best >= 0 and slot >= best:
                    break
                if nodes[node].shingle == shingle and nodes[node].largest >= size and seen[slot] != stamp:
                    theirs = kept[starts[slot] : starts[slot + 1]]
                    fewest = _fewest_common(size, len(theirs), bound)
                    if size - place >= fewest:
                        seen[slot] = stamp
                        most = size + len(theirs) - 2 * fewest
                        if not _differ_in_more(kept_bits[slot], bits, most) and _share_band(kept_bands[slot], bands):
                            common = _common(theirs, shingles, fewest)
                            ratio = common / (size + len(theirs) - common)
                            if ratio >= bound:
                                best, similarity = slot, ratio
                                break
                node = nodes[node].next
    return best, similarity


@njit
def _link(node: int, nodes: Any, firsts: Any, lasts: Any) -> None:
    """Put a shingle of a leader behind those in its chain."""
    chain = _chain(nodes[node].shingle, _size_class(nodes[node].largest), len(firsts))
    if firsts[chain] < 0:
        firsts[chain] = node
    else:
        nodes[lasts[chain]].next = node
    lasts[chain] = node


@njit
def _link_all(count: int, nodes: Any, firsts: Any, lasts: Any) -> None:
    for node in range(count):
        nodes[node].next = -1
        _link(node, nodes, firsts, lasts)


@njit
def _order(shingles: Any, counts: Any) -> Any:
    mask = np.uint32(len(counts) - 1)
    keys = np.empty(len(shingles), np.uint64)
    for place in range(len(shingles)):
        keys[place] = np.uint64(counts[shingles[place] & mask]) << _HALF | np.uint64(shingles[place])
    return np.sort(keys)


@njit
def _choose(
    block: Any, before: int, counts: Any, longest: int, bound: float, first: Any, leaders: Any, table: Any, state: Any,
    choice: Any,
) -> None:  # fmt: skip
    shingles, sets, all_bands, exact, url, roles = block
    first_exact, first_url = first
    numbers, kept, starts, kept_bands, kept_bits, seen = leaders
    nodes, firsts, lasts = table
    leader, rule, similarity = choice
    bits = np.zeros(_WORDS, np.uint64)
    for place in range(len(roles)):
        one = shingles[sets[place] : sets[place + 1]]
        order = _order(one, counts)[: _prefix_size(len(one), bound)] if len(one) else np.empty(0, np.uint64)
        if roles[place] != MUST_LEAD:
            if first_exact[exact[place]] >= 0:
                leader[place], rule[place] = first_exact[exact[place]], EXACT
                continue
            if first_url[url[place]] >= 0:
                leader[place], rule[place] = first_url[url[place]], URL
                continue
            if len(one):
                of_kept = kept, starts, kept_bands, kept_bits, seen
                stamp = before + place
                _set_bits(one, bits)
                slot, ratio = _similar(one, all_bands[place], bits, order, stamp, of_kept, table, bound, longest)
                if slot >= 0:
                    leader[place], rule[place], similarity[place] = numbers[slot], NEAR, ratio
                    continue
        if roles[place] == CANNOT_LEAD:
            continue
        if first_exact[exact[place]] < 0:
            first_exact[exact[place]] = before + place
        if first_url[url[place]] < 0:
            first_url[url[place]] = before + place
        if len(one):
            slot = state[0]
            numbers[slot] = before + place
            starts[slot + 1] = starts[slot] + len(one)
            kept[starts[slot] : starts[slot + 1]] = one
            kept_bands[slot] = all_bands[place]
            _set_bits(one, kept_bits[slot])
            for at in range(len(order)):
                if order[at] >> _HALF > _ONE:
                    node = state[1]
                    nodes[node].shingle = np.uint32(order[at] & _LOW)
                    nodes[node].largest = _largest_other(len(one), at, bound, longest)
                    nodes[node].slot, nodes[node].next = slot, -1
                    _link(node, nodes, firsts, lasts)
                    state[1] += 1
            state[0] += 1


class CompiledLeaders:
    """Leaders whose documents come in blocks, in rank order.

    Memory for each leader: its set, 128 bytes, 8 bytes for each of its bands, and up to 48 bytes for each shingle that
    is looked at and occurs in another document, too.

    Args:
        bound: of the similarity.
        frequencies: of the shingles of all documents.
        bands: number of bands.
        documents: of all blocks; `exact` and `url` are below it.
    """

    def __init__(self, bound: float, frequencies: Frequencies, bands: int, documents: int) -> None:
        self._bound, self._frequencies = float(bound), frequencies
        self._before = 0
        self._first = np.full(documents, -1, np.int64), np.full(documents, -1, np.int64)
        self._state = np.zeros(2, np.int64)
        """Leaders that have a set, and their shingles in chains."""
        self._numbers = np.zeros(0, np.int64)
        self._kept = np.zeros(0, np.uint32)
        self._starts = np.zeros(1, np.int64)
        self._bands = np.zeros((0, bands), np.uint64)
        self._bits = np.zeros((0, _WORDS), np.uint64)
        self._seen = np.zeros(0, np.int64)
        self._nodes = np.zeros(0, NODE)
        self._chains = _chains(1)

    def add(self, block: Members) -> LeaderChoice:
        """Choose among the next documents; places of leaders count from the first document of the first block."""
        choice = empty_choice(len(block))
        self._make_room(block)
        _choose(
            (block.shingles, block.starts, block.bands, block.exact, block.url, block.roles),
            self._before,
            self._frequencies.counts,
            self._frequencies.longest,
            self._bound,
            self._first,
            (self._numbers, self._kept, self._starts, self._bands, self._bits, self._seen),
            (self._nodes, *self._chains),
            self._state,
            (choice.leader, choice.rule, choice.similarity),
        )
        self._before += len(block)
        return choice

    def _make_room(self, block: Members) -> None:
        """Make room for as many leaders as the block has documents."""
        leaders, nodes = (int(count) for count in self._state)
        slots = leaders + len(block)
        self._numbers = _longer(self._numbers, slots)
        self._starts = _longer(self._starts, slots + 1)
        self._bands = _longer(self._bands, slots)
        self._bits = _longer(self._bits, slots)
        self._seen = _longer(self._seen, slots, -1)
        self._kept = _longer(self._kept, int(self._starts[leaders]) + len(block.shingles))
        sizes = np.diff(block.starts)
        nodes += sum(prefix_size(size, self._bound) for size in sizes[sizes > 0].tolist())
        self._nodes = _longer(self._nodes, nodes)
        if len(self._chains[0]) < nodes:
            self._chains = _chains(nodes)
            _link_all(int(self._state[1]), self._nodes, *self._chains)


def _chains(nodes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last place of each chain; -1 where it has none."""
    count = 1 << max(nodes - 1, 1).bit_length()
    return np.full(count, -1, np.int64), np.full(count, -1, np.int64)


def _longer(array: npt.NDArray[Any], size: int, value: int = 0) -> npt.NDArray[Any]:
    """The array with room for more, if it has too little."""
    if len(array) >= size:
        return array
    longer = np.full((max(size, len(array) * 3 // 2), *array.shape[1:]), value, array.dtype)
    longer[: len(array)] = array
    return longer
