"""`shuffle: global`: the second pass, an external sort of all documents of a split by one keyed number.

The chunks of the first pass lie in `SPLIT/unshuffled/parts`, each of them a run: its documents are sorted by
z = mix(row, key of the unit). The range of z is cut into equal buckets. A bucket takes its documents from every run,
where they are neighbours, and becomes one part of the dataset, so the parts in their order are sorted by
(z, unit, row). That order depends on the runs alone, never on workers or restarts. This is how distribution sorts work
(Knuth, The Art of Computer Programming 3, 5.4.9); memory is bounded by the bucket.

Every bucket has a receipt, `receipts/shuffle/SPLIT/00000/NAME.json`, and is skipped when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import links, storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import value_hash
from pipeline.data.datasets.indexed import named_files, part_prefix
from pipeline.data.datasets.manifest import part_record
from pipeline.data.global_shuffle.bucket import UNSHUFFLED, ShuffleJob, runs_file

BUCKET_BYTES = 96 * 2**20
"""Average bytes of a bucket. A worker needs a good two times as much, and 60 MB for the program."""
DOCUMENT_BYTES = 96
"""Bytes of a document in memory beside its tokens and metadata: it counts into the bucket."""


@dataclass(frozen=True)
class SortedRun:
    """A chunk of the first pass: documents of a unit, sorted by z.

    Attributes:
        unit: number of the unit.
        chunk: number of the chunk.
        key: of the unit's documents; z = mix(row, key).
        documents: number of documents.
        tokens: number of tokens.
        sizes: bytes of its files by their names in the receipt (bin, idx, prov, meta, weight, mask).
        hashes: xxh3-64 of its files as the receipt has them.
    """

    unit: int
    chunk: int
    key: int
    documents: int
    tokens: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, receipt: Mapping[str, Any], split: str, key: int) -> SortedRun:
        """From the receipt of a chunk.

        Args:
            receipt: of the chunk.
            split: which split of it.
            key: of the unit's documents.
        """
        what = receipt["splits"][split]
        files = what["files"]
        return cls(
            receipt["unit"],
            receipt["link"],
            key,
            what["documents"],
            what["tokens"],
            {name: file["size"] for name, file in files.items()},
            {name: file["xxh3"] for name, file in files.items()},
        )


class Shuffle:
    """The second pass of one split of a source.

    Args:
        folder: of the source.
        split: name of the split; its runs are in `folder/split/unshuffled`.
        runs: all chunks of all units, in any order.
        dtype: of the token ids.
        config_hash: of the plan.
        bucket_bytes: size of a bucket; the order does not depend on it, the cut into parts does.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        runs: Iterable[SortedRun],
        dtype: npt.DTypeLike,
        config_hash: str,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.folder = folder
        self.split = split
        # Equal z of different units (never of one) are in the order of the units: a stable sort keeps this order.
        self.runs = sorted(runs, key=lambda run: (run.unit, run.chunk))
        self.dtype = np.dtype(dtype)
        self.config_hash = config_hash
        self.documents = sum(run.documents for run in self.runs)
        self.tokens = sum(run.tokens for run in self.runs)
        self.has_metadata = any("meta" in run.sizes for run in self.runs)
        self.has_weights = any("weight" in run.sizes for run in self.runs)
        self.has_mask = any("mask" in run.sizes for run in self.runs)
        size = self.tokens * self.dtype.itemsize + self.documents * DOCUMENT_BYTES
        size += sum(run.sizes.get(name, 0) for run in self.runs for name in ("meta", "mask"))
        self.buckets = max(1, -(-size // bucket_bytes))

    @property
    def dataset(self) -> Path:
        """Folder of the dataset that it fills."""
        return self.folder / self.split

    @cached_property
    def runs_hash(self) -> str:
        """Hash of all that the runs are."""
        return value_hash([_run_values(run) for run in self.runs])

    def jobs(self) -> list[ShuffleJob]:
        """The buckets that are not complete.

        Raises:
            UserError: a run is missing or has another size than when it was written.
        """
        missing = [job for job in self._jobs if job.find() is None]
        if not missing:
            return []
        self._check_runs()
        path = runs_file(self.folder, self.split)
        storage.make_below(self.folder, path.parent)
        storage.put_json(path, self._table())
        return missing

    @cached_property
    def _jobs(self) -> list[ShuffleJob]:
        size = self.tokens * self.dtype.itemsize // self.buckets
        return [
            ShuffleJob(
                self.folder,
                f"shuffle-{self.split}-{bucket:05d}",
                self.runs_hash,
                size,
                self.split,
                bucket,
                self.buckets,
                self.config_hash,
            )
            for bucket in range(self.buckets)
        ]

    def finished(self) -> bool:
        """Tell whether all buckets are complete: then nobody needs the runs any more."""
        return all(job.find() is not None for job in self._jobs)

    def table(self) -> npt.NDArray[Any]:
        """Records of `parts.bin` of the dataset in its order, when all buckets are complete.

        Raises:
            UserError: one is not, or together they are not what the runs are.
        """
        table = np.zeros(self.buckets, part_record(weights=self.has_weights, mask=self.has_mask))
        for bucket, job in enumerate(self._jobs):
            receipt = job.find()
            if receipt is None:
                raise UserError(f"{part_prefix(self.dataset, bucket)} is not complete; run the same command again")
            table[bucket]["unit"] = bucket
            table[bucket]["documents"], table[bucket]["tokens"] = receipt["documents"], receipt["tokens"]
            for name, file in receipt["files"].items():
                table[bucket][name] = int(file["xxh3"], 16)
        found = int(table["documents"].sum()), int(table["tokens"].sum())
        if found != (self.documents, self.tokens):
            raise UserError(
                f"{self.dataset}: the global shuffle gave {found[0]} documents with {found[1]} tokens out of "
                f"{self.documents} with {self.tokens}; remove {self.folder} and run the same command again"
            )
        return table

    def remove_unshuffled(self) -> None:
        """Remove the runs of a finished shuffle, if they are there."""
        if not self.finished():
            raise UserError(f"{self.dataset}: the global shuffle is not finished; its first pass is kept")
        links.remove_tree(self.dataset / UNSHUFFLED, ignore_errors=True)

    def _table(self) -> dict[str, Any]:
        return {
            "runs_hash": self.runs_hash,
            "config_hash": self.config_hash,
            "dtype": self.dtype.str,
            "metadata": self.has_metadata,
            **({"weights": True} if self.has_weights else {}),
            **({"mask": True} if self.has_mask else {}),
            "runs": [_run_values(run)[:5] for run in self.runs],
        }

    def _check_runs(self) -> None:
        for run in self.runs:
            files = named_files(part_prefix(self.dataset / UNSHUFFLED, run.unit, run.chunk))
            for name, size in run.sizes.items():
                if not storage.have_sizes({files[name]: size}):
                    raise UserError(
                        f"{files[name]} is missing or truncated; run `pipeline preprocess RUN.yaml` again: it repeats "
                        "the first pass where necessary"
                    )


def _run_values(run: SortedRun) -> list[Any]:
    return [run.unit, run.chunk, run.key, run.documents, run.tokens, dict(run.hashes)]
