"""A unit in a worker process: its chunks one after the other, each with a receipt once it is committed."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import put_sealed
from pipeline.data.datasets.files import receipt_path
from pipeline.data.sources.compression import LARGE_WINDOW
from pipeline.data.sources.damage import DamagedFile, damage_in
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import START, Document, Position, Unit
from pipeline.data.tokenization.coverage import Coverage, coverage_of, covered
from pipeline.data.work.job_run import Busy
from pipeline.data.work.leases import Lease, LeaseWatch, take
from pipeline.data.work.receipts import read_receipt
from pipeline.data.work.unit_source import UnitSource
from pipeline.data.work.units import input_stat
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
    """Keys of a receipt by which `damage_stands` tells whether damaged files are to be read again in another way."""
    found: dict[str, Any] = {}
    if settings.salvage and (reader.is_salvaged or reader.damage):
        found["salvage"] = True
    if any(damage.reason == LARGE_WINDOW for damage in reader.damage):
        found["max_zstd_window"] = settings.max_zstd_window
    return found


def with_lease(
    source: UnitSource, unit: Unit, watch: LeaseWatch, make: Callable[[Progress], UnitDone]
) -> UnitDone | Busy:
    """Make a unit while its lease is held; who else has it, if it is not free.

    Args:
        source: of the unit.
        unit: to make.
        watch: of this process.
        make: is given what to call with the bytes done so far.
    """
    try:
        lease = take(source.folder, unit.index, watch)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        # All that can be done on such a disk is to compare input that has other times than in the receipts.
        return make(lambda _: None)
    if not isinstance(lease, Lease):
        return Busy(str(lease))
    # Beats come from a thread, because skipping what was read before can take long.
    with storage.naming(source.folder), lease, lease.beating():
        source.check_plan()
        return make(lease.beat)


class ChunkedUnit(ABC):
    """Goes through the chunks of one unit, and makes those that have no receipt.

    Args:
        source: of the unit.
        unit: to go through.
        progress: told the bytes done since the last call.
        beat: told the bytes done so far.
    """

    was = "tokenized"
    """Participle of what is done, for messages."""
    again = "make the dataset again"
    """Purpose of removing the folder, for messages."""

    def __init__(self, source: UnitSource, unit: Unit, progress: Progress, beat: Progress) -> None:
        self._unit_source = source
        self._unit = unit
        self._progress = progress
        self._beat = beat
        self._done = 0
        self._stat = input_stat(unit)

    @abstractmethod
    def _stands(self, receipt: Any, start: Position) -> bool:
        """Tell whether a receipt is of this config, begins where the chunk begins, and its files are there."""

    @abstractmethod
    def _make(self, chunk: int, start: Position, reader: UnitReader, documents: Iterator[Document]) -> dict[str, Any]:
        """Read on until the chunk is full or the unit ends, and commit."""

    def _refuse(self, receipt: Any) -> None:
        """Raise an error if a chunk must not be made in place of what its receipt names."""
        return

    def run(self) -> UnitDone:
        """Go through them.

        Raises:
            UserError: with `fail_on_error`, the first rejected record; or the input has changed.
            OSError: the disk is full, say; nothing half-written stays.
        """
        position, chunk, made, records = START, 0, 0, 0
        rejected: Counter[str] = Counter()
        damaged: list[DamagedFile] = []
        coverage = Coverage()
        reader: UnitReader | None = None
        while True:
            receipt = read_receipt(self._unit_source.folder, self._unit.index, chunk)
            if self._stands(receipt, position):
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

    def _documents(self, reader: UnitReader) -> Iterator[Document]:
        """Those of a reader. What it refuses is changed in the files or keys of the source, which the plan is of."""
        try:
            yield from reader
        except UserError as error:
            raise UserError(
                f"{error}. If that changes paths, exclude, keys or files of the source, {self._unit_source.start_over}"
            ) from error

    def _advance(self, amount: int) -> None:
        self._progress(amount)
        self._done += amount
        self._beat(self._done)

    def _receipt(
        self, chunk: int, start: Position, reader: UnitReader, read: int, rejected: Counter[str], *, last: bool
    ) -> dict[str, Any]:
        """A receipt without `engine`, `checked` and `splits`.

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
