"""Files that the passes write and read whole, with their hashes from receipts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import DamagedResult

EDGE = np.dtype([("document", "<u8"), ("first", "<u8")])
"""A document, and the first of a group that it is in; what `match` writes."""
MEMBER = np.dtype([("root", "<u8"), ("document", "<u8"), ("exact", "<u8"), ("url", "<u8"), ("shingles", "<u4")])
"""A document that may be compared with others of the same root; `exact` and `url` name the first document that equals
it; `shingles` is the section of the document `exact` in the file that the pass `shingles` writes of its chunk. What
`join` writes."""
NO_SHINGLES = 2**32 - 1
"""In `MEMBER`: the document shares a band with none but equal ones."""
CANDIDATE = np.dtype([("document", "<u8")])
"""A document whose shingles are compared; what `join` writes in sections, one per chunk."""
DECISION = np.dtype([("document", "<u8"), ("kept", "<u8"), ("rule", "<u2"), ("value", "<f4")])
"""A document that goes for another; what `choose` writes."""
_WRITE_RECORDS = 2**18


@dataclass(frozen=True)
class ResultFile:
    """A file of a pass, as its receipt describes it."""

    path: Path
    size: int
    xxh3: str
    made_by: str

    def read(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """All of its records, checked.

        Raises:
            DamagedResult: it is not as it was written.
        """
        try:
            data = storage.read_bytes(self.path)
        except FileNotFoundError:
            raise DamagedResult(self.path, self.made_by, "it is missing") from None
        found = xxhash.xxh3_64_intdigest(data)
        if len(data) != self.size or f"{found:016x}" != self.xxh3 or len(data) % dtype.itemsize:
            raise DamagedResult(self.path, self.made_by, f"hash {found:016x} instead of {self.xxh3}")
        return np.frombuffer(data, dtype)


def result_files(job: ReceiptJob, receipt: dict[str, Any], made_by: str) -> list[ResultFile]:
    """Files of a receipt, by name."""
    return [
        ResultFile(job.folder / name, about["size"], about["xxh3"], made_by)
        for name, about in sorted(receipt["files"].items())
    ]


def finished(jobs: list[ReceiptJob], made_by: str) -> list[dict[str, Any]]:
    """Receipts of jobs.

    Raises:
        UserError: one is not done.
    """
    receipts = [job.find() for job in jobs]
    missing = [job for job, receipt in zip(jobs, receipts, strict=True) if receipt is None]
    if missing:
        raise UserError(
            f"pass {made_by!r} is not done: {len(missing)} of {len(jobs)} jobs are missing, like {missing[0]}; run "
            "`pipeline curate` again"
        )
    return [receipt for receipt in receipts if receipt is not None]


def write_array(folder: Path, name: str, records: npt.NDArray[Any]) -> HashedFile:
    """Write records into a folder that exists, under a name in it; the file is not committed yet."""
    return write_blocks(
        folder, name, (records[start : start + _WRITE_RECORDS] for start in range(0, len(records), _WRITE_RECORDS))
    )


def write_blocks(folder: Path, name: str, blocks: Iterable[npt.NDArray[Any]]) -> HashedFile:
    """`write_array` of records that are made block by block."""
    path = folder / name
    storage.make_below(folder, path.parent)
    file = HashedFile(path)
    try:
        with storage.naming(path):
            for block in blocks:
                file.write(block.tobytes())
            file.file.close()  # a job may have more files than a process may hold open
    except BaseException:
        file.__exit__(None, None, None)
        raise
    return file
