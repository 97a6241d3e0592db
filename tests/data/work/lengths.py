"""A pass: the lengths of the sequences of a dataset, a job per part. `test_passes.py` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.hashing import value_hash
from pipeline.data.datasets.indexed import HashedFile, IndexedPart
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.passes import Pass
from pipeline.data.work.worker_pool import Progress


@dataclass(frozen=True)
class LengthsJob(ReceiptJob):
    """Lengths of the sequences of a part in tokens, as `<u4`."""

    part: Path

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        lengths = IndexedPart(self.part).lengths
        with HashedFile(self.folder / f"{self.name}.bin") as file:
            file.write(lengths.astype("<u4").tobytes())
            progress(self.bytes)
            return self.commit({f"{self.name}.bin": file}, {"sequences": len(lengths)})


def lengths_pass(folder: Path, parts: list[Path]) -> Pass:
    """The pass over parts, which writes into a folder."""
    sizes = [part.with_suffix(".idx").stat().st_size for part in parts]
    jobs = [
        LengthsJob(folder, f"lengths-{number:05d}", value_hash([str(part), size]), size, part)
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True))
    ]
    return Pass("lengths", lambda: jobs)
