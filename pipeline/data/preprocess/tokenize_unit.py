"""One unit of documents to parts: what worker processes of the preprocess stage run. Imports stay light."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import key, put_sealed
from pipeline.data.curate.results.apply import AppliedCuration, UnitCuration
from pipeline.data.datasets.files import MANIFEST_FILE, receipt_path
from pipeline.data.datasets.indexed import HashedFile, named_files, part_prefix
from pipeline.data.preprocess.part_writer import PartWriter
from pipeline.data.preprocess.splits import Splits, split_hash
from pipeline.data.sources.damage import DamagedFile, damaged_files
from pipeline.data.sources.foreign_parser import is_careful, working_on
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import Document, Position, Unit, UnusableRecord
from pipeline.data.tokenization.chat_encoding import ChatRules, EncodedChat, encode_chat
from pipeline.data.tokenization.coverage import CoverageCounter, unknown_counts
from pipeline.data.tokenization.engines import Check, Encoded, Engine, EngineName, open_engine
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.tokenization.word_cache import FrequentWords
from pipeline.data.work.job import WorkerState
from pipeline.data.work.receipts import files_are_there, read_receipt
from pipeline.data.work.unit_chunks import ChunkedUnit, ChunksJob, OpenChunk, UnitDone
from pipeline.data.work.unit_source import UnitSource, damage_is_known
from pipeline.data.work.units import identity, order_key
from pipeline.data.work.worker_pool import Progress

REJECTED_ENGINES_FILE = "condemned.json"
"""Beside the tokenizer: engines that were seen to give other ids than `tokenizers`, with the evidence."""


@dataclass(frozen=True)
class SourceJob(UnitSource):
    """Settings that all units of a source have in common."""

    seed: int
    splits: Splits
    below: str
    """Sub-folder of each split's folder that parts are written to."""
    has_parts: bool
    """True if the parts have to be there; not when a global shuffle has taken all documents out of them."""
    curation: AppliedCuration | None = None
    """Decisions that the documents follow."""
    chat: ChatRules | None = None
    """Rules by which conversations are stored; None where documents are text."""

    def open_curation(self, unit: Unit) -> UnitCuration | None:
        """Decisions about a unit, if there are any."""
        return None if self.curation is None else self.curation.open(unit.index)


@dataclass(frozen=True)
class UnitJob(ChunksJob[SourceJob]):
    """A unit to tokenize."""

    engine: EngineName = "tokenizers"
    """Engine that computes the ids."""

    def run(self, shared: WorkerContext, progress: Progress) -> UnitDone:
        """Make the chunks that have no receipt.

        The parts are a function of the unit's bytes, the tokenizer and the config alone.

        Raises:
            EngineDiffers: a document has other ids than `tokenizers` gives it.
            EngineRejected: another process saw that.
        """
        return _TokenizedUnit(self, shared, progress).run()


class SmallestHashes(NamedTuple):
    """Smallest hashes of a unit's documents, which say where splits end."""

    hashes: list[int]
    """The smallest `split_hash` of its documents, ascending."""
    records: int
    rejected: Counter[str]
    """Records by reason."""
    curated: int
    """Documents that curation removed."""
    damaged: list[DamagedFile]


class EngineRejected(Exception):
    """The engine was rejected by another process while this one used it."""


class WorkerContext(WorkerState):
    """State of a worker process for all its units. A pickled copy opens tokenizer and engines again.

    Args:
        folder: of the tokenizer.
        verify_rate: fraction of documents whose ids are compared with those of `tokenizers`.
        tokenizer: of the folder, if it is open already.
    """

    def __init__(self, folder: Path, verify_rate: float, tokenizer: Tokenizer | None = None) -> None:
        self.verify_rate = verify_rate
        self.rejected_engines_file = folder / REJECTED_ENGINES_FILE
        self._folder = folder
        self._tokenizer = tokenizer
        self._engines: dict[EngineName, Engine] = {}

    def __reduce__(self) -> tuple[type[WorkerContext], tuple[Path, float]]:
        return WorkerContext, (self._folder, self.verify_rate)

    def open(self) -> None:
        """Open the tokenizer, while the parent is at something else."""
        _ = self.tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, opened once."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.open(self._folder)
        return self._tokenizer

    @cached_property
    def words(self) -> FrequentWords:
        """Words that the tokenizer caches."""
        return FrequentWords(self.tokenizer)

    def engine(self, which: EngineName) -> Engine:
        """An engine, opened once."""
        if which not in self._engines:
            self._engines[which] = open_engine(self.tokenizer, which)
        return self._engines[which]


