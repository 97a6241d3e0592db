"""Files of the `.bin/.idx` format that another program wrote: all about them is checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import HEADER, HashedFile, IndexedPart, part_files
from pipeline.data.datasets.merge import StreamedIndex
from pipeline.data.datasets.token_bytes import byte_level_sizes
from pipeline.data.datasets.verify import document_ends, index_is_sound
from pipeline.data.tokenization.tokenizer import Tokenizer

BLOCK = 2**18
"""Tokens, sequences or documents that are looked at together."""
SHOWN = 3
"""Number of a kind that are reported one by one."""
_DECODE_TOKENS = 2**20


@dataclass
class Scan:
    """Content of a pair of files.

    Attributes:
        bin_hash: xxh3-64 of the `.bin`.
        documents: those that have tokens.
        sequences: those that have tokens.
        tokens: number of tokens.
        closed: documents whose last token is the end-of-document token.
        first_open: the first document where it is not.
        last_ids: smallest and largest id that is the last of a document.
        inner_ends: end-of-document tokens that are not the last of a document.
        first_inner: (document, token in it) of the first ones.
        text_bytes: bytes of the text that the ids stand for, special tokens left out.
        unknown_tokens: those with the id that stands for text without a token.
    """

    bin_hash: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    closed: int = 0
    first_open: int | None = None
    last_ids: tuple[int, int] | None = None
    inner_ends: int = 0
    first_inner: list[tuple[int, int]] = field(default_factory=list)
    text_bytes: int = 0
    unknown_tokens: int = 0


def open_foreign(prefix: Path) -> IndexedPart:
    """Open a pair of files.

    Raises:
        UserError: one is missing, cut, not of this format, or of several modalities.
    """
    try:
        return IndexedPart(prefix)
    except UserError:
        idx = part_files(prefix)[1]
        if idx.is_file() and idx.stat().st_size >= HEADER.size:
            with storage.open_regular(idx) as file:
                _, _, _, sequences, bounds = HEADER.unpack(file.read(HEADER.size))
            if sequences and idx.stat().st_size == HEADER.size + 13 * sequences + 8 * bounds:
                raise UserError(
                    f"{idx} was written for several modalities (a mode for every sequence), which is not supported"
                ) from None
        raise


def scan(
    part: IndexedPart, tokenizer: Tokenizer, token_bytes: npt.NDArray[Any] | None, advance: Callable[[int], None]
) -> Scan:
    """Look at every length, offset, bound and token of a pair of files, in blocks.

    Args:
        part: the files.
        tokenizer: that they are said to be made with.
        token_bytes: by `bytes_of_tokens`; without it documents are decoded, which is slower.
        advance: is told the bytes that were read.

    Raises:
        UserError: index and tokens do not fit together, or an id is outside of the vocabulary.
    """
    if not index_is_sound(part, shortest=0):
        raise UserError(
            f"{part.idx_path} is damaged: lengths, offsets and document bounds do not agree with each other"
        )
    result = Scan(tokens=part.tokens, documents=sum(map(len, rows_with_tokens(part))))
    for first in range(0, part.sequences, BLOCK):
        result.sequences += int(np.count_nonzero(part.lengths[first : first + BLOCK]))
    digest = xxhash.xxh3_64()
    special = _special_ids(tokenizer)
    for start, ids in token_blocks(part):
        digest.update(ids.data)
        if int(ids.min()) < 0 or int(ids.max()) >= tokenizer.vocab_size:
            raise _foreign_id(part, start, ids, tokenizer)
        _count_ends(part, start, ids, document_ends(part, start, len(ids)), tokenizer.end_of_document, result)
        if tokenizer.unknown is not None:
            result.unknown_tokens += int(np.count_nonzero(ids == tokenizer.unknown))
        if token_bytes is not None:
            result.text_bytes += int(np.take(token_bytes, ids).sum(dtype=np.int64))
        advance(ids.nbytes)
    if token_bytes is None:
        result.text_bytes = sum(_decoded_bytes(part, tokenizer, special))
    if tokenizer.unknown == tokenizer.end_of_document:
        result.unknown_tokens -= result.closed
    result.bin_hash = digest.intdigest()
    return result


def token_blocks(part: IndexedPart) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(first token, ids) of blocks of the `.bin`. Plain reads: mapped pages would count as memory of this process."""
    with storage.open_regular(part.bin_path) as file:
        for start in range(0, part.tokens, BLOCK):
            ids = np.frombuffer(file.read(min(BLOCK, part.tokens - start) * part.dtype.itemsize), part.dtype)
            if len(ids) != min(BLOCK, part.tokens - start):
                raise UserError(f"{part.bin_path} became shorter while it was read")
            yield start, ids


