"""Pass `lines`: lines that occur in many kept documents. A job is a range of hashes of lines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import value_hash
from pipeline.config.curation.curate import LinesConfig
from pipeline.data.curate.duplicates.compared import Compared, read_compared
from pipeline.data.curate.duplicates.groups import group_order, group_sizes
from pipeline.data.curate.duplicates.kept import read_kept
from pipeline.data.curate.duplicates.kinds import RUN_TYPES
from pipeline.data.curate.duplicates.match import MAX_SHOWN, ROW_BYTES
from pipeline.data.curate.passes.jobs import CurationJob
from pipeline.data.work.sorted_runs import RunFile, bucket_count, bucket_range, write_sections
from pipeline.data.work.worker_pool import Progress

LINES_PASS_VERSION = 1
LINE = np.dtype([("row", "<u4"), ("line", "<u4")])
"""A line that goes: the row of its document in the chunk, and its number in the text, from 0."""


def sorted_lines(lines: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Lines in order."""
    return lines[np.argsort(lines["row"].astype(np.uint64) << np.uint64(32) | lines["line"], kind="stable")]


@dataclass(frozen=True)
class LinesJob(CurationJob):
    """A range of hashes of lines.

    Attributes:
        bucket: number.
        buckets: of all.
        chunks: of `write_compared`.
        min_count: fewest occurrences of a line that goes.
        keep_first: whether its first occurrence stays.
    """

    bucket: int
    buckets: int
    chunks: Path
    min_count: int
    keep_first: bool

    @property
    def receipt(self) -> Path:
        return self.folder / "receipts" / f"{self.name}.json"

    @property
    def file(self) -> str:
        """Name of its file in `folder`: in sections, one per chunk."""
        return f"lines/{self.bucket:05d}"

    def run(self, progress: Progress) -> dict[str, Any]:
        """Write the lines that go.

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
        (self.folder / self.file).parent.mkdir(exist_ok=True)
        with write_sections(self.folder / self.file, found, cuts) as file:
            receipt = self.commit({self.file: file}, counts)
        progress(self.bytes - self.bytes // 2)
        return receipt

    def _gather(
        self, compared: Compared, first: int, end: int, progress: Progress
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Lines of kept documents: (hashes, of type `LINE`, places where those of each chunk begin)."""
        hashes, lines, counts = [np.zeros(0, np.uint64)], [np.zeros(0, LINE)], [0]
        for place, each in enumerate(compared.chunks[: compared.own_chunks]):
            with RunFile(each.path("lines"), RUN_TYPES["lines"], "measure") as run:
                records = run.read_range(first, end)
            records = records[read_kept(self.folder, place, each.chunk.records)[records["row"]]]
            found = np.zeros(len(records), LINE)
            found["row"], found["line"] = records["row"], records["line"]
            hashes.append(np.ascontiguousarray(records["hash"]))
            lines.append(found)
            counts.append(len(records))
            progress(0)  # a sign of life
        return np.concatenate(hashes), np.concatenate(lines), np.cumsum(counts)

    def _first(
        self, compared: Compared, bounds: npt.NDArray[np.int64], lines: npt.NDArray[Any], place: int
    ) -> tuple[int, int]:
        """(document, line) of an occurrence."""
        chunk = compared.chunks[int(np.searchsorted(bounds, place, "right")) - 1]
        return chunk.base + int(lines[place]["row"]), int(lines[place]["line"])


def line_jobs(
    folder: Path, chunks: Path, settings: LinesConfig, kept: list[dict[str, Any]], bucket_bytes: int
) -> list[CurationJob]:
    """Jobs of the pass.

    Args:
        folder: of the choices.
        chunks: of `write_compared`.
        settings: `data.curate.duplicates.lines`.
        kept: receipts of `kept`.
        bucket_bytes: memory of a bucket.
    """
    compared = read_compared(chunks)
    own = compared.chunks[: compared.own_chunks]
    size = sum(each.size("lines") for each in own)
    buckets = bucket_count(size // RUN_TYPES["lines"].itemsize, ROW_BYTES["lines"], bucket_bytes)
    hashes = [about["xxh3"] for receipt in kept for about in receipt["files"].values()]
    keep_first = settings.keep == "first"
    values = [LINES_PASS_VERSION, buckets, settings.min_count, keep_first, compared.hashes("lines"), hashes]
    inputs = value_hash(values)
    return [
        LinesJob(
            folder,
            f"lines-{bucket:05d}",
            inputs,
            size // buckets,
            bucket,
            buckets,
            chunks,
            settings.min_count,
            keep_first,
        )
        for bucket in range(buckets)
    ]