def make_sample_hashes(wanted: int) -> Any:
    """In a worker process: returns the function that gives the smallest hashes of the documents of a `UnitJob`."""
    return lambda job, progress: smallest_hashes(job, wanted, progress)


def smallest_hashes(job: UnitJob, wanted: int, progress: Progress) -> SmallestHashes:
    """The smallest `split_hash` of the unit's documents, as many as wanted."""
    found: list[int] = []
    rejected: Counter[str] = Counter()
    curation = job.source.open_curation(job.unit)
    reader = UnitReader(job.unit, job.source.reader)
    reader.beat = partial(progress, 0)
    reported = curated = 0
    for document in reader:
        raw = document.text.encode()
        reason = job.source.reason_against(document, raw)
        if reason is not None:
            rejected[reason] += 1
        elif curation is not None and curation.apply(document) is not None:
            curated += 1
        else:
            raw = document.text.encode() if document.edited else raw
            found.append(split_hash(document.id.encode() if job.source.splits.by_id else raw))
            if len(found) >= 2 * wanted + 10_000:
                found = sorted(found)[:wanted]
                progress(reader.bytes_read - reported)
                reported = reader.bytes_read
    progress(reader.bytes_read - reported)
    return SmallestHashes(
        sorted(found)[:wanted], reader.records, rejected, curated, damaged_files(job.unit, reader.damage)
    )


def cut_text(raw: bytes, limit: int) -> Iterator[str]:
    """A text in pieces of at most `limit` bytes: cut behind a line end, or before a space, or else anywhere."""
    start = 0
    while len(raw) - start > limit:
        end = raw.rfind(b"\n", start, start + limit) + 1
        if end <= start:
            end = raw.rfind(b" ", start + 1, start + limit)
        if end <= start:
            end = start + limit
            while raw[end] & 0xC0 == 0x80:  # inside of a character
                end -= 1
        yield raw[start:end].decode()
        start = end
    yield raw[start:].decode()


class _TokenizedUnit(ChunkedUnit):
    """Goes through the chunks of one unit."""

    def __init__(self, job: UnitJob, context: WorkerContext, progress: Progress) -> None:
        super().__init__(job.source, job.unit, progress)
        self._job = job
        self._source = job.source
        self._context = context

    def run(self) -> UnitDone:
        self._rejected_engines = read_rejected_engines(self._context.rejected_engines_file)
        return super().run()

    def _is_valid(self, receipt: Any, start: Position) -> bool:
        return receipt_is_valid(self._source, self._unit, receipt, start, self._rejected_engines)

    def _refuse(self, receipt: Any) -> None:
        """Leave what another command has made of damaged files in another way, and finished since this one looked."""
        source = self._source
        if receipt is None or receipt["config_hash"] != source.hash_of(self._unit.index):
            return
        finished = any((source.folder / name / MANIFEST_FILE).exists() for name in source.splits.names)
        if finished and not damage_is_known(source, self._unit, receipt):
            raise UserError(
                f"another command has finished {source.folder} with another data.preprocess.on_damaged_file, or "
                "before a file was changed; run this command again when that one has ended"
            )

    def _open(self, chunk: int) -> _TokenizedChunk:
        if self._job.engine == "tokenizers":
            self._context.words.look_at(self._unit, replace(self._source.reader, verify=False))
        return _TokenizedChunk(self._job, chunk, self._context)

    def _put_receipt(self, path: Path, receipt: dict[str, Any]) -> None:
        put_sealed(path, receipt)

    def _remove_files(self, chunk: int) -> None:
        for name in self._source.splits.names:
            for file in named_files(_part_prefix(self._source, name, self._unit.index, chunk)).values():
                links.remove(file, missing_ok=True)


def _part_prefix(source: SourceJob, split: str, unit: int, chunk: int) -> Path:
    return part_prefix(source.folder / split / source.below, unit, chunk)


