"""Pass `match`: documents with equal hashes, as edges to the first of each group. A job is a range of hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.hashing import value_hash
from pipeline.data.curate.duplicates.compared import Compared, ComparedChunk, read_compared
from pipeline.data.curate.duplicates.files import EDGE, write_array
from pipeline.data.curate.duplicates.groups import group_order, group_sizes
from pipeline.data.curate.duplicates.kinds import RUN_TYPES, Kind
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import RunFile, bucket_count, bucket_range
from pipeline.data.work.worker_pool import Progress

MATCH_VERSION = 1
GIANT = 10**5
"""A group of more documents is reported: a text or a piece of it that is boilerplate."""
MAX_SHOWN = 20
ROW_BYTES: dict[Kind, int] = {"exact": 56, "url": 56, "bands": 48, "lines": 48, "paragraphs": 76}
"""Memory of a row while a bucket is sorted: a little more than the most that was seen."""


@dataclass(frozen=True)
class MatchJob(ReceiptJob):
    """A range of the hashes of one kind over all chunks."""

    kind: Kind
    bucket: int
    buckets: int
    chunks: Path
    """Of `write_compared`."""

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write the edges, sorted, each once.

        Raises:
            DamagedResult: a run is not as it was written.
        """
        first, end = bucket_range(self.bucket, self.buckets)
        hashes, rest, numbers = gather(read_compared(self.chunks), self.kind, first, end, progress)
        progress(self.bytes // 2)
        order, begins = group_order(first, end, hashes, rest)
        rows = len(hashes)
        del hashes, rest
        starts, sizes = group_sizes(begins)
        ordered = numbers[order]
        del order, numbers
        heads = np.repeat(ordered[starts], sizes)
        edges = _sorted_edges(ordered[~begins], heads[~begins])
        giant = np.flatnonzero(sizes > GIANT)
        giant = giant[np.lexsort([ordered[starts[giant]], -sizes[giant]])][:MAX_SHOWN]
        counts = {
            "rows": rows,
            "groups": int((sizes > 1).sum()),
            "edges": len(edges),
            "giant": int((sizes > GIANT).sum()),
            "largest": [[int(sizes[each]), int(ordered[starts[each]])] for each in giant],
        }
        name = f"edges/{self.kind}-{self.bucket:05d}"
        with write_array(self.folder, name, edges) as file:
            receipt = self.commit({name: file}, counts)
        progress(self.bytes - self.bytes // 2)
        return receipt


def gather(
    compared: Compared,
    kind: Kind,
    first: int,
    end: int,
    progress: Progress,
    numbers_of: Callable[[ComparedChunk, npt.NDArray[np.uint32]], npt.NDArray[np.uint64]] = ComparedChunk.numbers,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64] | None, npt.NDArray[np.uint64]]:
    """Rows of a range of hashes of all chunks: (hash, its other half if it has one, document).

    Rows of one hash come in the order of documents. `numbers_of` gives the last from the rows of a chunk.
    """
    hashes, rest, numbers = [], [], []
    for each in compared.chunks:
        with each.reading(), RunFile(each.path(kind), RUN_TYPES[kind], "measure") as run:
            records = run.read_range(first, end)
        hashes.append(np.ascontiguousarray(records["hash"]))
        numbers.append(numbers_of(each, records["row"]))
        if kind in ("exact", "url"):
            rest.append(np.ascontiguousarray(records["rest"]))
        progress(0)  # a sign of life
    none = np.zeros(0, np.uint64)
    return np.concatenate([none, *hashes]), np.concatenate(rest) if rest else None, np.concatenate([none, *numbers])


def _sorted_edges(found: npt.NDArray[np.uint64], heads: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Edges by (document, first), each once."""
    # Of a bucket of bands, few documents have several edges; a stable sort by two keys is quick enough.
    order = np.lexsort([heads, found])
    edges = np.zeros(len(order), EDGE)
    edges["document"], edges["first"] = found[order], heads[order]
    again = np.zeros(len(edges), np.bool_)
    again[1:] = (edges["document"][1:] == edges["document"][:-1]) & (edges["first"][1:] == edges["first"][:-1])
    return edges[~again]


def hash_buckets(chunks: Sequence[ComparedChunk], kind: Kind, bucket_bytes: int) -> tuple[int, int]:
    """(Bytes of the runs of a kind, number of ranges of their hashes), by the memory of a range."""
    size = sum(each.size(kind) for each in chunks)
    return size, bucket_count(size // RUN_TYPES[kind].itemsize, ROW_BYTES[kind], bucket_bytes)


def match_bucket_jobs(
    folder: Path, chunks: Path, kinds: tuple[Kind, ...], settings: dict[str, Any], bucket_bytes: int
) -> list[ReceiptJob]:
    """Jobs of the pass.

    Args:
        folder: of the scope.
        chunks: of `write_compared`.
        kinds: that are compared.
        settings: of the measures.
        bucket_bytes: memory of a bucket, which decides how many there are.
    """
    compared = read_compared(chunks)
    jobs: list[ReceiptJob] = []
    for kind in kinds:
        size, buckets = hash_buckets(compared.chunks, kind, bucket_bytes)
        inputs = value_hash([MATCH_VERSION, kind, buckets, settings, compared.hashes(kind)])
        jobs += [
            MatchJob(folder, f"match-{kind}-{bucket:05d}", inputs, size // buckets, kind, bucket, buckets, chunks)
            for bucket in range(buckets)
        ]
    return jobs
