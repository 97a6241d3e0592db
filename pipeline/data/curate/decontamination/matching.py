"""N-grams of an index in texts, by one of two engines with the same results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError, install_extra
from pipeline.common.imports import has_numba
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.decontamination.index import NgramIndex
from pipeline.data.curate.decontamination.numpy_engine import Hashes, ngram_hashes, window_hashes, word_hashes
from pipeline.data.curate.decontamination.words import find_words, fold_table, ngram_hash, word_hash

HIT = np.dtype([("row", "<u4"), ("ngram", "<u4")])
"""Record of an n-gram of the index in a document."""
_WINDOWS = 2**12
EngineName = Literal["auto", "numba", "python"]
_PROOF = (
    "", "a", "The quick brown-fox, don't", "ÀÉ e\u0301 Straße ǅ İ ΑΣ σς", "中文字 日本語です ｶﾞ", "ภาษาไทย १२३ ٣ ½ ①",
    "a\u00adb\u200dc\ufeff", "\u0301\u0301", " \n\t\u2028x\x85y\x00z", "\U0001f600a\U00020000b\U0010ffff", "_x__y1_2",
)  # fmt: skip


class Matcher(ABC):
    """Finds the n-grams of an index in documents.

    Args:
        index: of items.
    """

    def __init__(self, index: NgramIndex) -> None:
        self.index = index

    @abstractmethod
    def found(self, batch: TextBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """(documents of the batch by place, n-grams), in any order, perhaps several times."""

    def hits(self, batch: TextBatch) -> npt.NDArray[np.void]:
        """Hits of a batch: `HIT` of shape (hits,), ascending, each once."""
        documents, ngrams = self.found(batch)
        pairs = np.unique(batch.rows[documents].astype(np.uint64) << np.uint64(32) | ngrams.astype(np.uint64))
        found = np.zeros(len(pairs), HIT)
        found["row"] = pairs >> np.uint64(32)
        found["ngram"] = pairs & np.uint64(2**32 - 1)
        return found


class NumpyMatcher(Matcher):
    """By NumPy."""

    def found(self, batch: TextBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """By operations on all words of the batch at once."""
        words, starts = word_hashes(batch.texts)
        places = self._candidates(words)
        # An n-gram ends in the document that it begins in.
        documents = np.searchsorted(starts, places, side="right") - 1
        left = starts[documents + 1] - places
        found_documents, found_ngrams = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
        for length in self.index.ngram_lengths.tolist():
            fits = left >= length
            wanted = _hashes_at(words, places[fits], length)
            numbers = np.searchsorted(self.index.arrays["hashes"], wanted)
            numbers = np.minimum(numbers, len(self.index) - 1)
            same = self.index.arrays["hashes"][numbers] == wanted
            found_documents.append(documents[fits][same])
            found_ngrams.append(numbers[same].astype(np.uint32))
        return np.concatenate(found_documents), np.concatenate(found_ngrams)

    def _candidates(self, words: Hashes) -> npt.NDArray[np.int64]:
        """Places of words with which an n-gram may begin, by the bits of its first words."""
        bitmap = self.index.arrays["bitmap"]
        shift = np.uint64(64 - (len(bitmap) * 8).bit_length() + 1)
        found = [np.zeros(0, np.int64)]
        step, prefix = 2**14, self.index.prefix
        for start in range(0, len(words) - prefix + 1, step):
            slots = ngram_hashes(words[start : start + step + prefix - 1], prefix) >> shift
            bits = bitmap[slots >> np.uint64(3)] >> (slots & np.uint64(7)).astype(np.uint8)
            found.append(np.flatnonzero(bits & np.uint8(1)) + start)
        return np.concatenate(found)


def _hashes_at(words: Hashes, places: npt.NDArray[np.int64], length: int) -> Hashes:
    """Hashes of the n-grams of `length` words that begin at some places."""
    found = [np.zeros(0, np.uint64)]
    for start in range(0, len(places), _WINDOWS):
        windows = words[places[start : start + _WINDOWS, None] + np.arange(length)]
        found.append(window_hashes(windows))
    return np.concatenate(found)


class NumbaMatcher(Matcher):
    """By compiled code."""

    def __init__(self, index: NgramIndex) -> None:
        super().__init__(index)
        from pipeline.data.curate.decontamination import numba_engine

        self._engine = numba_engine
        self._words = np.zeros(2**16, np.uint64)
        self._out = np.zeros(2**10, np.uint32)

    def found(self, batch: TextBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """One document after the other."""
        table = fold_table()
        documents, ngrams = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
        for number, (start, end) in enumerate(zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True)):
            if len(self._words) < end - start:
                self._words = np.zeros(end - start, np.uint64)
            count = self._engine.hash_words(batch.data[start:end], table, self._words)
            found = self._look_up(self._words[:count])
            if len(found):
                documents.append(np.full(len(found), number))
                ngrams.append(found)
        return np.concatenate(documents), np.concatenate(ngrams)

    def _look_up(self, words: Hashes) -> npt.NDArray[np.uint32]:
        index = self.index
        while True:
            count = self._engine.find_ngrams(
                words,
                index.prefix,
                index.ngram_lengths,
                index.arrays["bitmap"],
                index.arrays["hashes"],
                self._out,
            )
            if count <= len(self._out):
                return self._out[:count].copy()
            self._out = np.zeros(count, np.uint32)


def open_matcher(index: NgramIndex, engine: EngineName) -> Matcher:
    """The matcher of an engine. `auto` is numba where it is installed and agrees with plain Python on hard texts.

    Raises:
        UserError: numba is wanted, and is missing or gives other hashes.
    """
    if engine == "python" or (engine == "auto" and not has_numba()):
        return NumpyMatcher(index)
    if not has_numba():
        raise UserError(f"data.curate.engine: numba is not installed: {install_extra('curate')}")
    if numba_agrees():
        return NumbaMatcher(index)
    if engine == "auto":
        return NumpyMatcher(index)
    raise UserError("data.curate.engine: numba gives other words than plain Python here; write `engine: python`")


@cache
def numba_agrees() -> bool:
    """Tell whether the compiled code gives the words and n-grams of plain Python."""
    from pipeline.data.curate.decontamination import numba_engine

    for text in (*_PROOF, " ".join(_PROOF)):
        data = np.frombuffer(text.encode(), np.uint8)
        out = np.zeros(max(1, len(data)), np.uint64)
        words = out[: numba_engine.hash_words(data, fold_table(), out)]
        if words.tolist() != reference_words(text):
            return False
        if len(words) and int(numba_engine.ngram_hash(words, 0, len(words))) != ngram_hash(words.tolist()):
            return False
    return True


def reference_words(text: str) -> list[int]:
    """Hashes of the words of a text, in plain Python."""
    return [word_hash(word.codes) for word in find_words(text)]


def reference_ngrams(index: NgramIndex, text: str) -> list[tuple[int, int, int]]:
    """N-grams of an index in a text, in plain Python: the definition of a hit, and the places for reports.

    Returns:
        (n-gram, start, end in characters), in the order of the text.
    """
    words = find_words(text)
    hashes = [word_hash(word.codes) for word in words]
    known = index.arrays["hashes"]
    found = []
    for place in range(len(words)):
        for length in index.ngram_lengths.tolist():
            if place + length <= len(words):
                wanted = np.uint64(ngram_hash(hashes[place : place + length]))
                number = int(np.searchsorted(known, wanted))  # a dict of millions takes longer than a document
                if number < len(known) and known[number] == wanted:
                    found.append((number, words[place].start, words[place + length - 1].end))
    return found


def texts_batch(texts: Sequence[str]) -> TextBatch:
    """A batch of texts without ids and metadata, whose rows are their places."""
    encoded = [text.encode() for text in texts]
    starts = np.cumsum([0, *map(len, encoded)])
    rows = np.arange(len(texts), dtype=np.uint32)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return TextBatch(data, starts, texts, rows, [""] * len(texts), [None] * len(texts))
