"""Coverage: how much of the text the token ids stand for. Unknown ids are counted, text is decoded again on a sample.

A tokenizer may have no ids for a part of the text (an unknown token stands for it, or nothing does), or change the text
before it is cut into tokens (lower case, folded characters, stripped spaces). Neither shows in the number of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pipeline.common.errors import UserError
from pipeline.common.format import percent
from pipeline.data.sources.records import printable
from pipeline.data.tokenization.tokenizer import Tokenizer

SAMPLE_CHARACTERS = 1024
"""Of a sampled document, so many are encoded and decoded."""
_BEFORE, _SHOWN = 10, 40
"""Characters of an example before the first difference, and in all."""
_Count = Annotated[int, Field(ge=0)]


class RoundTrip(BaseModel):
    """Text of a sample of documents, encoded and decoded again.

    Attributes:
        documents: sampled.
        changed: those that did not come back as they were.
        characters: of the sampled text.
        kept: those that came back, wherever they stand in the text.
        uncovered: those, besides white space, that an unknown token or no token stands for.
        example: the first text that came back with fewer characters, for messages.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    documents: _Count = 0
    changed: _Count = 0
    characters: _Count = 0
    kept: _Count = 0
    uncovered: _Count = 0
    example: str = ""

    def merged(self, other: RoundTrip) -> RoundTrip:
        """The sample with that of another chunk behind it."""
        sums = {name: value + getattr(other, name) for name, value in self if name != "example"}
        return RoundTrip(**sums, example=self.example or other.example)


