"""Measures of a document by which duplicates are found: signature, hashes, and what `keep` reads."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.config.curation.curate import DuplicatesConfig, ParagraphsConfig
from pipeline.data.curate.batch import ChunkOutput, Measurer, TextBatch
from pipeline.data.curate.duplicates.dates import DATE_VERSION, seconds
from pipeline.data.curate.duplicates.kinds import CHECK_COLUMN, RUN_TYPES, SIGNATURES, Kind, date_column, date_keys
from pipeline.data.curate.duplicates.line_text import (
    LINES_VERSION,
    PARAGRAPHS_VERSION,
    hashed_lines,
    hashed_paragraphs,
)
from pipeline.data.curate.duplicates.normalize import NORMALIZATION_VERSION, normalized
from pipeline.data.curate.duplicates.signature import (
    SIGNATURE_VERSION,
    band_hashes,
    has_signature,
    signature_checks,
)
from pipeline.data.curate.duplicates.signatures.signer import Signer, make_signer
from pipeline.data.curate.duplicates.urls import URL_VERSION, normalize_url

_SHORT_BYTES = 2**16
"""Text that is normalised at a time."""


def duplicate_settings(settings: DuplicatesConfig) -> dict[str, Any]:
    """All that decides what is measured for duplicates: settings, and versions of the definitions that they use."""
    found: dict[str, Any] = {}
    if settings.exact is not None:
        version = NORMALIZATION_VERSION if settings.exact == "normalized" else 0
        found["exact"] = [settings.exact, version]
    if settings.url is not None:
        found["url"] = [settings.url, URL_VERSION]
    if settings.near is not None:
        near = settings.near
        found["near"] = [near.words, near.bands, near.rows, SIGNATURE_VERSION, NORMALIZATION_VERSION]
    if settings.lines is not None:
        found["lines"] = [settings.lines.min_bytes, LINES_VERSION]
    if (paragraphs := settings.paragraphs) is not None:
        found["paragraphs"] = [paragraphs.min_bytes, paragraphs.min_words, PARAGRAPHS_VERSION]
    if dates := date_keys(settings):
        found["dates"] = [*dates, DATE_VERSION]
    return found


def duplicate_columns(settings: DuplicatesConfig) -> list[tuple[str, str]]:
    """Columns of what is measured for duplicates."""
    dates = [(date_column(key), "<u8") for key in date_keys(settings)]
    return [*([(CHECK_COLUMN, "<u4")] if settings.near else []), *dates]


class DuplicateMeasurer(Measurer):
    """Measures what duplicates are found by. Empty documents have no signature and are in no run.

    Args:
        settings: `data.curate.duplicates`.
        engine: `numba` or `python`; the results are the same.
    """

    def __init__(self, settings: DuplicatesConfig, engine: Literal["numba", "python"]) -> None:
        self._settings = settings
        self._dates = date_keys(settings)
        near = settings.near
        self._signer: Signer | None = None
        if near is not None:
            self._signer = make_signer(engine, near.words, near.bands * near.rows)

    @property
    def columns(self) -> list[tuple[str, str]]:
        return duplicate_columns(self._settings)

    def measure(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        if self._signer is not None and self._settings.near is not None:
            self._near(self._signer, self._settings.near.bands, batch, table, output)
        if self._settings.exact is not None:
            raw = _texts(batch)
            _add_hashes("exact", raw if self._settings.exact == "text" else _bare(batch, raw), batch, output)
        if self._settings.url is not None or self._dates:
            self._metadata(batch, table, output)
        if self._settings.lines is not None:
            _add_lines(batch, self._settings.lines.min_bytes, output)
        if self._settings.paragraphs is not None:
            _add_paragraphs(batch, self._settings.paragraphs, output)

    def _near(self, signer: Signer, bands: int, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        signatures = signer.sign(batch)
        output.append(SIGNATURES, signatures)
        table[CHECK_COLUMN] = signature_checks(signatures)
        signed = has_signature(signatures)
        hashes = band_hashes(signatures[signed], bands)
        records = np.zeros(hashes.size, RUN_TYPES["bands"])
        records["hash"] = hashes.reshape(-1)
        records["row"] = np.repeat(batch.rows[signed], bands)
        output.add_run("bands", records)

    def _metadata(self, batch: TextBatch, table: npt.NDArray[Any], output: ChunkOutput) -> None:
        objects = [orjson.loads(each) if each else {} for each in batch.metadata]
        objects = [each if isinstance(each, dict) else {} for each in objects]
        for key in self._dates:
            table[date_column(key)] = [seconds(each.get(key)) for each in objects]
        if self._settings.url is not None:
            values = [each.get(self._settings.url) for each in objects]
            urls = [normalize_url(value) if isinstance(value, str) else "" for value in values]
            _add_hashes("url", [url.encode("utf-8", "surrogatepass") for url in urls], batch, output)


def _texts(batch: TextBatch) -> list[bytes]:
    data = batch.data.tobytes()
    return [data[low:high] for low, high in itertools.pairwise(batch.starts.tolist())]


def _bare(batch: TextBatch, raw: list[bytes]) -> list[bytes]:
    """Words of each text; the text itself where it has none, so that those are not all equal."""
    found: list[bytes] = []
    first = 0
    for place in range(len(raw)):
        if batch.starts[place + 1] - batch.starts[first] >= _SHORT_BYTES or place + 1 == len(raw):
            found += normalized(batch.texts[first : place + 1])
            first = place + 1
    return [bare or text for bare, text in zip(found, raw, strict=True)]


def _add_hashes(kind: Kind, values: list[bytes], batch: TextBatch, output: ChunkOutput) -> None:
    """Add the 128-bit hashes of what is not empty to a run."""
    present = [place for place, value in enumerate(values) if len(value)]
    records = np.zeros(len(present), RUN_TYPES[kind])
    digests = b"".join(xxhash.xxh3_128_digest(values[place]) for place in present)
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    records["hash"], records["rest"] = halves[:, 0], halves[:, 1]
    records["row"] = batch.rows[present]
    output.add_run(kind, records)


def _add_lines(batch: TextBatch, min_bytes: int, output: ChunkOutput) -> None:
    hashes: list[int] = []
    numbers: list[int] = []
    counts = []
    for raw in _texts(batch):
        of_text, places = hashed_lines(raw, min_bytes)
        hashes += of_text
        numbers += places
        counts.append(len(places))
    records = np.zeros(len(hashes), RUN_TYPES["lines"])
    records["hash"] = np.array(hashes, np.uint64)
    records["row"] = np.repeat(batch.rows, counts)
    records["line"] = numbers
    output.add_run("lines", records)


def _add_paragraphs(batch: TextBatch, settings: ParagraphsConfig, output: ChunkOutput) -> None:
    kind = RUN_TYPES["paragraphs"]
    parts = [np.zeros(0, kind)]
    for row, raw in zip(batch.rows.tolist(), _texts(batch), strict=True):
        found = hashed_paragraphs(raw, settings.min_bytes, settings.min_words)
        parts.append(np.array([(each.hash, row, *each[1:]) for each in found], kind))
    output.add_run("paragraphs", np.concatenate(parts))
