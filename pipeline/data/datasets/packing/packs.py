"""Packs of a dataset: samples of whole documents, and of pieces of those that are longer than a sample."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset, TokenSource
from pipeline.data.datasets.packing import blocks
from pipeline.data.datasets.packing.best_fit import IntArray
from pipeline.data.datasets.packing.blocks import PackSection, section_in_memory, unpacked
from pipeline.data.datasets.packing.files import PackFiles, pack_command, packs_folder

_NONE = np.zeros(0, np.int64)


class Packs:
    """Packs of a dataset, or of documents [first, end) of it, for one sequence length.

    Packs are numbered from 0. Documents keep the dataset's numbers. Safe to use from several threads.

    Attributes:
        length: L, tokens of a pack with its padding.
        tokens: of all packs: each token of the documents is in one chunk.
        count: number of packs.

    Args:
        length: L.
        tokens: as above.
        sections: the packs, in order of the documents.
        command: that makes damaged packs again.
    """

    def __init__(self, length: int, tokens: int, sections: Sequence[PackSection], command: str = "") -> None:
        self.length = length
        self._command = command
        self.tokens = tokens
        self._sections = sections
        self._starts = np.concatenate([[0], np.cumsum([section.count for section in sections], dtype=np.int64)])
        self._edges = [int(section.edges[0]) for section in sections]
        self.count = int(self._starts[-1])

    @classmethod
    def open(cls, dataset: Dataset, length: int, documents: tuple[int, int] | None = None) -> Packs:
        """Open the packs of a dataset.

        Args:
            dataset: of the documents.
            length: L, tokens of a pack.
            documents: [first, end) of a slice. Its packs are those of the groups that are all in the slice, and of the
                documents at its ends, which are packed here.

        Raises:
            UserError: packs of this length were not made, or are damaged; the message names the command.
        """
        files = PackFiles.open(dataset, length)
        first, end = documents or (0, dataset.documents)
        if end > files.index.documents:
            raise UserError(
                f"{packs_folder(dataset.folder, length)} has packs of the dataset before it grew; run "
                f"{pack_command(dataset.folder, length)}"
            )
        group = blocks.GROUP
        # Documents of whole groups; the last group on disk may have fewer documents than others.
        low = min(-(-first // group) * group, end)
        high = max(low, end if end == files.index.documents else end // group * group)
        sections = [section_in_memory(dataset, length, first, low)] if first < low else []
        sections += files.sections(low, high)
        if high < end:
            sections.append(section_in_memory(dataset, length, high, end))
        tokens = dataset.document_start(end) - dataset.document_start(first)
        return cls(length, tokens, sections, pack_command(dataset.folder, length))

    @classmethod
    def made(cls, dataset: TokenSource, length: int) -> Packs:
        """Pack a dataset in memory, equal to `open`; of a `Slice`, equal to `open` with its documents."""
        end = dataset.documents
        bounds = [*range(0, end, blocks.BLOCK), end]
        sections = [section_in_memory(dataset, length, *edges) for edges in pairwise(bounds)]
        return cls(length, dataset.document_start(end), sections)

    def chunks(self, packs: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The chunks of packs, in the order of the packs asked for, and of a pack in its own order.

        DocumentChunks that continue a document come first in a pack, then those that begin one.

        Args:
            packs: numbers in [0, count), in any order.

        Returns:
            Four arrays, an element for each chunk: index into `packs`, document, first token in the document, tokens.

        Raises:
            IndexError: outside of [0, count).
            UserError: the packs are damaged, as far as their own numbers tell.
        """
        packs = np.asarray(packs, np.int64)
        if packs.size and not 0 <= int(packs.min()) <= int(packs.max()) < self.count:
            raise IndexError(f"packs {packs.min()}..{packs.max()} are outside of [0, {self.count})")
        number = self._starts.searchsorted(packs, side="right") - 1
        found = [self._chunks_of(each, number, packs) for each in np.unique(number).tolist()]
        which, base, chunk = map(np.concatenate, zip(*found, strict=True)) if found else (_NONE, _NONE, _NONE)
        order = np.argsort(which, kind="stable")
        document, piece, tokens = unpacked(chunk[order])
        index = which[order]
        filled = np.bincount(index, tokens, len(packs))
        if packs.size and not (filled.min() > 0 and filled.max() <= self.length and tokens.min() > 0):
            raise self._damaged()
        return index, document + base[order], piece * self.length, tokens

    def _damaged(self) -> UserError:
        return UserError(f"the packs of {self.length:,} tokens are damaged; make them again with {self._command}")

    def _chunks_of(self, number: int, numbers: IntArray, packs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Chunks in a section: index into the packs, base of the document, the chunk as it is stored.

        Args:
            number: of the section.
            numbers: section of each pack.
            packs: the packs.
        """
        section = self._sections[number]
        block = section.block()
        chosen = np.flatnonzero(numbers == number)
        pack = packs[chosen] - self._starts[number] + section.groups[0]
        begins, ends = block.begins.ranges(pack, np.full(len(pack), 2)).reshape(-1, 2).T
        if not ((begins < ends) & (ends <= begins + self.length)).all():
            raise self._damaged()
        chunks = block.chunks.ranges(begins, ends - begins)
        if int(unpacked(chunks)[0].max()) >= int(section.edges[-1]) - section.base:
            raise self._damaged()
        return np.repeat(chosen, ends - begins), np.full(len(chunks), section.base), chunks

    def packs_of(self, document: int) -> IntArray:
        """The packs that have chunks of a document, in the document's order; none if it is outside, or has no tokens.

        A pack that has several chunks of the document is named for each.
        """
        number = bisect_right(self._edges, document) - 1
        if number < 0 or document >= self._sections[number].edges[-1]:
            return _NONE
        section, start = self._sections[number], int(self._starts[number])
        group = bisect_right(section.edges.data, document) - 1
        first, end = section.groups[group : group + 2].tolist()
        block = section.block()
        begins = block.begins.ranges(np.array([first]), np.array([end - first + 1]))
        in_block, piece, _ = unpacked(block.chunks.ranges(begins[:1], begins[-1:] - begins[0]))
        places = np.flatnonzero(in_block == document - section.base)
        places = places[np.argsort(piece[places])] + begins[0]
        packs: IntArray = begins.searchsorted(places, side="right") - 1 + (first - int(section.groups[0]) + start)
        return packs

    def targets(self, packs: IntArray) -> IntArray:
        """Tokens of each pack; the rest of its L positions is padding."""
        index, _, _, tokens = self.chunks(packs)
        return np.bincount(index, tokens, len(packs)).astype(np.int64)  # exact: far below 2^53
