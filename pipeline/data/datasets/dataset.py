"""A dataset of any number of parts, read as one row of tokens and documents."""

from __future__ import annotations

import itertools
import resource
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import MachineError, UserError
from pipeline.data.datasets.files import PARTS_FILE
from pipeline.data.datasets.indexed import (
    IndexedPart,
    PreadPart,
    TokenRanges,
    part_files,
    part_prefix,
    read_metadata,
    read_provenance,
)
from pipeline.data.datasets.manifest import REPAIR, REPAIR_ADOPTED, REPAIR_DAMAGED, Manifest, read_manifest, read_parts

ReadBy = Literal["mmap", "pread"]

# An open part holds two file descriptors; half of what the process may have is left to others.
OPEN_AT_ONCE = max(8, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
"""Parts that are open at most, over all datasets of the process."""


@lru_cache(maxsize=OPEN_AT_ONCE)
def _open_part(dataset: Dataset, index: int) -> IndexedPart:
    """Parts open in this process, over all datasets."""
    prefix = dataset.prefix(index)
    try:
        part = IndexedPart(prefix) if dataset.read_by == "mmap" else PreadPart(prefix)
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


class Dataset(TokenRanges):
    """Reader of a dataset folder. Opening costs the same for one part and for 100,000; parts are opened when touched.

    Tokens and documents are numbered over all parts. Safe to use from several threads.

    Args:
        folder: The dataset.
        manifest: Of the folder.
        parts: Of the folder, by `read_parts`.
        read: `mmap`, or `pread` for file systems on which mapping is slow or fails.
    """

    def __init__(self, folder: Path, manifest: Manifest, parts: npt.NDArray[Any], read: ReadBy = "mmap") -> None:
        self.folder = self.place = folder
        self.manifest = manifest
        self.read_by = read
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
        if (self._token_starts[-1], self._document_starts[-1]) != (self.tokens, self.documents):
            raise UserError(f"{folder}: {PARTS_FILE} and manifest.json have different totals; {REPAIR}")
        # The same arrays; Python looks single numbers up in them several times faster than NumPy.
        self._token_view = self._token_starts.data
        self._document_view = self._document_starts.data

    @classmethod
    def open(cls, folder: Path, read: ReadBy = "mmap") -> Dataset:
        """Open a dataset folder.

        Raises:
            UserError: not a finished dataset, or damaged; the message names the file.
        """
        manifest = read_manifest(folder)
        return cls(folder, manifest, read_parts(folder, manifest), read)

    def prefix(self, index: int) -> Path:
        """Prefix of the files of a part."""
        unit, chunk = self._names[index]
        return part_prefix(self.folder, int(unit), int(chunk))

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
            _open_part(self, index).fill(start - starts[index], out[: cut - start])
            start, out = cut, out[cut - start :]

    def document_at(self, token: int) -> int:
        """The document that a token belongs to."""
        self.check_range(token, 1)
        index = self._index_of_token(token)
        return self._document_view[index] + _open_part(self, index).document_at(token - self._token_view[index])

    def document_start(self, document: int) -> int:
        """The token at which a document begins; for `documents`, the number of tokens."""
        if not 0 <= document <= self.documents:
            raise IndexError(f"document {document} is outside of [0, {self.documents}] of {self.folder}")
        if document == self.documents:
            return self.tokens
        index = self._index_of_document(document)
        return self._token_view[index] + _open_part(self, index).document_start(document - self._document_view[index])

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
        row = np.flatnonzero(counts)
        begin, end = starts[row], (starts + counts)[row]
        rows, tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while row.size:
            part = np.searchsorted(self._token_starts, begin, side="right") - 1
            # What continues in the next part is looked up there in the next round.
            cut = np.minimum(end, self._token_starts[part + 1])
            by_part = np.argsort(part, kind="stable")
            row, begin, end, cut, part = row[by_part], begin[by_part], end[by_part], cut[by_part], part[by_part]
            edges = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), len(part)]
            for low, high in itertools.pairwise(edges):
                index = int(part[low])
                base, first = self._token_view[index], begin[low:high]
                which, found = _open_part(self, index).starts_within(first - base, cut[low:high] - first)
                rows.append(row[low + which])
                tokens.append(found + base)
            goes_on = cut < end
            row, begin, end = row[goes_on], cut[goes_on], end[goes_on]
        return np.concatenate(rows), np.concatenate(tokens)

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

    def _locate(self, document: int) -> tuple[int, int, int]:
        """The part that a document is in, its place there, and the number of documents of that part."""
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} is outside of [0, {self.documents}) of {self.folder}")
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

    def starts_within(
        self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The documents that start in ranges [start, start + count): number of the range, and offset."""
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
        self._base = dataset.document_start(first)
        self.tokens = dataset.document_start(end) - self._base

    def fill(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy the token ids from token `start` of the slice on into `out`."""
        self._dataset.fill(self._base + start, out)

    def document_at(self, token: int) -> int:
        """The document that a token of the slice belongs to."""
        return self._dataset.document_at(self._base + token)

    def document_start(self, document: int) -> int:
        """The token of the slice at which a document begins; those outside begin at its ends and have no tokens."""
        return min(max(self._dataset.document_start(document) - self._base, 0), self.tokens)

    def starts_within(
        self, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`Dataset.starts_within` with tokens counted from the start of the slice."""
        rows, tokens = self._dataset.starts_within(starts + self._base, counts)
        return rows, tokens - self._base
