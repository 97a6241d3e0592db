"""Counters of all rules, measured of every document, so that rules and bounds change without reading text again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import key, mix
from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch
from pipeline.data.curate.measures import engine_choice, reference
from pipeline.data.curate.measures.engine_choice import CounterEngineName, CountersDiffer

COUNTERS = {
    "characters": "characters",
    "newlines": "line ends",
    "line_characters": "characters without line ends",
    "words": "words",
    "text_words": "words with a letter or a number",
    "text_word_characters": "characters of words with a letter or a number",
    "alpha_words": "words with a letter",
    "stop_words": "different ones of eight English stop words",
    "hashes": "`#`",
    "ellipses": "`...` and `…`",
    "curly_brackets": "`{` and `}`",
    "lorem_ipsum": "`lorem ipsum` in any case",
    "sentences": "sentences",
    "lines": "lines that are not blank",
    "bullet_lines": "lines that begin with `•` or `-`",
    "ellipsis_lines": "lines that end with an ellipsis",
    "punctuated_lines": "lines that end with a mark that ends a sentence",
    "short_lines": "lines of at most 30 characters",
    "paragraphs": "paragraphs",
    "duplicate_lines": "lines that occurred before",
    "duplicate_line_characters": "characters in lines that occurred before",
    "duplicate_paragraphs": "paragraphs that occurred before",
    "duplicate_paragraph_characters": "characters in paragraphs that occurred before",
    **{f"top_{n}_gram_characters": f"characters in the most frequent {n}-gram of words" for n in (2, 3, 4)},
    **{
        f"duplicate_{n}_gram_characters": f"characters in {n}-grams of words that occurred before" for n in range(5, 11)
    },
}
"""Counters by name, which is that of their column, and what each counts. `reference.count` defines them."""
COUNTER_COLUMNS = [(name, "<u4") for name in COUNTERS]
SAMPLED = 1024
"""One document in this many is counted by the reference, too."""
SAMPLED_BYTES = 2**18
"""Longest document of the sample."""


class CounterMeasurer(Measurer):
    """All counters of documents.

    Attributes:
        engine: that counts.
        note: reason why `auto` did not take numba; empty if it did.
    """

    def __init__(self, engine: CounterEngineName = "auto") -> None:
        """Choose an engine and check it on hard texts.

        Raises:
            UserError: numba is asked for and is not there, or an engine gives other counts than the reference.
        """
        self.engine, self.note = engine_choice.open_once(engine)
        self._last_row = -1

    @property
    def columns(self) -> list[tuple[str, str]]:
        return COUNTER_COLUMNS

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        """Count, and compare a keyed sample of each chunk with the reference.

        Raises:
            CountersDiffer: the engine does not do what the reference does.
        """
        if not len(batch.rows):
            return
        counts = self.engine.count(batch)
        self._verify(batch, counts)
        for name in COUNTERS:
            table[name] = counts[name]

    def _verify(self, batch: TextBatch, counts: dict[str, npt.NDArray[np.uint32]]) -> None:
        for place in self._sample(batch):
            expected = reference.count(batch.texts[place])
            found = {name: int(values[place]) for name, values in counts.items()}
            if different := [name for name in COUNTERS if found[name] != expected[name]]:
                name = different[0]
                raise CountersDiffer(
                    self.engine.name, name, found[name], expected[name], batch.ids[place], int(batch.rows[place])
                )

    def _sample(self, batch: TextBatch) -> Sequence[int]:
        """Places of documents in a batch, chosen by key; at least one of a chunk's first batch."""
        first = int(batch.rows[0])
        begins, self._last_row = first <= self._last_row or self._last_row < 0, int(batch.rows[-1])
        numbers = mix(batch.rows.astype(np.uint64), key("counters", batch.ids[0], first))
        short = np.flatnonzero(np.diff(batch.starts) <= SAMPLED_BYTES)
        numbers = numbers[short]
        chosen = short[numbers % np.uint64(SAMPLED) == 0]
        if begins and not len(chosen) and len(short):
            chosen = short[[int(np.argmin(numbers))]]
        return [int(place) for place in chosen]