class _TokenizedChunk(OpenChunk):
    """Documents of a chunk on their way to the parts of the splits, encoded many at a time."""

    def __init__(self, job: UnitJob, chunk: int, context: WorkerContext) -> None:
        source, unit, tokenizer = job.source, job.unit, context.tokenizer
        self._source = source
        self._unit = unit
        self._chunk = chunk
        self._rejected_engines_file = context.rejected_engines_file
        self._tokenizer = tokenizer
        self._engine = context.engine(job.engine)
        self._is_reference = job.engine == "tokenizers"
        self._itemsize = tokenizer.dtype.itemsize
        self._curation = source.open_curation(unit)
        self._curated: Counter[str] = Counter()
        self._edited_bytes = 0
        sample = key(source.seed, "check", identity(unit), chunk)
        self._check = Check(tokenizer, sample, context.verify_rate, self._engine.name)
        self._coverage = [CoverageCounter(tokenizer) for _ in source.splits.names]
        self._has_mask = source.reader.keeps_mask
        self._inner_ends = [0] * len(source.splits.names)
        self._batch: list[tuple[Document, int]] = []
        # Documents and the numbers of their splits.
        self._raw: list[bytes] = []
        self._bytes = 0
        with ExitStack() as stack:
            self._writers = [
                stack.enter_context(
                    PartWriter(
                        source.folder,
                        _part_prefix(source, name, unit.index, chunk),
                        unit.index,
                        tokenizer.dtype,
                        tokenizer.end_of_document,
                        bool(source.reader.metadata),
                        source.reader.weight_key is not None,
                        self._has_mask,
                    )
                )
                for name in source.splits.names
            ]
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def reason_against(self, document: Document, raw: bytes) -> str | None:
        reason = super().reason_against(document, raw)
        self._chat = None
        if reason is None and document.spans is not None:
            try:
                self._chat = self._encode_chat(document, raw)
            except UnusableRecord as error:
                document.text, document.detail, reason = "", error.detail, error.reason
        return reason

    def take(self, document: Document, raw: bytes) -> bool:
        if document.reason is not None:
            return False
        if self._curation is not None and (rule := self._curation.apply(document)) is not None:
            self._curated[rule] += 1
            return False
        if self._chat is not None:
            return self._add_chat(document, raw, self._chat)
        if document.edited:
            size, raw = len(raw), document.text.encode()
            self._edited_bytes += size - len(raw)
        return self._add(document, raw)

    def commit(self, receipt: dict[str, Any]) -> None:
        checked = self._check.finish()
        self._refuse_rejected_engine()
        source, unit = self._source, self._unit
        earlier = self._earlier_receipt(receipt["input"]["hash"])
        if self._curation is not None:
            self._curation.check_chunk(unit, receipt)
            receipt["curated"] = dict(self._curated)
            if self._edited_bytes:
                receipt["edited_bytes"] = self._edited_bytes
        receipt |= {
            "engine": self._engine.name,
            "checked": checked,
            "splits": {
                name: writer.commit(order_key(source.seed, unit), partial(self._refuse_other_result, earlier, name))
                | coverage.as_json()
                | ({"inner_ends": ends} if ends else {})
                for name, writer, coverage, ends in zip(
                    source.splits.names, self._writers, self._coverage, self._inner_ends, strict=True
                )
            },
        }

    def _refuse_rejected_engine(self) -> None:
        if self._engine.name in read_rejected_engines(self._rejected_engines_file):
            raise EngineRejected(self._engine.name)

    def _earlier_receipt(self, input_hash: str) -> Any:
        """The receipt of the same chunk and input: some of its files are gone, or another process was faster."""
        other = read_receipt(self._source.folder, self._unit.index, self._chunk)
        if other is None or other["engine"] in read_rejected_engines(self._rejected_engines_file):
            return None
        same = (other["config_hash"], other["input"]["hash"]) == (self._source.hash_of(self._unit.index), input_hash)
        return other if same else None

    def _refuse_other_result(self, earlier: Any, split: str, files: dict[str, HashedFile]) -> None:
        """Two results of one chunk are equal, or something is broken: then the one with a receipt stays."""
        if earlier is None:
            return
        hashes = earlier["splits"][split]["files"]
        if any(f"{file.hash:016x}" != hashes[name]["xxh3"] for name, file in files.items()):
            self._refuse_rejected_engine()  # that says why, if it was just now
            raise UserError(
                f"{self._unit} gave other tokens than when "
                f"{receipt_path(self._source.folder, self._unit.index, self._chunk)} was written "
                f"({earlier['engine']} then, {self._engine.name} now); remove {self._source.folder} to make it "
                "again with one"
            )

    def _add(self, document: Document, raw: bytes) -> bool:
        """Put a document into its split; returns whether this encoded what had gathered."""
        size = len(raw)
        split = self._source.splits.of(raw, document.id)
        self._coverage[split].offer(document.id, document.text)
        if size > self._source.max_document_bytes:
            self.flush()
            self._writers[split].add_long(document, size, self._encode_long(document, split, raw))
            return True
        self._batch.append((document, split))
        self._raw.append(raw)
        self._bytes += size
        is_full = self._bytes >= self._engine.batch_bytes or len(self._batch) >= self._engine.batch_documents
        if not (is_full or is_careful()):
            return False
        self.flush()
        return True

    def _encode_chat(self, document: Document, raw: bytes) -> EncodedChat:
        """A conversation as it is stored.

        Raises:
            UnusableRecord: it cannot be.
        """
        source, spans = self._source, document.spans
        assert source.chat is not None and spans is not None
        if len(raw) > source.max_document_bytes:  # it is encoded as a whole
            limit = f"data.preprocess.max_document_bytes ({source.max_document_bytes})"
            raise UnusableRecord(f"longer than {limit}", f"{len(raw):,} bytes")
        working_on(document.name)
        return encode_chat(self._tokenizer, document.text, spans, source.chat)

    def _add_chat(self, document: Document, raw: bytes, chat: EncodedChat) -> bool:
        """Put a conversation into its split, by the text that it has before it is cut."""
        if document.edited:
            raise UserError(
                f"{document.name}: data.curate edits the text of a conversation, whose trained spans would be "
                "elsewhere then; leave sources with `chat` out of its edits"
            )
        split = self._source.splits.of(raw, document.id)
        document.text = chat.text
        coverage = self._coverage[split]
        coverage.offer(document.id, chat.text)
        encoded = Encoded(chat.ids, np.array([len(chat.ids)]))
        coverage.unknown_tokens += sum(unknown_counts(*encoded, self._tokenizer.unknown).values())
        self._inner_ends[split] += int(np.count_nonzero(chat.ids == self._tokenizer.end_of_document))
        writer = self._writers[split]
        writer.add(document, len(chat.text.encode()), memoryview(chat.ids.data).cast("B"), chat.mask)
        writer.flush()
        return True

    def flush(self) -> None:
        if not self._batch:
            return
        documents = [document for document, _ in self._batch]
        encoded = self._encode(documents, [document.text for document in documents], self._raw)
        for number, count in unknown_counts(*encoded, self._tokenizer.unknown).items():
            self._coverage[self._batch[number][1]].unknown_tokens += count
        view = memoryview(encoded.ids.data).cast("B")
        ends = (np.cumsum(encoded.lengths) * self._itemsize).tolist()
        start = 0
        for (document, split), raw, end in zip(self._batch, self._raw, ends, strict=True):
            self._writers[split].add(document, len(raw), view[start:end])
            start = end
        for writer in self._writers:
            writer.flush()
        self._batch.clear()
        self._raw.clear()
        self._bytes = 0

    def _encode_long(self, document: Document, split: int, raw: bytes) -> Iterator[memoryview]:
        for text in cut_text(raw, self._source.max_document_bytes):
            encoded = self._encode([document], [text])
            self._coverage[split].unknown_tokens += sum(unknown_counts(*encoded, self._tokenizer.unknown).values())
            yield memoryview(encoded.ids.data).cast("B")

    def _encode(self, documents: list[Document], texts: list[str], raw: list[bytes] | None = None) -> Encoded:
        working_on(*{documents[0].name: None, documents[-1].name: None})
        encoded = self._engine.encode(texts, raw)
        forged = encoded.ids == self._tokenizer.end_of_document
        if forged.any():
            place = np.searchsorted(np.cumsum(encoded.lengths), np.flatnonzero(forged)[0], side="right")
            raise UserError(
                "tokenizer.end_of_document: the tokenizer encodes ordinary text as "
                f"{self._tokenizer.end_of_document_token!r} (document {documents[int(place)].id}), which would look "
                "like the end of a document; choose another token"
            )
        if not self._is_reference:
            rows = np.fromiter((document.row for document in documents), np.uint64, len(documents))
            self._check.add_batch(rows, [document.id for document in documents], texts, encoded)
        return encoded


def read_rejected_engines(path: Path) -> dict[str, str]:
    """Engines that must not be used any more, with the evidence."""
    try:
        found: dict[str, str] = storage.get_json(path)
        return found
    except FileNotFoundError:
        return {}


def receipt_is_valid(source: SourceJob, unit: Unit, receipt: Any, start: Position, rejected: dict[str, str]) -> bool:
    """Tell whether a receipt is of this config, begins where the chunk begins, and its files are there."""
    return (
        receipt is not None
        and receipt["config_hash"] == source.hash_of(unit.index)
        and tuple(receipt["start"]) == start
        and receipt["engine"] not in rejected
        and damage_is_known(source, unit, receipt)
        and (not source.has_parts or files_are_there(source.folder, receipt, source.below) or _is_shuffled(source))
    )


def _is_shuffled(source: SourceJob) -> bool:
    """Tell whether another command has just finished a global shuffle, which removes the parts of its first pass."""
    if not source.below:
        return False
    try:
        return all(
            storage.get_json(source.folder / name / MANIFEST_FILE)["config_hash"] == source.config_hash
            for name in source.splits.names
        )
    except FileNotFoundError:
        return False
