"""Documents measured again from their source files, for comparison with what curation stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.config.root import Config
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.chunk_writer import DOCUMENT, EMPTY_DOCUMENT
from pipeline.data.curate.decontamination.index import INDEX_FILE, open_index
from pipeline.data.curate.decontamination.rule import matches
from pipeline.data.curate.duplicates.signature import shingle_hashes
from pipeline.data.curate.files import MEASURES, measured_file
from pipeline.data.curate.measurers import Measuring, items_folder, measure_settings
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.rules.of_run import local_rules
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.datasets.manifest import PLAN_KEYS
from pipeline.data.sources.records import Document

SIGNATURES = "signatures"
_NO_VALUE = 2**32 - 1


class CapturedOutput:
    """Output of measurers that is kept in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self.runs: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)

    def append(self, name: str, records: npt.NDArray[Any]) -> None:
        """Keep records."""
        self.arrays[name].append(records)

    def add_run(self, name: str, records: npt.NDArray[Any]) -> None:
        """Keep records of a run."""
        self.runs[name].append(records)

    def count(self, name: str, counts: npt.NDArray[np.int64]) -> None:
        """Forget counts."""


class Measured(NamedTuple):
    """Documents that were measured.

    Attributes:
        texts: as they were measured: cleaned.
        table: of shape (documents,).
        output: what measurers gave besides.
    """

    texts: list[str]
    table: npt.NDArray[Any]
    output: CapturedOutput

    @property
    def signatures(self) -> npt.NDArray[np.uint32] | None:
        """Signatures of the documents that are not empty, of shape (documents, values)."""
        found = self.output.arrays.get(SIGNATURES)
        return np.concatenate(found) if found else None


class Remeasurer:
    """Measures of one source by the run file.

    Args:
        config: of the run.
        source: name; the run has `data.curate`.
        folder: of its curation.
    """

    def __init__(self, config: Config, source: str, folder: Path) -> None:
        assert config.data.curate is not None, "who asks has looked"
        self._config = config
        self._curate = config.data.curate
        self._source = source
        self._folder = folder
        self._sources = {each.name: each for each in config.data.sources}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the plan of the curation."""
        found: dict[str, Any] = storage.get_json(self._folder / PLAN_FILE, *PLAN_KEYS)["settings"]
        return found

    @cached_property
    def differences(self) -> list[str]:
        """Keys that the run file sets otherwise than the plan has them, so that it measures something else."""
        if self._source not in self._sources:
            return ["data.sources"]
        now = measure_settings(self._config, self._sources[self._source])
        return sorted(name for name, value in now.items() if self.settings.get(name) != value)

    def ngrams(self, text: str, common: npt.NDArray[np.bool_] | None) -> list[dict[str, Any]]:
        """N-grams of evaluations in an edited text, as `matches` gives them; none if they are not looked for.

        Args:
            text: of a document.
            common: n-grams that are common text.
        """
        if self._curate.decontaminate is None:
            return []
        return matches(open_index(items_folder(self._config) / INDEX_FILE), text, common)

    @cached_property
    def rules(self) -> tuple[DocumentRule, ...]:
        """Rules over measures, by the run file."""
        return local_rules(self._curate, self._source, self.settings)

    @cached_property
    def _measuring(self) -> Measuring:
        # By plain Python, whichever engine measured: so they check each other.
        return Measuring(self._config, {self._source: self.settings}, "python")

    def clean(self, text: str) -> str:
        """The text as it is measured, and as preprocess reads it."""
        return self._measuring.cleaner.clean(text)

    def jaccard(self, one: str, other: str) -> float | None:
        """Jaccard similarity of two edited texts by their shingles, counted and not estimated; None without `near`."""
        near = self._curate.duplicates.near
        if near is None:
            return None
        left, right = (set(shingle_hashes(text, near.words)) for text in (one, other))
        return len(left & right) / len(left | right) if left or right else None

    def estimate(self, measured: Measured, other: Document) -> float | None:
        """Share of equal values of the signatures of a measured document and another one; None without `near`."""
        signatures = [measured.signatures, self.measure([other]).signatures]
        if any(each is None or not len(each) for each in signatures):
            return None
        one, two = (each[0] for each in signatures if each is not None)
        return float((one == two).mean())

    def measure(self, documents: Sequence[Document]) -> Measured:
        """Measure documents."""
        texts = [self.clean(each.text) for each in documents]
        table: npt.NDArray[Any] = np.zeros(len(texts), self._measuring.table_type(self._source))
        rows = np.array([place for place, text in enumerate(texts) if text], np.uint32)
        table["state"] = [DOCUMENT if text else EMPTY_DOCUMENT for text in texts]
        table["edited"] = [bool(text) and text != each.text for text, each in zip(texts, documents, strict=True)]
        raw = [texts[row].encode() for row in rows.tolist()]
        starts = np.zeros(len(raw) + 1, np.int64)
        np.cumsum([len(each) for each in raw], out=starts[1:])
        chosen = [documents[row] for row in rows.tolist()]
        batch = TextBatch(
            np.frombuffer(b"".join(raw), np.uint8),
            starts,
            [texts[row] for row in rows.tolist()],
            rows,
            [each.id for each in chosen],
            [each.metadata for each in chosen],
        )
        part, output = table[rows], CapturedOutput()
        part["bytes"] = np.diff(starts)
        if len(rows):
            for measurer in self._measuring.measurers(self._source):
                measurer.measure(batch, part, output)
        table[rows] = part
        return Measured(texts, table, output)

    def stored(self, unit: int, chunk: int, row: int) -> Any:
        """Record of a document in the table of measures; None if it is not there any more, or is of other columns.

        Args:
            unit: number of the unit.
            chunk: number of the chunk.
            row: in the chunk.
        """
        return self._record(unit, chunk, row, MEASURES, self._measuring.table_type(self._source))

    def stored_signature(self, unit: int, chunk: int, row: int) -> npt.NDArray[np.uint32] | None:
        """Signature of a document; None if there is none any more."""
        near = self._curate.duplicates.near
        if near is None:
            return None
        found = self._record(unit, chunk, row, SIGNATURES, np.dtype(("<u4", (near.bands * near.rows,))))
        return None if found is None or bool((found == _NO_VALUE).all()) else np.asarray(found)

    def _record(self, unit: int, chunk: int, row: int, name: str, dtype: np.dtype[Any]) -> Any:
        path = measured_file(self._folder, unit, chunk, name)
        try:
            with storage.open_regular(path) as file:
                file.seek(row * dtype.itemsize)
                data = file.read(dtype.itemsize)
        except FileNotFoundError:
            return None
        return np.frombuffer(data, dtype, 1)[0] if len(data) == dtype.itemsize else None
