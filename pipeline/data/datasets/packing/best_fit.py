"""Best-fit packing: documents are cut into chunks of at most L tokens, and chunks put together in packs of L tokens.

Best-fit decreasing, as in "Fewer Truncations Improve Language Modeling" (Ding and others, 2024): the longest chunk
first, each into the pack with the least room that takes it. All of it is a pure function of the lengths and L.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.common.imports import has_numba

IntArray = npt.NDArray[np.int64]
Place = Callable[[IntArray, int], IntArray]
"""Engine of `packed`, as `place`."""

_COMPILED_FROM = 2_000_000
"""Documents for which the compiled engine is loaded; `place` takes half a second for a million."""


class DocumentChunks(NamedTuple):
    """Chunks of documents; arrays of one length, an element for each chunk."""

    document: IntArray
    """Number of the document, counted in what was packed."""
    piece: IntArray
    """Number of the chunk in its document: it begins at token `piece * L`."""
    tokens: IntArray
    """From 1 to L."""


class Packed(NamedTuple):
    """Documents in packs."""

    begins: IntArray
    """First chunk of each pack, and at the end the number of chunks; shape (packs + 1,)."""
    chunks: DocumentChunks
    """Chunks of the first pack, then those of the next. In a pack, chunks that continue a document come first; else
    they are in the order of the documents."""


def cut(lengths: IntArray, length: int) -> DocumentChunks:
    """The chunks of documents, in the order of the documents: `length` tokens each, the last one of a document less.

    Args:
        lengths: tokens of each document; one without tokens has no chunk.
        length: L, tokens of a pack.
    """
    pieces = -(-lengths // length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return DocumentChunks(document, piece, np.minimum(length, lengths[document] - piece * length))


def place(sizes: IntArray, length: int) -> IntArray:
    """The pack of each chunk, numbered in the order in which they are begun.

    Of packs with the same room, the one that was filled last takes the chunk.

    Args:
        sizes: tokens of each chunk, descending, from 1 to `length`.
        length: L, tokens of a pack.
    """
    rooms: list[int] = []  # that packs have, ascending
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    result = []
    begun = 0
    for size in sizes.tolist():
        index = bisect_left(rooms, size)
        if index < len(rooms):
            room = rooms[index]
            pack = by_room[room].pop()
            if not by_room[room]:
                del rooms[index]
        else:
            room, pack, begun = length, begun, begun + 1
        result.append(pack)
        if left := room - size:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(pack)
    return np.array(result, np.int64)


def quickest(documents: int) -> Place:
    """The quickest engine for a number of documents; all give the same. The compiled one takes a second to load."""
    if documents < _COMPILED_FROM or not has_numba():
        return place
    from pipeline.data.datasets.packing.compiled import place_compiled

    return place_compiled


def packed(lengths: IntArray, length: int, engine: Place = place) -> Packed:
    """Pack documents.

    Args:
        lengths: tokens of each document, with its end-of-document token.
        length: L, tokens of a pack.
        engine: `place`, or another that gives the same.
    """
    chunks = cut(lengths, length)
    longest_first = np.argsort(-chunks.tokens, kind="stable")
    pack = np.empty(len(longest_first), np.int64)
    pack[longest_first] = engine(chunks.tokens[longest_first], length)
    order = np.lexsort((chunks.piece == 0, pack))  # stable
    begins = np.concatenate([[0], np.cumsum(np.bincount(pack))]) if len(pack) else np.zeros(1, np.int64)
    return Packed(begins.astype(np.int64), DocumentChunks(*(each[order] for each in chunks)))
