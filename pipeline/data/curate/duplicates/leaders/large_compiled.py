"""Leaders of one large cluster, compiled: `leaders.LargeCluster` with tables of numbers for its dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.compiled import njit
from pipeline.data.curate.duplicates.leaders.bits import count_bits
from pipeline.data.curate.duplicates.leaders.compiled import equal_values, share_band
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    URL,
    LeaderChoice,
    Members,
    empty_choice,
    join_choices,
)
from pipeline.data.curate.duplicates.signature import band_hashes

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(24)
_ONE = np.uint64(1)
_TOP = np.uint64(60)
_BITS = 4
"""Of each value in a sketch. Two different values have equal ones by chance, one time in 16."""
Table = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Keys, and the first and last place of each; -1 where the table is free."""


def _empty_table(size: int) -> Table:
    return np.zeros(size, np.uint64), np.full(size, -1, np.int64), np.full(size, -1, np.int64)


@njit
def _find(keys: Any, firsts: Any, key: Any) -> int:
    """Place of a key in a table, or the free place where it goes."""
    most = np.uint64(len(keys) - 1)
    spread = key * _SPREAD
    place = (spread >> _SHIFT) & most
    while firsts[place] >= 0 and keys[place] != key:
        place = (place + _ONE) & most
    return int(place)


@njit
def _move(old: Any, new: Any) -> None:
    keys, firsts, lasts = old
    for place in range(len(keys)):
        if firsts[place] >= 0:
            at = _find(new[0], new[1], keys[place])
            new[0][at], new[1][at], new[2][at] = keys[place], firsts[place], lasts[place]


@njit
def _sketch(one: Any, bits: Any) -> None:
    """Four bits of each value of a signature, so that equal values have equal bits: 64 values per number."""
    words = len(bits) // _BITS
    bits[:] = 0
    for place in range(len(one)):
        mixed = np.uint64(one[place]) * _SPREAD >> _TOP
        for bit in range(_BITS):
            bits[bit * words + (place >> 6)] |= (mixed >> np.uint64(bit) & _ONE) << np.uint64(place & 63)


@njit
def _differing(bits: Any, sketches: Any, slot: int) -> int:
    """Values that differ from those of a leader, as far as two bits of each show."""
    words = len(bits) // _BITS
    differ = 0
    for word in range(words):
        found = bits[word] ^ sketches[slot, word] | bits[words + word] ^ sketches[slot, words + word]
        differ += count_bits(found)
    return differ


@njit
def _differing_all(bits: Any, sketches: Any, slot: int) -> int:
    """The same by all bits."""
    words = len(bits) // _BITS
    differ = 0
    for word in range(words):
        found = bits[word] ^ sketches[slot, word] | bits[words + word] ^ sketches[slot, words + word]
        found |= bits[2 * words + word] ^ sketches[slot, 2 * words + word]
        found |= bits[3 * words + word] ^ sketches[slot, 3 * words + word]
        differ += count_bits(found)
    return differ


