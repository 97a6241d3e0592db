"""Pass `kept`: the documents of a chunk that rules and duplicates keep, a bit each. A job is a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.common import storage
from pipeline.common.hashing import value_hash
from pipeline.data.curate.duplicates.compared import read_compared
from pipeline.data.curate.duplicates.files import DECISION, ResultFile
from pipeline.data.curate.duplicates.rank import GOOD, rank_file, rank_type
from pipeline.data.datasets.indexed import numbered
from pipeline.data.work.job import ReceiptJob
from pipeline.data.work.sorted_runs import SectionFile, write_sections
from pipeline.data.work.worker_pool import Progress

KEPT_VERSION = 1
_BITS = np.dtype([("bits", "u1")])


def kept_file(folder: Path, place: int) -> Path:
    """Bits of a chunk, by its place among all that are compared."""
    return numbered(folder / "kept", place).with_suffix(".kept")


def read_kept(folder: Path, place: int, records: int) -> npt.NDArray[np.bool_]:
    """Tell which rows of a chunk are kept documents, bool of shape (records,).

    Raises:
        DamagedResult: the file is not as it was written.
    """
    with SectionFile(kept_file(folder, place), _BITS, "kept") as file:
        bits = file.read_sections(0, 1)["bits"]
    return np.unpackbits(bits, count=records).astype(np.bool_)


def read_section(folder: Path, files: list[str], dtype: np.dtype[Any], made_by: str, place: int) -> npt.NDArray[Any]:
    """Records of one chunk out of files in sections, one behind the other."""
    parts = [np.zeros(0, dtype)]
    for name in files:
        with SectionFile(folder / name, dtype, made_by) as file:
            parts.append(file.read_sections(place, place + 1))
    return np.concatenate(parts)


@dataclass(frozen=True)
class KeptJob(ReceiptJob):
    """The kept documents of a chunk.

    Attributes:
        place: of the chunk.
        chunks: of `write_compared`.
        rank_hash: of the file of `rank`.
        keep: `data.curate.duplicates.keep`.
        chosen: file with the names of those of `choose`.
    """

    place: int
    chunks: Path
    rank_hash: str
    keep: tuple[str, ...]
    chosen: Path

    @property
    def receipt(self) -> Path:
        return numbered(self.folder / "receipts" / "kept", self.place).with_suffix(".json")

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """Write the bits.

        Raises:
            DamagedResult: a file is not as it was written.
        """
        each = read_compared(self.chunks).chunks[self.place]
        kind = rank_type(self.keep)
        path = rank_file(self.folder, self.place)
        ranks = ResultFile(path, each.chunk.records * kind.itemsize, self.rank_hash, "rank").read(kind)
        kept = ranks["state"] == GOOD
        gone = read_section(
            self.folder, storage.read_bytes(self.chosen).decode().split(), DECISION, "choose", self.place
        )
        kept[(gone["document"] - np.uint64(each.base)).astype(np.int64)] = False
        bits = np.packbits(kept).view(_BITS)
        name = str(kept_file(self.folder, self.place).relative_to(self.folder))
        storage.make_below(self.folder, (self.folder / name).parent)
        with write_sections(self.folder / name, bits, np.array([0, len(bits)])) as file:
            receipt = self.commit({name: file}, {"kept": int(kept.sum())})
        progress(self.bytes)
        return receipt


def kept_jobs(
    folder: Path,
    chunks: Path,
    keep: tuple[str, ...],
    ranks: list[dict[str, Any]],
    chosen: list[dict[str, Any]],
) -> list[ReceiptJob]:
    """Jobs of the pass, one per chunk of the scope.

    Args:
        folder: of the choices.
        chunks: of `write_compared`.
        keep: `data.curate.duplicates.keep`.
        ranks: receipts of `rank`.
        chosen: receipts of `choose`.
    """
    compared = read_compared(chunks)
    names = "\n".join(name for receipt in chosen for name in receipt["files"])
    hashes = [about["xxh3"] for receipt in chosen for about in receipt["files"].values()]
    path = folder / "chosen.txt"
    if not (path.exists() and storage.read_bytes(path) == names.encode()):
        storage.put(path, names.encode())
    jobs: list[ReceiptJob] = []
    for place, each in enumerate(compared.chunks[: compared.own_chunks]):
        (rank,) = ranks[place]["files"].values()
        inputs = value_hash([KEPT_VERSION, each.base, each.chunk.records, rank["xxh3"], hashes])
        jobs.append(KeptJob(folder, f"kept-{place:05d}", inputs, rank["size"], place, chunks, rank["xxh3"], keep, path))
    return jobs
