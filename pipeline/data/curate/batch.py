"""Documents of a chunk on their way to what measures them, and what that writes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.sources.foreign_parser import working_on

BATCH_BYTES = 2**20
"""Text of a batch, more or less. Whoever works in blocks that fit a cache cuts it further."""


@dataclass(frozen=True)
class TextBatch:
    """Documents, cleaned.

    Attributes:
        data: uint8 of shape (bytes,): their texts as UTF-8, one behind the other.
        starts: int64 of shape (documents + 1,): where each begins in `data`, and the end.
        texts: the same as str.
        rows: uint32 of shape (documents,): their rows in the chunk, ascending; rejected records have rows, too.
        ids: of the documents.
        metadata: kept keys of each as a JSON object, if the source has any.
    """

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    texts: Sequence[str]
    rows: npt.NDArray[np.uint32]
    ids: Sequence[str]
    metadata: Sequence[bytes | None]
    names: Sequence[str] = ()
    """Names of the records (`record_name`), for messages."""

    def each(self) -> Iterator[str]:
        """The texts, one after the other, for a parser of another package: each is named before it is given."""
        for text, name in itertools.zip_longest(self.texts, self.names, fillvalue=""):
            working_on(name)
            yield text


class ChunkOutput(Protocol):
    """Output of a chunk besides its table of measures. All of it is committed with the receipt."""

    def append(self, name: str, records: npt.NDArray[Any]) -> None:
        """Add records to the file NAME, in the order of the documents: signatures, say."""

    def add_run(self, name: str, records: npt.NDArray[Any]) -> None:
        """Add records of a structured type to the run NAME, which is sorted by all of its fields at the end."""

    def count(self, name: str, counts: npt.NDArray[np.int64]) -> None:
        """Add to the counts NAME of the receipt."""


class Measurer(ABC):
    """A kind of measure: of what a document is, alone. The result is a function of text, metadata and settings.

    An instance belongs to one worker process, and measures the chunks of a source one after the other.
    """

    @property
    @abstractmethod
    def columns(self) -> list[tuple[str, str]]:
        """(name, NumPy type) of its columns in the table of measures; integers, little-endian."""

    @abstractmethod
    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        """Measure a batch.

        Args:
            batch: of documents.
            table: structured, of shape (documents,): the records of these documents, all 0; has `columns`.
            output: for what else there is.
        """