def rows_with_tokens(part: IndexedPart) -> Iterator[npt.NDArray[np.int64]]:
    """The numbers of the documents that have tokens, in blocks."""
    if not part.sequences:
        return
    for first in range(0, part.documents, BLOCK):
        bounds = part.bounds[first : first + BLOCK + 1].astype(np.int64)
        starts = part.pointers[np.minimum(bounds, part.sequences - 1)].astype(np.int64)
        starts[bounds == part.sequences] = part.tokens * part.dtype.itemsize
        yield first + np.flatnonzero(np.diff(starts))


def _count_ends(
    part: IndexedPart, start: int, ids: npt.NDArray[Any], ends: npt.NDArray[np.int64], end: int, result: Scan
) -> None:
    is_end = ids == end
    last = ids[ends - start]
    closed = is_end[ends - start]
    result.closed += int(closed.sum())
    if result.first_open is None and not closed.all():
        result.first_open = part.document_at(int(ends[np.flatnonzero(~closed)[0]]))
    if len(last):
        low, high = result.last_ids or (int(last[0]), int(last[0]))
        result.last_ids = min(low, int(last.min())), max(high, int(last.max()))
    is_end[ends - start] = False
    inner = np.flatnonzero(is_end)
    result.inner_ends += len(inner)
    for token in (inner[: SHOWN - len(result.first_inner)] + start).tolist():
        document = part.document_at(token)
        result.first_inner.append((document, token - part.document_start(document)))


def _foreign_id(part: IndexedPart, start: int, ids: npt.NDArray[Any], tokenizer: Tokenizer) -> UserError:
    place = int(np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))[0])
    return UserError(
        f"{part.bin_path}: document {part.document_at(start + place)} has the id {ids[place]}, but the tokenizer's ids "
        f"end with {tokenizer.vocab_size - 1}; the files were made with another tokenizer: give that one with "
        "--tokenizer"
    )


def bytes_of_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.int64] | None:
    """Bytes of text that each id stands for, special tokens none; None if an id has no fixed number.

    It has one with byte-level tokenizers: each character of an entry of the vocabulary is a byte.
    """
    sizes = byte_level_sizes(tokenizer)
    if sizes is not None:
        sizes[_special_ids(tokenizer)] = 0
    return sizes


def _special_ids(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    added = orjson.loads(tokenizer.definition)["added_tokens"]
    return np.array([entry["id"] for entry in added if entry["special"]], np.int64)


def _decoded_bytes(part: IndexedPart, tokenizer: Tokenizer, special: npt.NDArray[np.int64]) -> Iterator[int]:
    """Bytes of the text of each document."""
    for document in range(part.documents):
        start, end = part.document_start(document), part.document_start(document + 1)
        for first in range(start, end, _DECODE_TOKENS):
            ids = part.read(first, min(_DECODE_TOKENS, end - first))
            yield len(tokenizer.decode(ids[~np.isin(ids, special)]).encode())


def write_closed(part: IndexedPart, end: int, prefix: Path) -> tuple[HashedFile, bytearray]:
    """Copy a `.bin` with the end-of-document token behind every document that does not end with it.

    Returns:
        The file, and for each document that has tokens 1 if it got the token: a byte a document.
    """
    opened = bytearray()
    with HashedFile(part_files(prefix)[0]) as file:
        for start, ids in token_blocks(part):
            ends = document_ends(part, start, len(ids)) - start
            is_open = ids[ends] != end
            opened += is_open.astype(np.uint8).tobytes()
            file.write(np.insert(ids, ends[is_open] + 1, end).tobytes())
        file.commit()
    return file, opened


def write_index(part: IndexedPart, found: Scan, opened: bytearray | None, path: Path) -> None:
    """Write an `.idx` without the sequences and documents that have no tokens.

    Args:
        part: the files.
        found: by `scan`.
        opened: by `write_closed`, if the `.bin` is its.
        path: of the new file, which is written in place.
    """
    longer = None if opened is None else np.frombuffer(opened, np.uint8)
    with links.create(path) as file:
        index = StreamedIndex(file, part.dtype, found.sequences, found.documents)
        for first in range(0, part.documents, BLOCK):
            bounds = part.bounds[first : first + BLOCK + 1].astype(np.int64)
            lengths = part.lengths[int(bounds[0]) : int(bounds[-1])].astype(np.int64)
            owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[lengths > 0]
            lengths = lengths[lengths > 0]
            last = np.flatnonzero(np.diff(owner, append=-1))
            if longer is not None:
                lengths[last] += longer[index.documents : index.documents + len(last)]
            index.add_documents(index.sequences + last + 1)
            index.add_sequences(lengths)
        index.finish()
