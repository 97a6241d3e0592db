"""Jobs `across`: exact duplicates in different scopes, which are counted and stay. A job is a range of hashes.

They depend on measures alone, so they are done beside the first passes of the scopes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common.format import counted
from pipeline.common.hashing import value_hash
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import curate_config
from pipeline.data.curate.duplicates.compared import ComparedChunk, read_compared, write_compared
from pipeline.data.curate.duplicates.files import finished
from pipeline.data.curate.duplicates.groups import group_order, group_sizes
from pipeline.data.curate.duplicates.kinds import kinds_of, repeated_kinds
from pipeline.data.curate.duplicates.match import gather, hash_buckets
from pipeline.data.curate.duplicates.measure import duplicate_settings
from pipeline.data.curate.files import CURATE
from pipeline.data.curate.passes.scope_passes import ScopePasses
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import bucket_range
from pipeline.data.work.worker_pool import Progress

ACROSS = "across"
ACROSS_VERSION = 1
_FOLDER = ".across"
"""Below what scopes have in common. No scope is called like it."""
_MAX_NAMED = 5
_SCOPES = 2**31
"""Scopes are fewer; so two make one number."""
_PAIRS = 2**22
"""Pairs of scopes that are counted at once."""


@dataclass(frozen=True)
class AcrossJob(ReceiptJob):
    """A range of the exact hashes of all scopes."""

    bucket: int
    buckets: int
    chunks: Path
    """Path of `write_compared`, with scopes in place of sources."""

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Count texts of several scopes.

        Raises:
            DamagedResult: a run is not as it was written.
        """
        first, end = bucket_range(self.bucket, self.buckets)
        compared = read_compared(self.chunks)
        hashes, rest, scopes = gather(compared, "exact", first, end, progress, _scope_numbers)
        order, begins = group_order(first, end, hashes, rest)
        counts = _shared(scopes[order], begins, progress)
        progress(self.bytes)
        return self.commit({}, counts)


def _scope_numbers(each: ComparedChunk, rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    return np.full(len(rows), each.chunk.source, np.uint64)


def _shared(scopes: npt.NDArray[np.uint64], begins: npt.NDArray[np.bool_], progress: Progress) -> dict[str, Any]:
    """Counts of the groups whose members are of several scopes.

    Args:
        scopes: shape (rows,): of each member, ascending in a group.
        begins: shape (rows,): true where a group begins.
        progress: called now and then.
    """
    distinct = begins.copy()
    distinct[1:] |= scopes[1:] != scopes[:-1]
    scopes = scopes[distinct].astype(np.int64)
    starts, sizes = group_sizes(begins[distinct])
    pairs: Counter[int] = Counter()
    for size in np.unique(sizes[sizes > 1]).tolist():
        one, other = np.triu_indices(size, 1)
        groups = starts[sizes == size]
        step = max(1, _PAIRS // len(one))
        for begin in range(0, len(groups), step):
            members = scopes[groups[begin : begin + step, None] + np.arange(size)]
            found, counts = np.unique(members[:, one] * _SCOPES + members[:, other], return_counts=True)
            pairs.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
            progress(0)  # the job is at work
    return {
        "texts": int((sizes > 1).sum()),
        "copies": int((sizes[sizes > 1] - 1).sum()),
        "pairs": [[*divmod(pair, _SCOPES), count] for pair, count in sorted(pairs.items())],
    }


def across_jobs(config: Config, scopes: Sequence[ScopePasses]) -> list[ReceiptJob]:
    """Jobs over all scopes, whose chunks are measured; none where one scope has all, or exact hashes are not wanted."""
    curate = curate_config(config)
    if not counts_across(config, scopes):
        return []
    folder = across_folder(config)
    chunks = [
        ComparedChunk(replace(chunk, source=number)) for number, scope in enumerate(scopes) for chunk in scope.chunks
    ]
    names = [scope.plan.name for scope in scopes]
    size, buckets = hash_buckets(chunks, "exact", curate.bucket_bytes)
    hashes = [[each.chunk.source, each.chunk.hashes.get("exact")] for each in chunks]
    inputs = value_hash([ACROSS_VERSION, buckets, duplicate_settings(curate.duplicates), names, hashes])
    listed = write_compared(folder / "chunks", names, len(names), chunks)
    return [
        AcrossJob(folder, f"{ACROSS}-{bucket:05d}", inputs, size // buckets, bucket, buckets, listed)
        for bucket in range(buckets)
    ]


def counts_across(config: Config, scopes: Sequence[object]) -> bool:
    """True if there are such jobs."""
    return curate_config(config).duplicates.exact is not None and len(scopes) > 1


def across_folder(config: Config) -> Path:
    """Folder of the jobs."""
    return config.data_dir / CURATE / _FOLDER


def across_lines(config: Config, scopes: Sequence[ScopePasses]) -> Iterator[str]:
    """Lines that say what is compared with what, and how many texts stay in several scopes.

    Args:
        config: the run.
        scopes: all of them; their jobs are done.
    """
    settings = curate_config(config).duplicates
    if len(scopes) < 2 or not (kinds_of(settings) or repeated_kinds(settings)):
        return
    yield compared_alone([scope.plan.name for scope in scopes], [scope.plan.preference for scope in scopes])
    if settings.exact is None:
        yield "texts that several of them have are not counted without data.curate.duplicates.exact"
        return
    texts, copies = 0, 0
    pairs: Counter[tuple[int, int]] = Counter()
    for receipt in finished(across_jobs(config, scopes), ACROSS):
        texts, copies = texts + receipt["counts"]["texts"], copies + receipt["counts"]["copies"]
        pairs.update({(one, other): count for one, other, count in receipt["counts"]["pairs"]})
    if not texts:
        yield "no text is in two of them"
        return
    most = [
        f"{scopes[one].plan.name} and {scopes[other].plan.name} {count:,}"
        for (one, other), count in pairs.most_common(_MAX_NAMED)
    ]
    more = ", ..." if len(pairs) > len(most) else ""
    yield (
        f"{counted(texts, 'text')} {'is' if texts == 1 else 'are'} in several of them ({', '.join(most)}{more}): "
        f"{copies:,} more than if all were compared, less those that rules remove. data.curate.scopes compares sources "
        f"with each other: {{all: [{', '.join(_example(scopes))}]}}"
    )


def compared_alone(names: Sequence[str], sources: Iterable[Sequence[str]]) -> str:
    """The scopes of a run in words."""
    shown = [name if len(of) == 1 else f"{name} ({', '.join(of)})" for name, of in zip(names, sources, strict=True)]
    more = f" and {len(shown) - _MAX_NAMED:,} more" if len(shown) > _MAX_NAMED else ""
    return f"duplicates are looked for in each of these alone: {', '.join(shown[:_MAX_NAMED])}{more}"


def _example(scopes: Sequence[ScopePasses]) -> list[str]:
    names = [name for scope in scopes for name in scope.plan.preference]
    return names if len(names) <= _MAX_NAMED else [*names[:_MAX_NAMED], "..."]
