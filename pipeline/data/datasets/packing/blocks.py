"""Blocks: the packs of up to a million consecutive documents, packed by groups, in memory or in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import TokenSource
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


class Numbers(Protocol):
    """Numbers in memory or in a file."""

    def ranges(self, first: IntArray, counts: IntArray) -> IntArray:
        """The numbers [first, first + count) of each range, one range after the other."""
        ...


@dataclass(frozen=True)
class NumbersInMemory:
    """An array, which may be a mapped file."""

    array: npt.NDArray[Any]

    def ranges(self, first: IntArray, counts: IntArray) -> IntArray:
        """The numbers [first, first + count) of each range, one range after the other."""
        flat = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        found: IntArray = self.array[flat].astype(np.int64)
        return found


@dataclass(frozen=True)
class PackBlock:
    """Packs of consecutive documents.

    Args:
        begins: first chunk of each pack, and at the end the number of chunks.
        chunks: of the packs, one after the other.
    """

    begins: Numbers
    chunks: Numbers


@dataclass(frozen=True)
class PackArrays:
    """A block in memory, as it is written.

    Args:
        begins: u32 for each pack, and one at the end.
        chunks: u64 for each chunk.
        groups: packs of each group.
        cut: documents of more than one chunk.
    """

    begins: npt.NDArray[np.uint32]
    chunks: npt.NDArray[np.uint64]
    groups: list[int]
    cut: int

    @property
    def block(self) -> PackBlock:
        """A reader of it."""
        return PackBlock(NumbersInMemory(self.begins), NumbersInMemory(self.chunks))


def pack_groups(lengths: Sequence[IntArray], length: int, engine: Place = place) -> PackArrays:
    """The packs of the groups of a block.

    Args:
        lengths: of each group, the tokens of its documents.
        length: L, tokens of a pack.
        engine: of `packed`.

    Raises:
        UserError: a document is too long for packs of this length, or the packs are too long.
    """
    check_length(length)
    begins, chunks, groups = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], list[int]()
    documents = first = cut = 0
    for each in lengths:
        if len(each) and -(-int(each.max()) // length) > 1 << PIECE_BITS:
            raise UserError(
                f"a document of {int(each.max()):,} tokens has more than {1 << PIECE_BITS:,} pieces of {length:,}: "
                "choose a longer train.sequence_length, or `data.loader.packing: windows`"
            )
        group = packed(each, length, engine)
        document, piece, tokens = group.chunks
        begins.append(group.begins[1:] + first)
        chunks.append(document + documents | tokens << DOCUMENT_BITS | piece << DOCUMENT_BITS + TOKEN_BITS)
        groups.append(len(group.begins) - 1)
        cut += int((each > length).sum())
        documents += len(each)
        first += len(document)
    return PackArrays(np.concatenate(begins).astype("<u4"), np.concatenate(chunks).astype("<u8"), groups, cut)


def check_length(length: int) -> None:
    """Check that packs may have `length` tokens.

    Raises:
        UserError: they may not.
    """
    if not 1 <= length <= LONGEST:
        raise UserError(f"packs have 1 to {LONGEST:,} tokens, not {length:,}; choose another train.sequence_length")


def unpacked(chunks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Document in the block, number in the document, and tokens of chunks."""
    tokens = chunks >> DOCUMENT_BITS & LONGEST
    return chunks & (1 << DOCUMENT_BITS) - 1, chunks >> DOCUMENT_BITS + TOKEN_BITS, tokens


def group_lengths(dataset: TokenSource, first: int, end: int, group: int) -> list[IntArray]:
    """Tokens of the documents [first, end), by group.

    Args:
        dataset: of the documents.
        first: document.
        end: the document behind the last one.
        group: documents of a group.
    """
    lengths = np.diff(dataset.starts_of(np.arange(first, end + 1)))
    return np.split(lengths, np.arange(first // group * group + group, end, group) - first)


@dataclass(frozen=True)
class PackSection:
    """Consecutive packs of a block: those of whole groups.

    Args:
        block: opens the block.
        base: document that the block counts from.
        groups: first pack of each group in the block, and the end of the last one.
        edges: first document of each group, and the end of the last one.
    """

    block: Callable[[], PackBlock]
    base: int
    groups: IntArray
    edges: IntArray

    @property
    def count(self) -> int:
        """Number of packs."""
        return int(self.groups[-1] - self.groups[0])


def section_in_memory(dataset: TokenSource, length: int, first: int, end: int) -> PackSection:
    """Documents [first, end), at most those of a block, packed in memory."""
    arrays = pack_groups(group_lengths(dataset, first, end, GROUP), length)
    block = arrays.block
    edges = np.array([first, *range(first // GROUP * GROUP + GROUP, end, GROUP), end])
    return PackSection(lambda: block, first, np.concatenate([[0], np.cumsum(arrays.groups)]).astype(np.int64), edges)
