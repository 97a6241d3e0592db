"""A dataset of any number of parts, read as one row of tokens and documents."""

from __future__ import annotations

import resource
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import MachineError, UserError
from pipeline.common.paths import StrPath
from pipeline.data.datasets.document_records import read_metadata, read_provenance
from pipeline.data.datasets.files import PARTS_FILE
from pipeline.data.datasets.indexed import IndexedPart, PreadPart, TokenRanges, part_files, part_prefix
from pipeline.data.datasets.manifest import REPAIR, REPAIR_ADOPTED, REPAIR_DAMAGED, Manifest, read_manifest, read_parts
from pipeline.data.datasets.target_mask import part_mask
from pipeline.data.datasets.weights import part_weights

ReadBy = Literal["mmap", "pread"]

_FEW = 16
"""Ranges of a part that are looked up one by one, which takes microseconds each; more take tens of them together."""


def _mappings() -> int:
    """Mappings that this system allows a process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530  # Linux without a setting


MAPPED_AT_ONCE = max(8, min(16_384, _mappings() // 4))
"""Parts that are mapped at most, over all datasets of the process. Each is two mappings and about 4 kB of Python's
objects; half of the mappings are left to others."""
READ_AT_ONCE = max(8, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
"""Parts that are open at most, over all datasets of the process, where they are not mapped. Each holds a file
descriptor, and its index in memory."""


def open_part(dataset: Dataset, index: int) -> IndexedPart:
    """A part, compared with what the dataset says of it."""
    prefix = dataset.prefix(index)
    try:
        part = dataset.new_part(index)
    except MachineError:
        raise
    except UserError as error:
        files = part_files(prefix)
        repair = REPAIR_DAMAGED if all(path.exists() for path in files) else REPAIR
        if any(path.is_symlink() for path in files):
            repair = REPAIR_ADOPTED
        raise UserError(f"{error}; {repair}") from None
    tokens, documents = dataset.size_of_part(index)
    if (part.tokens, part.documents, part.dtype) != (tokens, documents, dataset.dtype):
        raise UserError(
            f"{part.idx_path} has {part.tokens} tokens in {part.documents} documents ({part.dtype}), but "
            f"{PARTS_FILE} says {tokens} in {documents} ({dataset.dtype}); {REPAIR_DAMAGED}"
        )
    return part


def _open_weights(dataset: Dataset, index: int) -> npt.NDArray[np.float32]:
    """Loss weights of the documents of a part."""
    try:
        return part_weights(dataset.prefix(index), dataset.size_of_part(index)[1], dataset.read_by == "mmap")
    except MachineError:
        raise
    except UserError as error:
        raise UserError(f"{error}; {REPAIR_DAMAGED}") from None


def _open_mask(dataset: Dataset, index: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Trained targets of the documents of a part, and of its tokens."""
    tokens, documents = dataset.size_of_part(index)
    try:
        return part_mask(dataset.prefix(index), documents, tokens, dataset.read_by == "mmap")
    except MachineError:
        raise
    except UserError as error:
        raise UserError(f"{error}; {REPAIR_DAMAGED}") from None


