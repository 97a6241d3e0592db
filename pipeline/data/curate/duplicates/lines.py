"""Passes `lines` and `paragraphs`: pieces that occur in many kept documents. A job is a range of their hashes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import links
from pipeline.common.hashing import value_hash
from pipeline.config.curation.curate import LinesConfig, ParagraphsConfig
from pipeline.data.curate.duplicates.compared import Compared, read_compared
from pipeline.data.curate.duplicates.groups import group_order, group_sizes
from pipeline.data.curate.duplicates.kept import read_kept
from pipeline.data.curate.duplicates.kinds import RUN_TYPES, RepeatedKind
from pipeline.data.curate.duplicates.match import MAX_SHOWN, hash_buckets
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import RunFile, bucket_range, write_sections
from pipeline.data.work.worker_pool import Progress

LINES_PASS_VERSION = 1
LINE = np.dtype([("row", "<u4"), ("line", "<u4")])
"""A line that goes: the row of its document in the chunk, and its number in the text, from 0."""
PARAGRAPH = np.dtype([("row", "<u4"), ("line", "<u4"), ("lines", "<u4"), ("blank", "<u4"), ("bytes", "<u4")])
"""A paragraph that goes: the row of its document, and the fields of `line_text.Paragraph`."""
PIECES: dict[RepeatedKind, np.dtype[Any]] = {"lines": LINE, "paragraphs": PARAGRAPH}
"""Records of what the passes write."""


def lines_of(paragraphs: npt.NDArray[Any], *, blank: bool) -> npt.NDArray[Any]:
    """All lines of paragraphs, in the same order.

    Args:
        paragraphs: of type `PARAGRAPH`.
        blank: also the blank ones behind them.
    """
    counts = paragraphs["lines"].astype(np.int64) + (paragraphs["blank"] if blank else 0)
    found = np.zeros(int(counts.sum()), LINE)
    found["row"] = np.repeat(paragraphs["row"], counts)
    ends = np.cumsum(counts)
    found["line"] = np.arange(len(found)) - np.repeat(ends - counts, counts) + np.repeat(paragraphs["line"], counts)
    return found


def united_lines(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Lines that are in one of two arrays, each once, ascending."""
    keys = np.unique(np.concatenate([_line_keys(one), _line_keys(other)]))
    found = np.zeros(len(keys), LINE)
    found["row"], found["line"] = keys >> np.uint64(32), keys & np.uint64(2**32 - 1)
    return found


def _line_keys(lines: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    keys: npt.NDArray[np.uint64] = lines["row"].astype(np.uint64) << np.uint64(32) | lines["line"]
    return keys


def sorted_lines(lines: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Lines or paragraphs in order."""
    return lines[np.argsort(_line_keys(lines), kind="stable")]


@dataclass(frozen=True)
class RepeatedJob(ReceiptJob):
    """A range of hashes of lines or paragraphs.

    Attributes:
        kind: of the pieces.
        bucket: number.
        buckets: of all.
        chunks: of `write_compared`.
        min_count: fewest occurrences of a piece that goes.
        keep_first: whether its first occurrence stays.
    """

    kind: RepeatedKind
    bucket: int
    buckets: int
    chunks: Path
    min_count: int
    keep_first: bool

    @property
    def file(self) -> str:
        """Name of its file in `folder`: in sections, one per chunk."""
        return f"{self.kind}/{self.bucket:05d}"

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write the pieces that go.

        Raises:
            DamagedResult: a file is not as it was written.
        """
        first, end = bucket_range(self.bucket, self.buckets)
        compared = read_compared(self.chunks)
        hashes, lines, bounds = self._gather(compared, first, end, progress)
        progress(self.bytes // 2)
        order, begins = group_order(first, end, hashes)
        starts, sizes = group_sizes(begins)
        goes = np.repeat(sizes >= self.min_count, sizes)
        if self.keep_first:
            goes &= ~begins
        gone = np.sort(order[goes])
        common = np.flatnonzero(sizes >= self.min_count)
        common = common[np.lexsort([hashes[order[starts[common]]], -sizes[common]])][:MAX_SHOWN]
        counts = {
            "rows": len(hashes),
            "groups": int((sizes >= self.min_count).sum()),
            "removed": len(gone),
            "largest": [
                [int(sizes[each]), *self._first(compared, bounds, lines, order[starts[each]])] for each in common
            ],
        }
        cuts = np.searchsorted(gone, bounds)
        found = lines[gone]
        for low, high in itertools.pairwise(cuts.tolist()):
            found[low:high] = sorted_lines(found[low:high])
        links.make_folder((self.folder / self.file).parent)
        with write_sections(self.folder / self.file, found, cuts) as file:
            receipt = self.commit({self.file: file}, counts)
        progress(self.bytes - self.bytes // 2)
        return receipt

    def _gather(
        self, compared: Compared, first: int, end: int, progress: Progress
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Pieces of kept documents: (hashes, records of `PIECES`, places where those of each chunk begin)."""
        kind = PIECES[self.kind]
        hashes, pieces, counts = [np.zeros(0, np.uint64)], [np.zeros(0, kind)], [0]
        for place, each in enumerate(compared.chunks[: compared.own_chunks]):
            with RunFile(each.path(self.kind), RUN_TYPES[self.kind], "measure") as run:
                records = run.read_range(first, end)
            records = records[read_kept(self.folder, place, each.chunk.records)[records["row"]]]
            found = np.zeros(len(records), kind)
            for name in kind.names or ():
                found[name] = records[name]
            hashes.append(np.ascontiguousarray(records["hash"]))
            pieces.append(found)
            counts.append(len(records))
            progress(0)  # a sign of life
        return np.concatenate(hashes), np.concatenate(pieces), np.cumsum(counts)

    def _first(
        self, compared: Compared, bounds: npt.NDArray[np.int64], lines: npt.NDArray[Any], place: int
    ) -> tuple[int, int]:
        """(document, line) of an occurrence."""
        chunk = compared.chunks[int(np.searchsorted(bounds, place, "right")) - 1]
        return chunk.base + int(lines[place]["row"]), int(lines[place]["line"])


def repeated_jobs(
    kind: RepeatedKind,
    folder: Path,
    chunks: Path,
    settings: LinesConfig | ParagraphsConfig,
    kept: list[dict[str, Any]],
    bucket_bytes: int,
) -> list[ReceiptJob]:
    """Jobs of a pass.

    Args:
        kind: of the pieces.
        folder: of the choices.
        chunks: of `write_compared`.
        settings: `data.curate.duplicates.lines` or `paragraphs`.
        kept: receipts of `kept`.
        bucket_bytes: memory of a bucket.
    """
    compared = read_compared(chunks)
    own = compared.chunks[: compared.own_chunks]
    size, buckets = hash_buckets(own, kind, bucket_bytes)
    hashes = [about["xxh3"] for receipt in kept for about in receipt["files"].values()]
    keep_first = settings.keep == "first"
    values = [LINES_PASS_VERSION, buckets, settings.min_count, keep_first, compared.hashes(kind), hashes]
    inputs = value_hash(values)
    return [
        RepeatedJob(
            folder,
            f"{kind}-{bucket:05d}",
            inputs,
            size // buckets,
            kind,
            bucket,
            buckets,
            chunks,
            settings.min_count,
            keep_first,
        )
        for bucket in range(buckets)
    ]
