"""Packs of a dataset: samples of whole documents, and of pieces of those that are longer than a sample."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset, TokenSource
from pipeline.data.datasets.packing.best_fit import IntArray, Place, packed, place

GROUP = 10_000
"""Documents that are packed together."""
BLOCK = 100 * GROUP
"""Documents whose packs are in one file, and made by one job."""
DOCUMENT_BITS, TOKEN_BITS, PIECE_BITS = 20, 22, 21
"""A chunk is one number of 8 bytes: from the lowest bit on its document, counted in the block, its tokens, and the
number of the chunk in its document."""
LONGEST = (1 << TOKEN_BITS) - 1
"""Tokens of a pack at most."""
_DOCUMENT = (1 << DOCUMENT_BITS) - 1
_TOKENS = (1 << TOKEN_BITS) - 1


@dataclass(frozen=True)
class Block:
    """Packs of consecutive documents.

    Args:
        begins: first chunk of each pack, and at the end the number of chunks.
        chunks: of the packs, one after the other.
    """

    begins: npt.NDArray[np.uint32]
    chunks: npt.NDArray[np.uint64]

    @property
    def count(self) -> int:
        """Number of packs."""
        return len(self.begins) - 1


def pack_groups(lengths: Sequence[IntArray], length: int, engine: Place = place) -> tuple[Block, IntArray]:
    """The packs of the groups of a block.

    Args:
        lengths: of each group, the tokens of its documents.
        length: L, tokens of a pack.
        engine: of `packed`.

    Returns:
        The block, and the packs of each group.

    Raises:
        UserError: a document is too long for packs of this length, or the packs are too long.
    """
    if length > LONGEST:
        raise UserError(f"packs have at most {LONGEST:,} tokens; train.sequence_length is {length:,}")
    begins, chunks, counts = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], list[int]()
    documents = first = 0
    for each in lengths:
        if len(each) and -(-int(each.max()) // length) > 1 << PIECE_BITS:
            raise UserError(
                f"a document of {int(each.max()):,} tokens has more than {1 << PIECE_BITS:,} pieces of {length:,}: "
                "choose a longer sequence_length, or `data.loader.packing: windows`"
            )
        group = packed(each, length, engine)
        document, piece, tokens = group.chunks
        begins.append(group.begins[1:] + first)
        chunks.append(document + documents | tokens << DOCUMENT_BITS | piece << DOCUMENT_BITS + TOKEN_BITS)
        counts.append(len(group.begins) - 1)
        documents += len(each)
        first += len(document)
    block = Block(np.concatenate(begins).astype("<u4"), np.concatenate(chunks).astype("<u8"))
    return block, np.array(counts, np.int64)


def document_lengths(dataset: TokenSource, first: int, end: int) -> IntArray:
    """Tokens of the documents [first, end)."""
    return np.diff(dataset.starts_of(np.arange(first, end + 1)))


def group_lengths(dataset: TokenSource, first: int, end: int) -> list[IntArray]:
    """Tokens of the documents [first, end), by group."""
    lengths = document_lengths(dataset, first, end)
    return np.split(lengths, np.arange(first // GROUP * GROUP + GROUP, end, GROUP) - first)


@dataclass(frozen=True)
class Section:
    """Some of the packs of a block, which are those of whole groups.

    Args:
        block: opens the block.
        base: document that the block counts from.
        groups: first pack of each group in the block, and the end of the last one.
        edges: first document of each group, and the end of the last one.
    """

    block: Callable[[], Block]
    base: int
    groups: IntArray
    edges: IntArray

    @property
    def count(self) -> int:
        """Number of packs."""
        return int(self.groups[-1] - self.groups[0])


def section_in_memory(dataset: TokenSource, length: int, first: int, end: int) -> Section:
    """Documents [first, end), at most those of a block, packed in memory."""
    block, counts = pack_groups(group_lengths(dataset, first, end), length)
    edges = np.array([first, *range(first // GROUP * GROUP + GROUP, end, GROUP), end])
    return Section(lambda: block, first, np.concatenate([[0], np.cumsum(counts)]), edges)


class Packs:
    """Packs of a dataset, or of documents [first, end) of it, for one sequence length.

    Packs are numbered from 0. Documents keep the dataset's numbers. Safe to use from several threads.

    Args:
        length: L, tokens of a pack.
        tokens: of all packs.
        sections: the packs, in order of the documents.
    """

    def __init__(self, length: int, tokens: int, sections: Sequence[Section]) -> None:
        self.length = length
        self.tokens = tokens
        self._sections = sections
        self._starts = np.concatenate([[0], np.cumsum([section.count for section in sections], dtype=np.int64)])
        self.count = int(self._starts[-1])

    @classmethod
    def open(cls, dataset: Dataset, length: int, documents: tuple[int, int] | None = None) -> Packs:
        """Open the packs of a dataset.

        Args:
            dataset: of the documents.
            length: L, tokens of a pack.
            documents: [first, end) of a slice; its packs have no chunk of other documents.

        Raises:
            UserError: packs of this length were not made, or are damaged; the message names the command.
        """
        return cls._in_memory(dataset, length, *(documents or (0, dataset.documents)))

    @classmethod
    def made(cls, dataset: TokenSource, length: int) -> Packs:
        """Pack a dataset in memory, equal to `open`; of a `Slice`, equal to `open` with its documents."""
        return cls._in_memory(dataset, length, 0, dataset.documents)

    @classmethod
    def _in_memory(cls, dataset: TokenSource, length: int, first: int, end: int) -> Packs:
        bounds = [first, *range(first // BLOCK * BLOCK + BLOCK, end, BLOCK), end]
        sections = [section_in_memory(dataset, length, *edges) for edges in itertools.pairwise(bounds)]
        return cls(length, dataset.document_start(end) - dataset.document_start(first), sections)

    def chunks(self, packs: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The chunks of packs, in the order of the packs asked for, and of a pack in its own order.

        Chunks that continue a document come first in a pack, then those that begin one.

        Args:
            packs: numbers in [0, count), in any order.

        Returns:
            Four arrays, an element for each chunk: index into `packs`, document, first token in the document, tokens.

        Raises:
            IndexError: outside of [0, count).
        """
        packs = np.asarray(packs, np.int64)
        if packs.size and not 0 <= int(packs.min()) <= int(packs.max()) < self.count:
            raise IndexError(f"packs {packs.min()}..{packs.max()} are outside of [0, {self.count})")
        number = self._starts.searchsorted(packs, side="right") - 1
        index, document, chunk = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for each in np.unique(number).tolist():
            chosen = np.flatnonzero(number == each)
            section = self._sections[each]
            block = section.block()
            pack = packs[chosen] - self._starts[each] + section.groups[0]
            begin = block.begins[pack].astype(np.int64)
            counts = block.begins[pack + 1] - begin
            flat = np.arange(int(counts.sum())) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
            found = block.chunks[flat].astype(np.int64)
            index.append(np.repeat(chosen, counts))
            document.append((found & _DOCUMENT) + section.base)
            chunk.append(found)
        order = np.argsort(np.concatenate(index), kind="stable")
        which, documents, flags = (np.concatenate(each)[order] for each in (index, document, chunk))
        first = (flags >> DOCUMENT_BITS + TOKEN_BITS) * self.length
        return which, documents, first, flags >> DOCUMENT_BITS & _TOKENS

    def packs_of(self, document: int) -> IntArray:
        """The packs that have chunks of a document, in the document's order; none if it is outside, or has no tokens.

        A pack may have several chunks of the same document; each is named.
        """
        for section, start in zip(self._sections, self._starts.tolist(), strict=False):
            if section.edges[0] <= document < section.edges[-1]:
                group = bisect_right(section.edges.data, document) - 1
                block = section.block()
                first, end = block.begins[section.groups[group : group + 2]].tolist()
                found = block.chunks[first:end].astype(np.int64)
                places = np.flatnonzero(found & _DOCUMENT == document - section.base)
                places = places[np.argsort(found[places] >> DOCUMENT_BITS + TOKEN_BITS)] + first
                pack = block.begins.searchsorted(places, side="right") - 1
                packs: IntArray = pack - section.groups[0] + start
                return packs
        return np.zeros(0, np.int64)

    def targets(self, packs: IntArray) -> IntArray:
        """Tokens of each pack; the rest of its L positions is padding."""
        index, _, _, tokens = self.chunks(packs)
        return np.bincount(index, tokens, len(packs)).astype(np.int64)  # exact: far below 2^53