_part_weights = lru_cache(maxsize=MAPPED_AT_ONCE // 2)(_open_weights)
_mapped_mask = lru_cache(maxsize=MAPPED_AT_ONCE // 2)(_open_mask)
_read_mask = lru_cache(maxsize=8)(_open_mask)
_mapped_part = lru_cache(maxsize=MAPPED_AT_ONCE)(open_part)
_read_part = lru_cache(maxsize=READ_AT_ONCE)(open_part)


class Pieces(NamedTuple):
    """Ranges of tokens, cut where parts end; arrays of one length, an element for each piece."""

    row: npt.NDArray[np.int64]
    """Number of the range."""
    column: npt.NDArray[np.int64]
    """Tokens of the range before the piece."""
    part: npt.NDArray[np.int64]
    """Number of the part."""
    start: npt.NDArray[np.int64]
    """First token, counted in the part."""
    length: npt.NDArray[np.int64]
    """Tokens, at least 1."""


class Dataset(TokenRanges):
    """Reader of a dataset folder. Opening costs the same for one part and for 100,000; parts are opened when touched.

    Tokens and documents are numbered over all parts. Safe to use from several threads.

    Of a dataset that has grown, an earlier generation may be taken: `tokens`, `documents`, `text_bytes`, `manifest` and
    `fingerprint` are of that one, and what was appended since is behind its end.

    Attributes:
        has_files: True if the files of all tokens are in the folder.

    Args:
        folder: The dataset.
        manifest: Of the folder.
        parts: Of the folder, by `read_parts`.
        read: `mmap`, or `pread` for file systems on which mapping is slow or fails.
        generation: Index in `manifest.lineage`.
    """

    has_files = True

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        parts: npt.NDArray[Any],
        read: ReadBy = "mmap",
        generation: int = -1,
    ) -> None:
        self.folder = self.place = folder
        self.whole = manifest
        self.manifest = manifest = manifest.lineage[generation]
        self.read_by = read
        self._part: Callable[[Dataset, int], IndexedPart] = _mapped_part if read == "mmap" else _read_part
        # A mask that is not mapped is held in memory.
        self._part_mask = _mapped_mask if read == "mmap" else _read_mask
        self.tokens = manifest.tokens
        self.documents = manifest.documents
        self.text_bytes = manifest.text_bytes
        self.dtype = np.dtype(manifest.dtype)
        self.fingerprint = manifest.fingerprint
        self._names = parts[["unit", "link"]].copy()
        self._has_metadata = bool(parts["meta"].any())
        # Shape (parts + 1,): where each part begins.
        self._token_starts = np.concatenate([[0], np.cumsum(parts["tokens"], dtype=np.int64)])
        self._document_starts = np.concatenate([[0], np.cumsum(parts["documents"], dtype=np.int64)])
        if (self._token_starts[-1], self._document_starts[-1]) != (self.whole.tokens, self.whole.documents):
            raise UserError(f"{folder}: {PARTS_FILE} and manifest.json have different totals; {REPAIR}")
        # The same arrays; Python looks single numbers up in them several times faster than NumPy.
        self._token_view = self._token_starts.data
        self._document_view = self._document_starts.data

    @classmethod
    def open(cls, folder: StrPath, read: ReadBy = "mmap", generation: int = -1) -> Dataset:
        """Open a dataset folder.

        Args:
            folder: The dataset.
            read: How.
            generation: Index in the lineage of its manifest.

        Raises:
            UserError: not a finished dataset, or damaged; the message names the file.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        return cls(folder, manifest, read_parts(folder, manifest), read, generation)

    @property
    def newer(self) -> list[str]:
        """Fingerprints of this generation and of those that it has grown to."""
        return self.lineage[self.lineage.index(self.fingerprint) :]

    @property
    def lineage(self) -> list[str]:
        """Fingerprint of each generation, oldest first."""
        return [manifest.fingerprint for manifest in self.whole.lineage]

    def check_range(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or start + count > self.whole.tokens:
            raise IndexError(
                f"tokens [{start}, {start + count}) are outside of [0, {self.whole.tokens}) of {self.folder}"
            )

    def prefix(self, index: int) -> Path:
        """Prefix of the files of a part."""
        unit, chunk = self._names[index]
        return part_prefix(self.folder, int(unit), int(chunk))

    def new_part(self, index: int) -> IndexedPart:
        """A part, opened anew and not compared with what the dataset says of it."""
        return IndexedPart(self.prefix(index)) if self.read_by == "mmap" else PreadPart(self.prefix(index))

    def size_of_part(self, index: int) -> tuple[int, int]:
        """Tokens and documents of a part."""
        starts, documents = self._token_view, self._document_view
        return starts[index + 1] - starts[index], documents[index + 1] - documents[index]

    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy the token ids from token `start` on into `out`, which is as long as wanted.

        Args:
            start: First token.
            out: [count], of a dtype that has room for the ids.

        Raises:
            IndexError: outside of [0, tokens).
        """
        end = start + len(out)
        self.check_range(start, len(out))
        starts = self._token_view
        while start < end:
            index = self._index_of_token(start)
            cut = min(end, starts[index + 1])
            self._part(self, index).fill(start - starts[index], out[: cut - start])
            start, out = cut, out[cut - start :]

    def document_at(self, token: int) -> int:
        """The document that a token belongs to."""
        self.check_range(token, 1)
        index = self._index_of_token(token)
        return self._document_view[index] + self._part(self, index).document_at(token - self._token_view[index])

    def documents_at(self, pieces: Pieces) -> npt.NDArray[np.int64]:
        """The documents that the first tokens of pieces belong to."""
        result = np.empty(len(pieces.part), np.int64)
        by_part = np.argsort(pieces.part, kind="stable")
        parts, firsts = np.unique(pieces.part[by_part], return_index=True)
        for part, chosen in zip(parts.tolist(), np.split(by_part, firsts[1:]), strict=True):
            result[chosen] = self._part(self, part).documents_at(pieces.start[chosen]) + self._document_view[part]
        return result

    def document_start(self, document: int) -> int:
        """The token at which a document begins; for the one behind the last one, the number of tokens."""
        if not 0 <= document <= self.whole.documents:
            raise IndexError(f"document {document} is outside of [0, {self.whole.documents}] of {self.folder}")
        if document == self.documents:
            return self.tokens
        if document == self.whole.documents:
            return self.whole.tokens
        index = self._index_of_document(document)
        return self._token_view[index] + self._part(self, index).document_start(document - self._document_view[index])

    def starts_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`document_start` of many documents at once, in any order.

        Args:
            documents: numbers in [0, documents].
        """
        part = np.minimum(self._document_starts.searchsorted(documents, side="right"), len(self._names)) - 1
        starts = np.zeros(len(documents), np.int64)
        by_part = np.argsort(part, kind="stable")
        numbers, firsts = np.unique(part[by_part], return_index=True)
        for number, chosen in zip(numbers.tolist(), np.split(by_part, firsts[1:]), strict=True) if part.size else ():
            local = documents[chosen] - self._document_starts[number]
            starts[chosen] = self._part(self, number).starts_of(local) + self._token_starts[number]
        return starts

    def pieces(self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of ranges, which all lie within the dataset. The pieces of a range are in its order.

        Args:
            starts: First token of each range.
            counts: Tokens of each range.
        """
        row = counts.nonzero()[0]
        start, left = starts[row], counts[row]
        column, found = np.zeros(len(row), np.int64), []
        while row.size:
            part = self._token_starts.searchsorted(start, side="right") - 1
            count = np.minimum(left, self._token_starts[part + 1] - start)
            found.append(Pieces(row, column, part, start - self._token_starts[part], count))
            goes_on = (count < left).nonzero()[0]
            if not goes_on.size:
                break
            # What continues in the next part is cut there in the next round.
            row, column, start, left = (each[goes_on] for each in (row, column + count, start + count, left - count))
        if len(found) == 1:
            return found[0]
        return Pieces(*(np.concatenate(each) for each in zip(*found, strict=True))) if found else Pieces(*[row] * 5)

    def part_view(self, part: int, start: int, end: int) -> npt.NDArray[Any]:
        """The token ids [start, end) of a part, which may lie in its file: nobody writes to them."""
        return self._part(self, part).view(start, end)

    def fill_weights(self, part: int, start: int, out: npt.NDArray[np.float32]) -> None:
        """Copy the loss weights of the documents of a piece into `out`, token by token.

        Args:
            part: Number of the part.
            start: First token, counted in the part.
            out: [count], of tokens that the part has.

        Raises:
            UserError: The weights of the part are missing or damaged.
        """
        opened = self._part(self, part)
        size, end = self.dtype.itemsize, start + len(out)
        begins = opened.offsets_within(start + 1, len(out) - 1)
        document = opened.document_at(start)
        edges = np.array([start * size, *begins, end * size]) // size
        weights = _part_weights(self, part)[document : document + len(begins) + 1]
        out[:] = np.repeat(weights, edges[1:] - edges[:-1])

    def weight(self, document: int) -> float:
        """Loss weight of a document; 1 where the dataset has none."""
        index, place, _ = self._locate(document)
        return float(_part_weights(self, index)[place]) if self.manifest.has_weights else 1.0

    def fill_mask(self, part: int, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy into `out` the mask of a piece, see `target_mask`; all 1 without one.

        Args:
            part: Number of the part.
            start: First token, counted in the part.
            out: [count], of tokens that the part has.

        Raises:
            UserError: The mask of the part is missing or damaged.
        """
        if self.manifest.has_mask:
            out[:] = self._part_mask(self, part)[1][start : start + len(out)]
        else:
            out[:] = 1

    def mask(self, document: int) -> npt.NDArray[np.uint8]:
        """The mask of a document's tokens, see `target_mask`; all 1 without one."""
        index, place, _ = self._locate(document)
        part = self._part(self, index)
        start, end = part.document_start(place), part.document_start(place + 1)
        out = np.empty(end - start, np.uint8)
        self.fill_mask(index, start, out)
        return out

    def trained_targets(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of trained targets of many documents at once, in any order.

        Without a mask each token but the first of a document is one.

        Args:
            documents: numbers in [0, documents).

        Raises:
            UserError: The mask of a part is missing or damaged.
        """
        if not self.manifest.has_mask:
            lengths: npt.NDArray[np.int64] = self.starts_of(documents + 1) - self.starts_of(documents)
            return np.maximum(lengths - 1, 0)
        part = self._document_starts.searchsorted(documents, side="right") - 1
        found = np.zeros(len(documents), np.int64)
        for number in np.unique(part).tolist():
            chosen = np.flatnonzero(part == number)
            counts, _ = self._part_mask(self, number)
            found[chosen] = counts[documents[chosen] - self._document_starts[number]]
        return found

    def starts_in(self, pieces: Pieces) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The documents that start in pieces.

        Returns:
            Two arrays, an element for each document: the number of the piece, and the token, counted in the part. The
            documents of a piece are ascending.
        """
        if len(pieces.part) <= _FEW:
            return self._starts_one_by_one(pieces, np.arange(len(pieces.part)))
        by_part = np.argsort(pieces.part, kind="stable")
        part = pieces.part[by_part]
        firsts = np.concatenate([[0], (part[1:] != part[:-1]).nonzero()[0] + 1])
        sizes = np.diff(firsts, append=len(part))
        is_few = sizes <= _FEW
        found = [self._starts_one_by_one(pieces, by_part[np.repeat(is_few, sizes)])]
        for low, size in zip(firsts[~is_few].tolist(), sizes[~is_few].tolist(), strict=True):
            chosen = by_part[low : low + size]
            which, tokens = self._part(self, int(part[low])).starts_within(pieces.start[chosen], pieces.length[chosen])
            found.append((chosen[which], tokens))
        numbers, starts = zip(*found, strict=True)
        return np.concatenate(numbers), np.concatenate(starts)

    def _starts_one_by_one(
        self, pieces: Pieces, chosen: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`starts_in` for some of the pieces."""
        offsets: list[int] = []
        found = []
        arrays = (pieces.part[chosen], pieces.start[chosen], pieces.length[chosen])
        for part, start, count in zip(*(array.tolist() for array in arrays), strict=True):
            of_piece = self._part(self, part).offsets_within(start, count)
            offsets += of_piece
            found.append(len(of_piece))
        return np.repeat(chosen, found), np.array(offsets, np.int64) // self.dtype.itemsize

    def starts_within(
        self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`document_starts` of many ranges at once, which all lie within the dataset.

        Args:
            starts: First token of each range.
            counts: Tokens of each range.

        Returns:
            Two arrays, an element for each document that begins in a range: the number of the range, and the token,
            ascending for each range.
        """
        pieces = self.pieces(starts, counts)
        number, token = self.starts_in(pieces)
        order = np.argsort(number, kind="stable")
        number, token = number[order], token[order]
        return pieces.row[number], token + self._token_starts[pieces.part[number]]

    def provenance(self, document: int) -> tuple[int, int, int, int]:
        """Origin of a document: (unit, row in the unit, flags, xxh3-64 of its id)."""
        index, place, _ = self._locate(document)
        try:
            return read_provenance(self.prefix(index), place)
        except UserError as error:
            raise UserError(f"{error}; {REPAIR_DAMAGED}") from None

    def metadata(self, document: int) -> dict[str, Any]:
        """Metadata that was kept of a document beside its text (`metadata` of the source); empty if nothing was."""
        index, place, documents = self._locate(document)
        if not self._has_metadata:
            return {}
        try:
            return read_metadata(self.prefix(index), place, documents)
        except UserError as error:
            raise UserError(f"{error}; {REPAIR_DAMAGED}") from None

    def part_of(self, document: int) -> tuple[int, range]:
        """The part that a document is in, and the documents of that part."""
        index, _, _ = self._locate(document)
        return index, range(self._document_view[index], self._document_view[index + 1])

    def sequences(self, document: int) -> list[int]:
        """Tokens of each sequence of a document: several where it was encoded in pieces."""
        index, place, _ = self._locate(document)
        part = self._part(self, index)
        first, end = part.bounds[place : place + 2].tolist()
        return [int(length) for length in part.lengths[first:end]]

    def _locate(self, document: int) -> tuple[int, int, int]:
        """The part that a document is in, its place there, and the number of documents of that part."""
        if not 0 <= document < self.whole.documents:
            raise IndexError(f"document {document} is outside of [0, {self.whole.documents}) of {self.folder}")
        index = self._index_of_document(document)
        return index, document - self._document_view[index], self.size_of_part(index)[1]

    def _index_of_token(self, token: int) -> int:
        # Empty parts begin where the next one does; the last of them has the token.
        return bisect_right(self._token_view, token) - 1

    def _index_of_document(self, document: int) -> int:
        return bisect_right(self._document_view, document) - 1


class TokenSource(Protocol):
    """Interface of datasets that windows use. Offsets count tokens from the start of its text."""

    @property
    def folder(self) -> Path:
        """Folder of the dataset, for messages."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the token ids."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        ...

    @property
    def documents(self) -> int:
        """Documents of the whole dataset."""
        ...

    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy the token ids from offset `start` on into `out` [count], which has room for the dtype."""
        ...

    def document_at(self, token: int) -> int:
        """The document that the token at this offset belongs to."""
        ...

    def document_start(self, document: int) -> int:
        """Offset of a document's first token; of the document after the last one, the number of tokens."""
        ...

    def starts_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`document_start` of many documents at once, in any order."""
        ...

    def pieces(self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of ranges [start, start + count), cut where parts of the dataset end."""
        ...

    def part_view(self, part: int, start: int, end: int) -> npt.NDArray[Any]:
        """The token ids [start, end) of a part, counted as pieces have them, which may lie in its file."""
        ...

    def fill_weights(self, part: int, start: int, out: npt.NDArray[np.float32]) -> None:
        """The loss weights of the documents of tokens of a part, token by token."""
        ...

    def fill_mask(self, part: int, start: int, out: npt.NDArray[np.uint8]) -> None:
        """The mask of tokens of a part, see `target_mask`; all 1 without one."""
        ...

    def trained_targets(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of trained targets of many documents at once, in any order."""
        ...

    def starts_in(self, pieces: Pieces) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The documents that start in pieces: number of the piece, and token, counted in its part."""
        ...


class Slice:
    """Some documents of a dataset, one after the other, as a text of their own. Documents keep the dataset's numbers.

    Args:
        dataset: All documents.
        first: First document of the slice.
        end: The one behind its last.
    """

    def __init__(self, dataset: TokenSource, first: int, end: int) -> None:
        assert 0 <= first <= end
        self._dataset = dataset
        self.folder = dataset.folder
        self.dtype = dataset.dtype
        self.documents = dataset.documents
        self.part_view, self.starts_in = dataset.part_view, dataset.starts_in
        self._base = dataset.document_start(first)
        self.tokens = dataset.document_start(end) - self._base

    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy the token ids from token `start` of the slice on into `out`."""
        self._dataset.fill(self._base + start, out)

    def fill_weights(self, part: int, start: int, out: npt.NDArray[np.float32]) -> None:
        """The loss weights of the documents of tokens of a part, token by token."""
        self._dataset.fill_weights(part, start, out)

    def fill_mask(self, part: int, start: int, out: npt.NDArray[np.uint8]) -> None:
        """The mask of tokens of a part, see `target_mask`."""
        self._dataset.fill_mask(part, start, out)

    def trained_targets(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of trained targets of many documents at once, in any order."""
        return self._dataset.trained_targets(documents)

    def document_at(self, token: int) -> int:
        """The document that a token of the slice belongs to."""
        return self._dataset.document_at(self._base + token)

    def document_start(self, document: int) -> int:
        """The token of the slice at which a document begins; those outside begin at its ends and have no tokens."""
        return min(max(self._dataset.document_start(document) - self._base, 0), self.tokens)

    def starts_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`document_start` of many documents at once, in any order."""
        starts: npt.NDArray[np.int64] = np.clip(self._dataset.starts_of(documents) - self._base, 0, self.tokens)
        return starts

    def pieces(self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of ranges that lie within the slice."""
        return self._dataset.pieces(starts + self._base, counts)
