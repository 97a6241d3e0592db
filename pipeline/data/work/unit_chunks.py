"""A unit in a worker process: its chunks one after the other, each with a receipt once it is committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import orjson

from pipeline.common import links, storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import put_sealed
from pipeline.data.datasets.files import receipt_path, rejected_path
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.sources.compression import LARGE_WINDOW
from pipeline.data.sources.damage import DamagedFile, damage_in
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import START, Document, Position, Unit
from pipeline.data.tokenization.coverage import Coverage, coverage_of, covered
from pipeline.data.work.receipts import Receipts, read_receipt
from pipeline.data.work.unit_source import UnitSource, rejected_record
from pipeline.data.work.units import CHUNK_RECORDS, input_stat
from pipeline.data.work.worker_pool import Progress


@dataclass(frozen=True)
class UnitDone:
    """All chunks of a unit have receipts."""

    made: int
    """Chunks that were made, and not found."""
    records: int
    rejected: dict[str, int]
    damaged: list[DamagedFile]
    coverage: Coverage
    """Of the text of the chunks that were made."""


def _how_read(settings: Reader, reader: UnitReader) -> dict[str, Any]:
    """Keys of a receipt by which `damage_is_known` tells whether damaged files are to be read again in another way."""
    found: dict[str, Any] = {}
    if settings.salvage and (reader.is_salvaged or reader.damage):
        found["salvage"] = True
    if any(damage.reason == LARGE_WINDOW for damage in reader.damage):
        found["max_zstd_window"] = settings.max_zstd_window
    return found


S = TypeVar("S", bound=UnitSource)


@dataclass(frozen=True)
class ChunksJob(ABC, Generic[S]):
    """A unit of a source, as a job: its chunks have a receipt each, and follow one another."""

    source: S
    unit: Unit

    def __str__(self) -> str:
        return str(self.unit)

    @property
    def folder(self) -> Path:
        """Folder of the source."""
        return self.source.folder

    @property
    def name(self) -> int:
        """Number of the unit."""
        return self.unit.index

    @property
    def bytes(self) -> int:
        """Bytes of the unit's files on disk."""
        return self.unit.bytes

    @abstractmethod
    def run(self, shared: Any, progress: Progress) -> UnitDone:
        """Make the chunks that have no receipt: commit their files, then the receipt.

        Raises:
            UserError: with `fail_on_error`, the first rejected record; or the input has changed.
            OSError: the disk is full, say; nothing half-written stays.
        """

    def run_unleased(self, shared: Any, progress: Progress, refusal: OSError) -> UnitDone:
        """Compare input that has other times than in the receipts, which need not be written."""
        return self.run(shared, progress)

    def is_done(self, receipts: Receipts, is_valid: Callable[[Any, Position], bool]) -> bool:
        """Tell whether all chunks have receipts, and the input has the times in them.

        Args:
            receipts: of the source.
            is_valid: whether a receipt is that of the chunk that begins at a position.
        """
        position, stat = START, input_stat(self.unit)
        for receipt in receipts.of(self.unit.index):
            if not is_valid(receipt, position) or receipt["input"]["stat"] != stat:
                return False
            if receipt["last"]:
                return True
            position = tuple(receipt["next"])
        return False


