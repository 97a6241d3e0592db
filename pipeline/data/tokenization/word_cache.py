"""Words that the `tokenizers` library keeps the ids of: those that a corpus has most of.

Its cache takes the first 10,000 words that it meets, and never another. Words counted in a sample make it a tenth
faster than whatever the first few documents have. They should be cached before much is encoded: then they lie close
together in memory, and later they would be scattered over all that batches take, which costs what they save.
"""

from __future__ import annotations

from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import Unit
from pipeline.data.tokenization.tokenizer import Tokenizer

UNIT_BYTES = 2**23
"""Smallest unit whose words are looked at; of a smaller one that takes longer than they save: 0.3 s."""
_SAMPLE_CHARACTERS = 2**19
_HEAD_CHARACTERS = 2**12
"""Characters of each document: many beginnings have more of what is frequent everywhere than a few whole documents."""
_READ_BYTES = 2**24
"""At most so much is read for the sample."""


class FrequentWords:
    """Has a tokenizer cache the frequent words of the first large unit that it is used for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._are_cached = False

    def look_at(self, unit: Unit, reader: Reader) -> None:
        """Take a unit that is about to be encoded. Remote units would be fetched twice: they are left out."""
        if self._are_cached or unit.bytes < UNIT_BYTES or reader.is_remote or unit.pieces[0].file.is_object:
            return
        self._are_cached = True
        sample: list[str] = []
        left = _SAMPLE_CHARACTERS
        documents = UnitReader(unit, reader)
        for document in documents:
            sample.append(document.text[:_HEAD_CHARACTERS])
            left -= len(sample[-1])
            if left <= 0 or documents.input_bytes >= _READ_BYTES:
                break
        self._tokenizer.cache_words(sample)
