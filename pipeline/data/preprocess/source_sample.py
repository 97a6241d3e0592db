"""Sample of a source's documents, read and encoded for the estimates of a dry run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from pipeline.common.format import counted
from pipeline.data.preprocess.tokenize_unit import SourceJob, cut_text
from pipeline.data.sources.damage import DamagedFile, damaged_files
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import NOT_BAD, NULL_TEXT, Unit, UnusableRecord
from pipeline.data.tokenization.chat_encoding import encode_chat
from pipeline.data.tokenization.coverage import Coverage, CoverageCounter, unknown_counts
from pipeline.data.tokenization.engines import Engine
from pipeline.data.tokenization.tokenizer import Tokenizer

SAMPLE_BYTES = 2**20
"""Bytes on disk, or of text, of each source that are read and encoded."""
SAMPLE_S = 2.0
_ENCODED_BYTES = 4 * SAMPLE_BYTES
"""Bytes that are encoded at most; of a document that is longer, the rest is taken to be like its beginning."""
_DETAIL_SHOWN = 80
"""Characters."""
_TOKENS_A_BYTE = 0.25
"""Tokens per byte of text, where there is no tokenizer yet: English with a vocabulary of some ten thousand entries."""


@dataclass
class SourceSample:
    """A look at some documents of a source.

    Attributes:
        disk_bytes: bytes on disk that were read.
        text_bytes: bytes of text in them.
        tokens: of that text, with end of document.
        seconds: for reading and encoding, in one process.
        documents: that were read.
        records: that were read, good or bad.
        rejected: records by reason.
        details: of the first one of each reason.
        first_bad: file of the first record that is rejected and not empty.
    """

    disk_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    documents: int = 0
    records: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    first_bad: str = ""
    damaged: list[DamagedFile] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    """Of the text that was encoded."""
    chat: tuple[str, tuple[tuple[int, int], ...]] | None = None
    """The first conversation: its text, and the spans of it that are trained on."""

    @property
    def not_bad(self) -> frozenset[str]:
        """Reasons that are sound. Null texts are bad where they are all that there is, as in a wrong column."""
        return NOT_BAD if self.documents else NOT_BAD - {NULL_TEXT}

    @property
    def bad(self) -> int:
        """Records that are rejected and bad."""
        return self.rejected.total() - sum(self.rejected[reason] for reason in self.not_bad)

    def reject(self, reason: str, detail: str, path: str) -> None:
        """Count a record."""
        self.rejected[reason] += 1
        # Of a record without the key, its keys say enough.
        self.details.setdefault(reason, detail.partition(": {")[0][:_DETAIL_SHOWN])
        if reason not in NOT_BAD - {NULL_TEXT}:
            self.first_bad = self.first_bad or path

    @property
    def in_words(self) -> str:
        """Number of bad records, with reasons."""
        reasons = [
            f"{count:,} {reason}" + (f" ({self.details[reason]})" if self.details[reason] else "")
            for reason, count in self.rejected.most_common()
            if reason not in self.not_bad
        ]
        are = "is" if self.bad == 1 else "are"
        return f"{self.bad:,} of {counted(self.records, 'sampled record')} {are} bad: {', '.join(reasons)}"


def take_sample(
    units: list[Unit], source: SourceJob, tokenizer: Tokenizer | None, engine: Engine | None
) -> SourceSample:
    """Read from units in their keyed order until there is enough, and encode it in batches of bounded size.

    Args:
        units: of the source.
        source: what they have in common.
        tokenizer: of the run, if there is one by now.
        engine: what encodes with it.
    """
    sample = SourceSample()
    batches = None
    if tokenizer is not None and engine is not None:
        batches = _Batches(tokenizer, engine, min(source.max_document_bytes, engine.batch_bytes))
    is_enough, started = False, time.perf_counter()
    for unit in units:
        reader, before = UnitReader(unit, replace(source.reader, verify=False)), sample.disk_bytes
        for document in reader:
            raw = document.text.encode()
            reason = source.reason_against(document, raw)
            chat = None
            if reason is None and document.spans is not None and tokenizer is not None and source.chat is not None:
                try:
                    chat = encode_chat(tokenizer, document.text, document.spans, source.chat)
                except UnusableRecord as unusable:
                    document.detail, reason = unusable.detail, unusable.reason
            sample.records += 1
            if reason is not None:
                sample.reject(reason, document.detail, unit.pieces[document.piece].file.path)
            else:
                sample.documents += 1
                sample.text_bytes += len(raw)
                if document.spans is not None and sample.chat is None:
                    sample.chat = document.text, document.spans
                if batches is not None:
                    batches.coverage.offer(document.id, document.text)
                    if chat is None:
                        batches.add(raw)
                    else:
                        batches.bytes, batches.tokens = batches.bytes + len(raw), batches.tokens + len(chat.ids)
            sample.disk_bytes = before + reader.bytes_read
            is_full = sample.documents > 0 and max(sample.disk_bytes, sample.text_bytes) >= SAMPLE_BYTES
            if is_enough := is_full or time.perf_counter() - started > SAMPLE_S:
                break
        sample.disk_bytes = before + max(reader.bytes_read, 1)
        sample.damaged += damaged_files(unit, reader.damage)
        if is_enough:
            break
    if batches is None:
        sample.tokens = round(sample.text_bytes * _TOKENS_A_BYTE) + sample.documents
        sample.seconds = time.perf_counter() - started
    else:
        batches.flush()
        scale = sample.text_bytes / max(batches.bytes, 1)
        sample.tokens = round(batches.tokens * scale) + sample.documents
        sample.coverage = Coverage(batches.tokens, batches.coverage.unknown_tokens, batches.coverage.round_trip)
        # What was skipped would have taken its time.
        sample.seconds = time.perf_counter() - started + batches.seconds * (scale - 1 if batches.bytes else 0)
    return sample


class _Batches:
    """Encodes documents as workers do: many short ones at a time, long ones in pieces. Not more than is needed."""

    def __init__(self, tokenizer: Tokenizer, engine: Engine, piece_bytes: int) -> None:
        self.bytes = self.tokens = 0
        """Bytes and tokens that were encoded."""
        self.seconds = 0.0
        self.coverage = CoverageCounter(tokenizer)
        self._unknown = tokenizer.unknown
        self._engine = engine
        self._piece_bytes = piece_bytes
        self._texts: list[str] = []
        self._held = 0

    def add(self, raw: bytes) -> None:
        """Take a document."""
        for text in cut_text(raw, self._piece_bytes):
            size = len(text.encode())
            if self.bytes + self._held + size > _ENCODED_BYTES:
                return
            if self._held + size > self._engine.batch_bytes:
                self.flush()
            self._texts.append(text)
            self._held += size
            if len(self._texts) >= self._engine.batch_documents:
                self.flush()

    def flush(self) -> None:
        """Encode what has gathered."""
        if self._texts:
            started = time.perf_counter()
            encoded = self._engine.encode(self._texts)
            self.tokens += len(encoded.ids)
            self.coverage.unknown_tokens += sum(unknown_counts(*encoded, self._unknown).values())
            self.seconds += time.perf_counter() - started
            self.bytes += self._held
            self._texts, self._held = [], 0