class OpenChunk(ABC):
    """A chunk that is being made: takes its documents, then commits its files. A context manager, for a failure."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    def reason_against(self, document: Document, raw: bytes) -> str | None:
        """Further reason to reject a record that the settings of the source do not speak against."""
        return document.reason

    @abstractmethod
    def take(self, document: Document, raw: bytes) -> bool:
        """Take the next document, or a record that is rejected, for its `reason`.

        Args:
            document: the next one.
            raw: its text in UTF-8.

        Returns:
            Whether what had gathered was worked off, so that progress can be shown.
        """

    @abstractmethod
    def flush(self) -> None:
        """Work off what has gathered; no document follows."""

    @abstractmethod
    def commit(self, receipt: dict[str, Any]) -> None:
        """Commit the files, and add to the receipt what it is to say of them.

        Raises:
            UserError: there is a receipt of the same chunk and input with other files.
        """


class ChunkedUnit(ABC):
    """Goes through the chunks of one unit, and makes those that have no receipt.

    Args:
        source: of the unit.
        unit: to go through.
        progress: called with the bytes done since the last call.
    """

    was = "tokenized"
    """Participle of what is done, for messages."""
    again = "make the dataset again"
    """Purpose of removing the folder, for messages."""

    def __init__(self, source: UnitSource, unit: Unit, progress: Progress) -> None:
        self._unit_source = source
        self._unit = unit
        self._advance = progress
        self._stat = input_stat(unit)

    @abstractmethod
    def _is_valid(self, receipt: Any, start: Position) -> bool:
        """Tell whether a receipt is of this config, begins where the chunk begins, and its files are there."""

    @abstractmethod
    def _open(self, chunk: int) -> OpenChunk:
        """Begin the files of a chunk."""

    @abstractmethod
    def _put_receipt(self, path: Path, receipt: dict[str, Any]) -> None:
        """Write the receipt of a chunk whose files are committed."""

    @abstractmethod
    def _remove_files(self, chunk: int) -> None:
        """Remove the files of a chunk, if there are any."""

    def _refuse(self, receipt: Any) -> None:
        """Raise an error if a chunk must not be made in place of what its receipt names."""
        return

    def run(self) -> UnitDone:
        """Go through them.

        Raises:
            UserError: with `fail_on_error`, the first rejected record; or the input has changed.
            OSError: the disk is full, say; nothing half-written stays.
        """
        self._unit_source.check_plan()
        position, chunk, made, records = START, 0, 0, 0
        rejected: Counter[str] = Counter()
        damaged: list[DamagedFile] = []
        coverage = Coverage()
        reader: UnitReader | None = None
        while True:
            receipt = read_receipt(self._unit_source.folder, self._unit.index, chunk)
            if self._is_valid(receipt, position):
                reader = None
                if receipt["input"]["stat"] != self._stat:
                    self._check_same_input(receipt)
                self._advance(receipt["input"]["read"])
            else:
                self._refuse(receipt)
                if reader is None:
                    reader = UnitReader(self._unit, self._unit_source.reader, position)
                    reader.beat = partial(self._advance, 0)
                    documents = self._documents(reader)
                else:
                    reader.count_anew()
                receipt = self._make(chunk, position, reader, documents)
                made += 1
                records += receipt["records"]
                rejected.update(receipt["rejected"])
                damaged += damage_in(self._unit, receipt)
                coverage = covered([coverage, coverage_of([receipt])])
            if receipt["last"]:
                return UnitDone(made, records, dict(rejected), damaged, coverage)
            position, chunk = tuple(receipt["next"]), chunk + 1

    def _make(self, chunk: int, start: Position, reader: UnitReader, documents: Iterator[Document]) -> dict[str, Any]:
        """Read on until the chunk is full or the unit ends, and commit."""
        source, unit = self._unit_source, self._unit
        path = receipt_path(source.folder, unit.index, chunk)
        storage.make_below(source.folder, path.parent)
        rejected: Counter[str] = Counter()
        last = True
        begun = reported = reader.bytes_read
        limit = source.unit_bytes if unit.chunked else 2**63
        with HashedFile(rejected_path(source.folder, unit.index, chunk)) as rejects, self._open(chunk) as output:
            for document in documents:
                raw = document.text.encode()
                document.reason = source.reason_against(document, raw)
                document.reason = output.reason_against(document, raw)
                if document.reason is not None:
                    rejected[document.reason] += 1
                    source.check_on_error(unit, document)
                    rejects.write(orjson.dumps(rejected_record(document), option=orjson.OPT_APPEND_NEWLINE))
                if output.take(document, raw):
                    self._advance(reader.bytes_read - reported)
                    reported = reader.bytes_read
                if reader.input_bytes >= limit or reader.records >= CHUNK_RECORDS:
                    last = False
                    break
            output.flush()
            self._advance(reader.bytes_read - reported)
            receipt = self._receipt(chunk, start, reader, reader.bytes_read - begun, rejected, last=last)
            output.commit(receipt)
            if rejects.size:
                rejects.commit()
            self._put_receipt(path, receipt)
        if last:
            self._remove_later_chunks(chunk)
        return receipt

    def _remove_later_chunks(self, last: int) -> None:
        """Remove chunks of a time when the unit had more: before a damaged file of it was dropped."""
        folder, unit, chunk = self._unit_source.folder, self._unit.index, last + 1
        while (path := receipt_path(folder, unit, chunk)).exists():
            self._remove_files(chunk)
            links.remove(rejected_path(folder, unit, chunk), missing_ok=True)
            links.remove(path)
            chunk += 1

    def _documents(self, reader: UnitReader) -> Iterator[Document]:
        """Those of a reader. What it refuses is changed in the files or keys of the source, which the plan is of."""
        try:
            yield from reader
        except MachineError:
            raise  # such as a store that does not answer
        except UserError as error:
            raise UserError(
                f"{error}. If that changes paths, exclude, keys or files of the source, {self._unit_source.start_over}"
            ) from error

    def _receipt(
        self, chunk: int, start: Position, reader: UnitReader, read: int, rejected: Counter[str], *, last: bool
    ) -> dict[str, Any]:
        """A receipt without what `OpenChunk.commit` adds: `engine`, `checked`, `splits`.

        Args:
            chunk: its number.
            start: where it begins.
            reader: at its end.
            read: bytes on disk that were read for it.
            rejected: records by reason.
            last: whether the unit ends here.
        """
        return {
            "unit": self._unit.index,
            "link": chunk,
            "last": last,
            "start": start,
            "next": None if last else reader.position,
            "input": {"hash": reader.input_hash, "stat": self._stat, "read": read},
            "config_hash": self._unit_source.hash_of(self._unit.index),
            "pieces": {str(piece): counts for piece, counts in reader.pieces.items()},
            "records": reader.records,
            "rejected": dict(rejected),
            "damaged": [asdict(damage) for damage in reader.damage],
            "dropped": self._unit_source.dropped(self._unit),
            **_how_read(self._unit_source.reader, reader),
        }

    def _check_same_input(self, receipt: dict[str, Any]) -> None:
        """A file has another time than when the chunk was made; its bytes decide whether it changed."""
        folder = self._unit_source.folder
        reader = UnitReader(self._unit, self._unit_source.reader, tuple(receipt["start"]))
        end = receipt["next"] and tuple(receipt["next"])
        for _ in reader:
            if reader.position == end:
                break
        if reader.input_hash != receipt["input"]["hash"]:
            raise UserError(
                f"the input of {self._unit} changed since it was {self.was}; restore the files, or remove "
                f"{folder} to {self.again} from them as they are now"
            )
        receipt["input"]["stat"] = self._stat
        with suppress(OSError):  # on a disk that cannot be written, the next run reads the input again
            put_sealed(receipt_path(folder, self._unit.index, receipt["link"]), receipt)
