"""A dataset of any number of parts, read as one row of tokens and documents."""

from __future__ import annotations

import itertools
import resource
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.indexed import IndexedPart, part_files, part_prefix, read_metadata, read_provenance
from pipeline.data.manifest import (
    PARTS_FILE,
    REPAIR,
    REPAIR_ADOPTED,
    REPAIR_DAMAGED,
    Manifest,
    read_manifest,
    read_parts,
)
from pipeline.errors import UserError

# An open part holds two file descriptors; half of what the process may have is left to others.
_OPEN_AT_ONCE = max(8, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
_serial = itertools.count()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _open_part(serial: int, prefix: Path) -> IndexedPart:
    """Parts open in this process, over all datasets; `serial` is the `Dataset` object that opened it."""
    try:
        return IndexedPart(prefix)
    except UserError as error:
        files = part_files(prefix)
        repair = REPAIR_DAMAGED if all(path.exists() for path in files) else REPAIR
        if any(path.is_symlink() for path in files):
            repair = REPAIR_ADOPTED
        raise UserError(f"{error}; {repair}") from None


class Dataset:
    """Reader of a dataset folder. Opening costs the same for one part and for 100,000; parts are opened when touched.

    Tokens and documents are numbered over all parts. Safe to use from several threads.
    """

    def __init__(self, folder: Path, manifest: Manifest, parts: npt.NDArray[Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokens = manifest.tokens
        self.documents = manifest.documents
        self.text_bytes = manifest.text_bytes
        self.dtype = np.dtype(manifest.dtype)
        self.fingerprint = manifest.fingerprint
        self._serial = next(_serial)
        self._names = parts[["unit", "link"]].copy()
        self._has_metadata = bool(parts["meta"].any())
        # Shape (parts + 1,): where each part begins.
        self._token_starts = np.concatenate([[0], np.cumsum(parts["tokens"], dtype=np.int64)])
        self._document_starts = np.concatenate([[0], np.cumsum(parts["documents"], dtype=np.int64)])
        if (self._token_starts[-1], self._document_starts[-1]) != (self.tokens, self.documents):
            raise UserError(f"{folder}: {PARTS_FILE} and manifest.json have different totals; {REPAIR}")

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Open a dataset folder.

        Raises:
            UserError: not a finished dataset, or damaged; the message names the file.
        """
        manifest = read_manifest(folder)
        return cls(folder, manifest, read_parts(folder, manifest))

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """A copy of the token ids [start, start + count), in the dtype of the dataset.

        Raises:
            IndexError: outside of [0, tokens).
        """
        self._check_tokens(start, count)
        result = np.empty(count, self.dtype)
        done = 0
        while done < count:
            part, offset = self._part_of_token(start + done)
            step = min(count - done, part.tokens - offset)
            result[done : done + step] = part.read(offset, step)
            done += step
        return result

    def document_at(self, token: int) -> int:
        """The document that a token belongs to."""
        self._check_tokens(token, 1)
        index = self._index_of_token(token)
        offset = token - int(self._token_starts[index])
        return int(self._document_starts[index]) + self._part(index).document_at(offset)

    def document_start(self, document: int) -> int:
        """The token at which a document begins; for `documents`, the number of tokens."""
        if not 0 <= document <= self.documents:
            raise IndexError(f"document {document} is outside of [0, {self.documents}] of {self.folder}")
        if document == self.documents:
            return self.tokens
        index = self._index_of_document(document)
        offset = document - int(self._document_starts[index])
        return int(self._token_starts[index]) + self._part(index).document_start(offset)

    def document_starts(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens in [start, start + count) at which documents begin, ascending."""
        self._check_tokens(start, count)
        found = []
        done = 0
        while done < count:
            index = self._index_of_token(start + done)
            base = int(self._token_starts[index])
            step = min(count - done, int(self._token_starts[index + 1]) - start - done)
            found.append(base + self._part(index).document_starts(start + done - base, step))
            done += step
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def provenance(self, document: int) -> tuple[int, int, int, int]:
        """Where a document came from: (unit, row in the unit, flags, xxh3-64 of its id)."""
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} is outside of [0, {self.documents}) of {self.folder}")
        index = self._index_of_document(document)
        try:
            return read_provenance(self._prefix(index), document - int(self._document_starts[index]))
        except UserError as error:
            raise UserError(f"{error}; {REPAIR_DAMAGED}") from None

    def metadata(self, document: int) -> dict[str, Any]:
        """What was kept of a document beside its text (`metadata` of the source); empty if nothing was."""
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} is outside of [0, {self.documents}) of {self.folder}")
        if not self._has_metadata:
            return {}
        index = self._index_of_document(document)
        first, end = (int(start) for start in self._document_starts[index : index + 2])
        try:
            return read_metadata(self._prefix(index), document - first, end - first)
        except UserError as error:
            raise UserError(f"{error}; {REPAIR_DAMAGED}") from None

    def _check_tokens(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) are outside of [0, {self.tokens}) of {self.folder}")

    def _index_of_token(self, token: int) -> int:
        # Empty parts begin where the next one does; the last of them has the token.
        return int(np.searchsorted(self._token_starts, token, side="right")) - 1

    def _index_of_document(self, document: int) -> int:
        return int(np.searchsorted(self._document_starts, document, side="right")) - 1

    def _part_of_token(self, token: int) -> tuple[IndexedPart, int]:
        index = self._index_of_token(token)
        return self._part(index), token - int(self._token_starts[index])

    def _prefix(self, index: int) -> Path:
        unit, link = self._names[index]
        return part_prefix(self.folder, int(unit), int(link))

    def _part(self, index: int) -> IndexedPart:
        part = _open_part(self._serial, self._prefix(index))
        tokens = int(self._token_starts[index + 1] - self._token_starts[index])
        documents = int(self._document_starts[index + 1] - self._document_starts[index])
        if (part.tokens, part.documents, part.dtype) != (tokens, documents, self.dtype):
            raise UserError(
                f"{part.idx_path} has {part.tokens} tokens in {part.documents} documents ({part.dtype}), but "
                f"{PARTS_FILE} says {tokens} in {documents} ({self.dtype}); {REPAIR_DAMAGED}"
            )
        return part