@dataclass
class Coverage:
    """Counts of a chunk, a split or a source.

    Attributes:
        tokens: with end of document.
        unknown_tokens: those with the unknown id; None if an earlier version has made some and counted none.
        round_trip: of a sample; None if an earlier version has made some without one.
    """

    tokens: int = 0
    unknown_tokens: int | None = 0
    round_trip: RoundTrip | None = field(default_factory=RoundTrip)

    def add(self, split: dict[str, Any]) -> None:
        """Add the counts of a split in a receipt."""
        unknown, sample = split.get("unknown_tokens"), split.get("round_trip")
        self.tokens += split["tokens"]
        self.unknown_tokens = None if unknown is None or self.unknown_tokens is None else self.unknown_tokens + unknown
        self.round_trip = self.round_trip and sample and self.round_trip.merged(RoundTrip(**sample))

    @property
    def unknown_share(self) -> float:
        """The larger of two shares: unknown tokens of all, and uncovered characters of the sample.

        One unknown token may stand for a word or for a line, so neither says enough alone.
        """
        return max(self._unknown_of_tokens, self._of_sample("uncovered"))

    @property
    def lost_share(self) -> float:
        """Share of the characters of the sample that decoding does not give back."""
        return 1 - self._of_sample("kept", 1.0)

    @property
    def in_words(self) -> str:
        """Sentence on the lost text, with an example; empty if nothing is lost."""
        parts = [f"the tokenizer has no token for {self._unknown_in_words}"] if self.unknown_share else []
        if self.round_trip is not None and self.lost_share:
            characters = f"{self.round_trip.characters:,} sampled characters"
            parts.append(f"{percent(self.lost_share)} of {characters} do not come back: {self.round_trip.example}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """For `report.json`."""
        return {"unknown_tokens": self.unknown_tokens, "round_trip": self.round_trip and self.round_trip.model_dump()}

    def check(self, source: str, limit: float, so_far: bool = False) -> None:
        """Refuse a source of whose text too much has no token.

        Args:
            source: its name.
            limit: `data.preprocess.max_unknown`.
            so_far: whether more of the source is still to come.

        Raises:
            UserError: its share is larger.
        """
        if self.unknown_share > limit:
            raise UserError(self.refusal(source, limit, so_far))

    def refusal(self, source: str, limit: float, so_far: bool = False) -> str:
        """Message about a source of whose text too much has no token."""
        example = self.round_trip.example if self.round_trip else ""
        return (
            f"source {source!r}: the tokenizer has no token for {self._unknown_in_words}, "
            f"{'so far, ' if so_far else ''}more than data.preprocess.max_unknown ({limit:g}) allows"
            + (f"; an example: {example}" if example else "")
            + ". Set tokenizer.path to a tokenizer that has tokens for this text (byte-level, or with byte fallback), "
            "or train one (tokenizer.train); or raise data.preprocess.max_unknown if a model should not see this text"
        )

    @property
    def _unknown_in_words(self) -> str:
        tokens = f"{percent(self._unknown_of_tokens)} of {self.tokens:,} tokens are unknown"
        if self.round_trip is None or self._of_sample("uncovered") <= self._unknown_of_tokens:
            return f"a part of the text ({tokens})"
        sample = f"{self.round_trip.characters:,} sampled characters"
        return f"{percent(self._of_sample('uncovered'))} of {sample} ({tokens})"

    @property
    def _unknown_of_tokens(self) -> float:
        return (self.unknown_tokens or 0) / self.tokens if self.tokens else 0.0

    def _of_sample(self, count: str, empty: float = 0.0) -> float:
        sample = self.round_trip
        return getattr(sample, count) / sample.characters if sample and sample.characters else empty


def covered(parts: list[Coverage]) -> Coverage:
    """The sum of some coverages."""
    total = Coverage()
    for part in parts:
        sample = part.round_trip
        total.add({"tokens": part.tokens, "unknown_tokens": part.unknown_tokens, "round_trip": sample and dict(sample)})
    return total


def coverage_of(receipts: Iterable[dict[str, Any]]) -> Coverage:
    """The sum over the splits of some receipts."""
    total = Coverage()
    for split in (split for receipt in receipts for split in receipt["splits"].values()):
        total.add(split)
    return total


class CoverageCounter:
    """Counts the coverage of documents as they are encoded. The result does not depend on the engine of the ids.

    The sample are the documents 0, 1, 2, 4, 7, 11, 17 and so on: it reaches to the last one and costs next to nothing.

    Args:
        tokenizer: of the documents.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seen = self._next = 0
        self.unknown_tokens = 0
        self.round_trip = RoundTrip()

    def offer(self, id: str, text: str) -> None:
        """Look at a document, if it is one of the sample."""
        if self._seen == self._next:
            self._next = 3 * self._seen // 2 + 1
            self.round_trip = self.round_trip.merged(_sampled(self._tokenizer, id, text[:SAMPLE_CHARACTERS]))
        self._seen += 1

    def as_json(self) -> dict[str, Any]:
        """Keys of a receipt's split."""
        return {"unknown_tokens": self.unknown_tokens, "round_trip": self.round_trip.model_dump()}


def unknown_counts(ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], unknown: int | None) -> dict[int, int]:
    """Unknown ids of each text that has any, by its number in the batch.

    Args:
        ids: of all texts.
        lengths: of each.
        unknown: the id.
    """
    places = np.empty(0, np.int64) if unknown is None else np.flatnonzero(ids == unknown)
    if not len(places):
        return {}
    counts = np.bincount(np.searchsorted(np.cumsum(lengths), places, side="right"))
    return {number: int(counts[number]) for number in np.flatnonzero(counts).tolist()}


def _sampled(tokenizer: Tokenizer, id: str, text: str) -> RoundTrip:
    """The round trip of one text."""
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode([each for each in ids if each != tokenizer.unknown])
    if decoded == text:
        return RoundTrip(documents=1, characters=len(text), kept=len(text))
    uncovered = tokenizer.uncovered(text)
    # Without a decoder the ids of parts of words cannot be put together, whatever they stand for.
    kept = (Counter(text) & Counter(decoded)).total() if tokenizer.decodes else len(text) - uncovered
    example = ""
    if kept < len(text) or uncovered:
        back = tokenizer.decode(ids)
        equal = next(
            (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(map(len, (text, back)))
        )
        there, back = (printable(each[max(0, equal - _BEFORE) :][:_SHOWN]) for each in (text, back))
        example = f"'{there}' of document {printable(id)} comes back as '{back}'"
    return RoundTrip(
        documents=1,
        changed=int(tokenizer.decodes or bool(uncovered)),
        characters=len(text),
        kept=kept,
        uncovered=uncovered,
        example=example,
    )
