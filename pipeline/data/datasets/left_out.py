"""Files of the `.bin/.idx` format without some of their documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import IndexedPart, IndexedWriter

_TOKENS = 2**20
"""Tokens that are copied together, or those of one document."""
_HOW = "give a file of numpy.save with the numbers of documents, whole numbers in one dimension"


def read_left_out(path: Path, part: IndexedPart) -> npt.NDArray[np.int64]:
    """Numbers of the documents to leave out, ascending, each once.

    Args:
        path: file of `numpy.save` with the numbers.
        part: that they are of.

    Raises:
        UserError: it cannot be read, or a number is none of a document.
    """
    try:
        with storage.open_regular(path) as file:
            found: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"--leave-out: {path} cannot be read: {error}; {_HOW}") from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(f"--leave-out: {path} has {found.dtype} of shape {found.shape}; {_HOW}")
    numbers = np.unique(found).astype(np.int64)
    if len(numbers) and not (numbers[0] >= 0 and numbers[-1] < part.documents):
        raise UserError(
            f"--leave-out: {path} has the numbers {numbers[0]} to {numbers[-1]}, but {part.idx_path} has the documents "
            f"0 to {part.documents - 1}"
        )
    if len(numbers) == part.documents:
        raise UserError(f"--leave-out: {path} has all documents of {part.idx_path}; leave the files out instead")
    return numbers


def write_without(
    part: IndexedPart, left_out: npt.NDArray[np.int64], prefix: Path, advance: Callable[[int], None]
) -> npt.NDArray[np.int64]:
    """Write a pair of files with the documents of another that are not left out; returns their numbers there.

    Args:
        part: the other files, which are sound.
        left_out: numbers of documents, ascending.
        prefix: of the new files.
        advance: told bytes of tokens that were copied.
    """
    kept = np.delete(np.arange(part.documents, dtype=np.int64), left_out)
    with IndexedWriter(prefix, part.dtype) as writer:
        for group in _groups(part, kept):
            first, end = int(group[0]), int(group[-1]) + 1
            start = part.document_start(first)
            ids = part.read(start, part.document_start(end) - start)
            low, *ends = part.bounds[first : end + 1].tolist()
            lengths = part.lengths[low : ends[-1]].tolist()
            counts = np.diff([low, *ends]).tolist()
            writer.add_documents(ids.tobytes(), lengths, {n: count for n, count in enumerate(counts) if count != 1})
            advance(ids.nbytes)
    return kept


def _groups(part: IndexedPart, kept: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Documents that follow each other, in groups of at most `_TOKENS` tokens or of one document."""
    begins = part.starts_of(np.arange(part.documents + 1, dtype=np.int64))
    for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1):
        ends, at = begins[run + 1], 0
        while at < len(run):
            fits = int(ends.searchsorted(begins[run[at]] + _TOKENS, "right"))
            following = max(at + 1, fits)
            yield run[at:following]
            at = following
