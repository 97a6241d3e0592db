"""One unit of documents to one part a split. What worker processes of the preprocess stage run; imports stay light."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import tokenizers
import xxhash

from pipeline.data import store
from pipeline.data.hashing import key, keyed_order, value_hash
from pipeline.data.indexed import PROVENANCE, HashedFile, IndexedWriter, numbered, part_files, part_prefix
from pipeline.data.sources import EMPTY, Document, Reader, Unit, UnitReader, line_of, where
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.workers import Progress
from pipeline.errors import UserError

SPLITS = ("train", "heldout")
ENGINE = f"tokenizers {tokenizers.__version__}"
"""What makes the ids."""
BATCH_BYTES = 2**19
"""Text that is encoded at a time: enough to be fast, little enough to keep memory small."""
RECEIPT_KEYS = ("unit", "input", "config_hash", "engine", "lines", "records", "rejected", "splits")
_SPLIT_KEY = key("heldout")


@dataclass(frozen=True)
class SourceJob:
    """What all units of a source have in common."""

    folder: Path
    reader: Reader
    seed: int
    heldout: float
    config_hash: str
    fail_on_error: bool
    start_over: str
    """How to begin again with mended files, for messages."""


@dataclass(frozen=True)
class UnitJob:
    """A unit to tokenize."""

    source: SourceJob
    unit: Unit

    def __str__(self) -> str:
        return str(self.unit)


def receipt_path(source: Path, unit: int) -> Path:
    """Receipt of a unit."""
    return numbered(source / "receipts", unit).with_suffix(".json")


def read_receipt(source: Path, unit: int) -> Any:
    """The receipt of a unit; None if there is none that can be read."""
    try:
        return store.get_json(receipt_path(source, unit), *RECEIPT_KEYS)
    except (FileNotFoundError, UserError):
        return None


def rejected_path(source: Path, unit: int) -> Path:
    """Rejected records of a unit; there is a file only if there are any."""
    return numbered(source / "receipts", unit).with_suffix(".rejected.jsonl")


def is_heldout(text: bytes, share: float) -> bool:
    """Whether a document is held out. The key is the same in every run and source, so a text is on one side everywhere.

    Args:
        text: UTF-8.
        share: of the documents, in [0, 1). Raising it moves documents to the held-out side only.
    """
    return xxhash.xxh3_64_intdigest(text, seed=_SPLIT_KEY) < int(share * 2**64)


def input_stat(unit: Unit) -> str:
    """Hash of names, sizes and times of a unit's files: equal means that the input need not be read again."""
    return value_hash([[p.file.name, p.file.size, p.file.mtime_ns, p.start, p.end] for p in unit.pieces])


def make_tokenize(tokenizer: Path) -> Any:
    """In a worker process: open the tokenizer once; returns the function that runs a `UnitJob`."""
    opened = Tokenizer.open(tokenizer)
    return lambda job, progress: tokenize_unit(job, opened, progress)


