"""Trained targets of conversations: `PREFIX.mask` of a part.

A little-endian u32 for each document, the number of its trained targets, and then a byte for each token: 1 if the token
is trained on as a target, else 0. The first token of a document has 0, as it is predicted from another document.

In a dataset of pairs each document is two conversations, and the first token of the second one has 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import CHUNK_BYTES
from pipeline.common.retry import retried
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.datasets.weights import map_path
from pipeline.data.tokenization.chat_encoding import SECOND, TRAINED

COUNT = np.dtype("<u4")
"""Trained targets of a document."""

Bytes = npt.NDArray[np.uint8]


def mask_file(prefix: Path) -> Path:
    """The file of a part that has its trained targets."""
    return prefix.with_name(prefix.name + ".mask")


def mask_bytes(documents: Any, tokens: Any) -> Any:
    """Size of the file of a part by its numbers of documents and tokens, or arrays of them."""
    return documents * COUNT.itemsize + tokens


def write_mask(prefix: Path, mask: Bytes, lengths: npt.NDArray[np.int64]) -> HashedFile:
    """The file of a part, written and not yet committed; see `write_mask_blocks`.

    Args:
        prefix: of the part.
        mask: [T] a byte for each token.
        lengths: [D] tokens of each document.
    """
    return write_mask_blocks(prefix, trained_counts(mask, lengths), [mask.astype(np.uint8, copy=False)])


def trained_counts(mask: Bytes, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Trained targets [D] of documents, whose tokens are back to back in `mask` [T]."""
    before = np.concatenate([[0], np.cumsum(mask == TRAINED, dtype=np.int64)])
    counts: npt.NDArray[np.int64] = np.diff(before[np.concatenate([[0], np.cumsum(lengths)])])
    return counts


def write_mask_blocks(prefix: Path, counts: npt.NDArray[Any], blocks: Iterable[bytes | Bytes]) -> HashedFile:
    """The file of a part, written and not yet committed.

    Use it as a context manager; its `commit` gives the file its name.

    Args:
        prefix: of the part.
        counts: [D] trained targets of its documents, in their order.
        blocks: the bytes of its tokens, in their order.
    """
    file = HashedFile(mask_file(prefix))
    try:
        file.write(counts.astype(COUNT).tobytes())
        for block in blocks:
            file.write(block if isinstance(block, bytes) else block.tobytes())
    except BaseException as error:
        file.__exit__(type(error), error, None)
        raise
    return file


def mask_problem(path: Path, lengths: npt.NDArray[np.int64], *, pairs: bool = False) -> str | None:
    """The fault of a file of trained targets; None if it fits documents of these lengths [D].

    Args:
        path: of the file.
        lengths: tokens of each document.
        pairs: each document is two conversations.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = int(ends[-1]) if len(ends) else 0
    if size != mask_bytes(len(lengths), tokens):
        return _wrong_size(path, size, len(lengths), tokens)
    begins = (ends - lengths)[lengths > 0]
    sums, seconds = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    with storage.open_regular(path) as file:
        counts = np.frombuffer(file.read(len(lengths) * COUNT.itemsize), COUNT)
        if len(counts) < len(lengths):
            return f"{path} was cut while it was read"
        done = before = 0
        while data := file.read(CHUNK_BYTES):
            mask = np.frombuffer(data, np.uint8)
            if int(mask.max()) > (SECOND if pairs else 1):
                return f"{path}: the byte {mask.max()} of a token is neither {'0, 1 nor 2' if pairs else '0 nor 1'}"
            if pairs:
                places = done + np.flatnonzero(mask == SECOND)
                np.add.at(seconds, np.searchsorted(ends, places, side="right"), 1)
            first, end = np.searchsorted(ends, [done, done + len(mask)], side="right").tolist()
            running = np.cumsum(mask == TRAINED, dtype=np.int64)
            sums[first:end] = before + running[ends[first:end] - done - 1]
            low, high = np.searchsorted(begins, [done, done + len(mask)]).tolist()
            if mask[begins[low:high] - done].any():
                return f"{path}: the first token of a document is marked as a trained target"
            done, before = done + len(mask), before + int(running[-1])
    if pairs and len(wrong := np.flatnonzero(seconds != 1)):
        return f"{path}: document {wrong[0]} has {seconds[wrong[0]]} marks of a second conversation, and not one"
    wrong = np.flatnonzero(np.diff(sums, prepend=0) != counts)
    if len(wrong):
        return f"{path}: the count of document {wrong[0]} is not the number of its trained targets"
    return None


def _wrong_size(path: Path, size: int, documents: int, tokens: int) -> str:
    return f"{path}: {size:,} bytes for {documents:,} documents of {COUNT.itemsize} and {tokens:,} tokens of 1"


def part_mask(prefix: Path, documents: int, tokens: int, mapped: bool) -> tuple[npt.NDArray[np.uint32], Bytes]:
    """Trained targets of each document [D] of a part, and the byte of each token [T]; read-only.

    Args:
        prefix: of the part.
        documents: of the part, D.
        tokens: of the part, T.
        mapped: map the file; else it is read as a whole.

    Raises:
        UserError: the file is missing, or has another size.
        MachineError: the file system fails again and again.
    """
    path = mask_file(prefix)
    try:
        data = retried(lambda: map_path(path) if mapped else storage.read_bytes(path), path, "opening it")
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    if len(data) != mask_bytes(documents, tokens):
        raise UserError(_wrong_size(path, len(data), documents, tokens))
    return np.frombuffer(data, COUNT, documents), np.frombuffer(data, np.uint8, tokens, documents * COUNT.itemsize)


def mask_blocks(mask: Bytes) -> Iterator[Bytes]:
    """The bytes of tokens in blocks, each with its own memory."""
    for start in range(0, len(mask), CHUNK_BYTES):
        yield np.array(mask[start : start + CHUNK_BYTES])