@njit
def _similar(one: Any, bits: Any, hashes: Any, table: Any, chain: Any, kept: Any, fewest: int) -> tuple[int, int]:
    """(slot, equal values) of the first leader that resembles a signature; slot -1 if none does."""
    keys, firsts, _ = table
    signatures, sketches = kept
    bands, most = len(hashes), len(one) - fewest
    best, equal = -1, 0
    for band in range(bands):
        node = firsts[_find(keys, firsts, hashes[band])]
        while node >= 0 and (best < 0 or node // bands < best):
            slot = node // bands
            if _differing(bits, sketches, slot) <= most and _differing_all(bits, sketches, slot) <= most:
                same = equal_values(signatures[slot], one)
                if same >= fewest and share_band(signatures[slot], one, bands):
                    best, equal = slot, same
                    break
            node = chain[node]
    return best, equal


@njit
def _add_band(key: Any, node: int, table: Any, chain: Any) -> int:
    """Put a leader behind those that have the same values in a band; 1 if it is the first."""
    keys, firsts, lasts = table
    at = _find(keys, firsts, key)
    is_new = firsts[at] < 0
    if is_new:
        keys[at], firsts[at] = key, node
    else:
        chain[lasts[at]] = node
    lasts[at] = node
    return 1 if is_new else 0


@njit
def _put_first(key: Any, number: int, table: Any) -> int:
    """Note the first leader of a text or an address; 1 if it is."""
    at = _find(table[0], table[1], key)
    if table[1][at] >= 0:
        return 0
    table[0][at], table[1][at] = key, number
    return 1


@njit
def _choose_block(
    block: Any, hashes: Any, before: int, tables: Any, leaders: Any, counts: Any, fewest: int, choice: Any
) -> None:
    signatures, signed, exact, url, roles = block
    exacts, urls, by_band = tables
    numbers, kept, sketches, chain = leaders
    leader, rule, equal = choice
    bands = hashes.shape[1]
    bits = np.zeros(sketches.shape[1], np.uint64)
    for place in range(len(roles)):
        is_signed = bands > 0 and signed[place]
        if roles[place] != MUST_LEAD:
            first = exacts[1][_find(exacts[0], exacts[1], exact[place])]
            if first >= 0:
                leader[place], rule[place] = first, EXACT
                continue
            first = urls[1][_find(urls[0], urls[1], url[place])]
            if first >= 0:
                leader[place], rule[place] = first, URL
                continue
            if is_signed:
                _sketch(signatures[place], bits)
                of_kept = kept, sketches
                slot, same = _similar(signatures[place], bits, hashes[place], by_band, chain, of_kept, fewest)
                if slot >= 0:
                    leader[place], rule[place], equal[place] = numbers[slot], NEAR, same
                    continue
        if roles[place] == CANNOT_LEAD:
            continue
        counts[0] += _put_first(exact[place], before + place, exacts)
        counts[1] += _put_first(url[place], before + place, urls)
        if is_signed:
            slot = counts[3]
            numbers[slot] = before + place
            kept[slot] = signatures[place]
            _sketch(signatures[place], sketches[slot])
            for band in range(bands):
                counts[2] += _add_band(hashes[place, band], slot * bands + band, by_band, chain)
            counts[3] += 1


class _LargeCluster:
    """Leaders of a cluster whose documents come in blocks, in rank order.

    Memory for each leader: its signature and half a byte per value of it, 8 bytes for each of its bands, and places in
    tables that are at most half full.
    """

    def __init__(self, bands: int, values: int, fewest: int) -> None:
        self._bands, self._fewest = bands, fewest
        self._before = 0
        self._tables = [_empty_table(1024) for _ in range(3)]
        self._counts = np.zeros(4, np.int64)
        """Keys of each table, and leaders that have a signature."""
        self._numbers = np.zeros(0, np.int64)
        self._kept = np.zeros((0, values), np.uint32)
        self._sketches = np.zeros((0, _BITS * -(-values // 64)), np.uint64)
        self._chain = np.zeros(0, np.int64)

    def add(self, block: Members) -> LeaderChoice:
        """Choose among the next documents; places of leaders are those in the whole cluster."""
        choice = empty_choice(len(block))
        hashes = band_hashes(block.signatures, self._bands) if self._bands else np.zeros((len(block), 0), np.uint64)
        self._make_room(len(block))
        _choose_block(
            (block.signatures, block.signed, block.exact, block.url, block.roles),
            hashes,
            self._before,
            tuple(self._tables),
            (self._numbers, self._kept, self._sketches, self._chain),
            self._counts,
            self._fewest,
            (choice.leader, choice.rule, choice.equal),
        )
        self._before += len(block)
        return choice

    def _make_room(self, documents: int) -> None:
        """Make room for more leaders."""
        for number, more in enumerate((documents, documents, documents * self._bands)):
            need = 2 * (int(self._counts[number]) + more)
            old = self._tables[number]
            if len(old[0]) < need:
                self._tables[number] = _empty_table(1 << (need - 1).bit_length())
                _move(old, self._tables[number])
        need = int(self._counts[3]) + documents
        if len(self._numbers) < need:
            size = max(need, len(self._numbers) * 3 // 2)
            self._numbers = _longer(self._numbers, size)
            self._kept = _longer(self._kept, size)
            self._sketches = _longer(self._sketches, size)
            chain = np.full(size * self._bands, -1, np.int64)
            chain[: len(self._chain)] = self._chain
            self._chain = chain


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    longer = np.zeros((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def choose_large_compiled(blocks: Iterable[Members], bands: int, fewest: int) -> LeaderChoice:
    """Choose in one cluster; arguments are those of `leaders.choose_large`."""
    parts: list[LeaderChoice] = []
    cluster: _LargeCluster | None = None
    for block in blocks:
        cluster = cluster or _LargeCluster(bands, block.signatures.shape[1], fewest)
        parts.append(cluster.add(block))
    return join_choices(parts)