def tokenize_unit(job: UnitJob, tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
    """Tokenize a unit, commit its parts and then its receipt, which is returned.

    The parts are a function of the unit's bytes, the tokenizer and the config alone.

    Raises:
        UserError: with `fail_on_error`, the first rejected record.
        OSError: the disk is full, say; nothing half-written stays.
    """
    try:
        return _tokenize_unit(job, tokenizer, progress)
    except OSError as error:
        if error.filename is None:  # writes do not say where
            error.filename = str(job.source.folder)
        raise


def _tokenize_unit(job: UnitJob, tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
    source, unit = job.source, job.unit
    reader = UnitReader(unit, source.reader)
    rejected: Counter[str] = Counter()
    for split in SPLITS:
        part_prefix(source.folder / split, unit.index).parent.mkdir(parents=True, exist_ok=True)
    receipt_path(source.folder, unit.index).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        splits = {
            split: stack.enter_context(_Spool(part_prefix(source.folder / split, unit.index), tokenizer))
            for split in SPLITS
        }
        rejects = stack.enter_context(HashedFile(rejected_path(source.folder, unit.index)))
        reported = batched = 0
        batch: list[tuple[Document, bytes]] = []

        def flush() -> None:
            nonlocal batched, reported
            for (document, raw), ids in zip(batch, tokenizer.encode_batch([d.text for d, _ in batch]), strict=True):
                split = "heldout" if is_heldout(raw, source.heldout) else "train"
                splits[split].add(document, len(raw), ids)
            batch.clear()
            batched = 0
            progress(reader.bytes_read - reported)
            reported = reader.bytes_read

        for document in reader:
            if document.reason is not None:
                rejected[document.reason] += 1
                _check_on_error(document, job)
                rejects.write(orjson.dumps(_rejected_record(document), option=orjson.OPT_APPEND_NEWLINE))
                continue
            raw = document.text.encode()
            batch.append((document, raw))
            batched += len(raw)
            if batched >= BATCH_BYTES:
                flush()
        flush()

        earlier = _earlier_receipt(job, reader.input_hash)
        receipt = {
            "unit": unit.index,
            "input": {"hash": reader.input_hash, "stat": input_stat(unit), "bytes": reader.bytes_read},
            "config_hash": source.config_hash,
            "engine": ENGINE,
            "lines": reader.lines,
            "records": reader.records,
            "rejected": dict(rejected),
            "splits": {
                split: spool.commit(
                    key(source.seed, "documents", identity(unit)), partial(_refuse_other_result, job, earlier, split)
                )
                for split, spool in splits.items()
            },
        }
        if rejects.size:
            rejects.commit()
        store.put_json(receipt_path(source.folder, unit.index), receipt)
    return receipt


def identity(unit: Unit) -> str:
    """What a unit is, on any machine: source, names and byte ranges."""
    return value_hash([unit.source, [[piece.file.name, piece.start, piece.end] for piece in unit.pieces]])


def _check_on_error(document: Document, job: UnitJob) -> None:
    if job.source.fail_on_error and document.reason != EMPTY:
        piece = job.unit.pieces[document.piece]
        line = None if document.line is None else line_of(piece.file.path, document.byte)
        raise UserError(
            f"{where(piece, line, document.byte)}: {document.reason} ({document.detail}); mend the record and "
            f"{job.source.start_over}; or set data.preprocess.on_error: skip to pass over bad records"
        )


def _rejected_record(document: Document) -> dict[str, Any]:
    fields = ("row", "piece", "line", "byte", "reason", "detail")
    return {field: getattr(document, field) for field in fields}


def _earlier_receipt(job: UnitJob, input_hash: str) -> Any:
    """The receipt of the same unit of the same input: some of its files are gone, or another process was faster."""
    other = read_receipt(job.source.folder, job.unit.index)
    same = other is not None and (other["config_hash"], other["input"]["hash"]) == (job.source.config_hash, input_hash)
    return other if same else None


def _refuse_other_result(job: UnitJob, earlier: Any, split: str, files: dict[str, HashedFile]) -> None:
    """Two results of one unit are equal, or something is broken: then the one with a receipt stays."""
    if earlier is None:
        return
    hashes = earlier["splits"][split]["files"]
    if any(f"{file.hash:016x}" != hashes[name]["xxh3"] for name, file in files.items()):
        raise UserError(
            f"{job.unit} gave other tokens than when {receipt_path(job.source.folder, job.unit.index)} was written "
            f"({earlier['engine']} then, {ENGINE} now); remove {job.source.folder} to make it again with one"
        )


class _Spool:
    """The tokens of one split of a unit: kept in reading order in a file, then written in keyed order.

    Memory: 20 bytes a document.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        self._prefix = prefix
        self._tokenizer = tokenizer
        self._tmp = store.temporary(prefix)
        self._file: BinaryIO = self._tmp.open("w+b", buffering=2**20)
        self._lengths = array("q")
        self._rows = array("Q")
        self._id_hashes = array("Q")
        self._text_bytes = 0

    def add(self, document: Document, text_bytes: int, ids: np.ndarray[Any, Any]) -> None:
        end = self._tokenizer.end_of_document
        if (ids == end).any():
            raise UserError(
                f"tokenizer.end_of_document: the tokenizer makes {self._tokenizer.end_of_document_token!r} out of "
                f"ordinary text (document {document.id}), which would forge the end of a document; choose another token"
            )
        self._file.write(np.append(ids, ids.dtype.type(end)).tobytes())
        self._lengths.append(len(ids) + 1)
        self._rows.append(document.row)
        self._id_hashes.append(xxhash.xxh3_64_intdigest(document.id.encode()))
        self._text_bytes += text_bytes

    def commit(self, order_key: int, check: Callable[[dict[str, HashedFile]], None]) -> dict[str, Any]:
        """Write the part and commit it if `check` of its ids and provenance does not raise; counts, sizes, hashes."""
        self._file.flush()
        count = len(self._lengths)
        dtype = self._tokenizer.dtype
        lengths = np.array(self._lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        # The order depends on the row in the unit, not on the split that other documents went to.
        place = keyed_order(max(self._rows[-1] + 1 if count else 0, 1), order_key)
        rank = np.empty_like(place)
        rank[place] = np.arange(len(place))
        order = np.argsort(rank[np.array(self._rows, dtype=np.int64)]) if count else np.zeros(0, np.int64)
        records = np.zeros(count, PROVENANCE)
        records["unit"] = int(self._prefix.name)
        records["row"] = np.array(self._rows, dtype=np.uint64)[order]
        records["id_hash"] = np.array(self._id_hashes, dtype=np.uint64)[order]
        descriptor = self._file.fileno()
        with HashedFile(part_files(self._prefix)[2]) as provenance:
            provenance.write(records.tobytes())
            with IndexedWriter(self._prefix, dtype) as writer:
                for start, length in zip(starts[order].tolist(), lengths[order].tolist(), strict=True):
                    data = os.pread(descriptor, length * dtype.itemsize, start * dtype.itemsize)
                    writer.add_document(np.frombuffer(data, dtype))
                check({"bin": writer.bin, "prov": provenance})
            provenance.commit()
        return {
            "documents": count,
            "tokens": int(lengths.sum()),
            "text_bytes": self._text_bytes,
            "files": {
                name: {"size": file.size, "xxh3": f"{file.hash:016x}"}
                for name, file in (("bin", writer.bin), ("idx", writer.idx), ("prov", provenance))
            },
        }

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError:
            pass  # a full disk; the write before has said so
        finally:
            self._tmp.unlink(missing_ok=True)
