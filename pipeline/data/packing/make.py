"""Making of the packs of a dataset for one sequence length: blocks in worker processes, then the index of them.

A block is done when its receipt is there and its file has the size of the receipt. A run makes those that are missing.
Of packs that are finished, only the index has to agree with the files. The files are the same bytes for any number of
workers and interruptions. Of several commands one packs a dataset at a time; the others wait, and then find nothing to
do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from rich.console import Console

from pipeline.common import links, storage
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, percent
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.blocks import check_length
from pipeline.data.datasets.packing.files import (
    GROUPS_FILE,
    INDEX_FILE,
    FileListing,
    PackIndex,
    block_bounds,
    block_path,
    groups_bytes,
    identity,
    packs_folder,
    read_groups,
    read_index,
)
from pipeline.data.datasets.validate import file_sizes
from pipeline.data.packing.job import BlockReceipt, PackJob, hash_of, pack_job
from pipeline.data.work.job import JobDone
from pipeline.data.work.job_run import JobRun
from pipeline.data.work.leases import LeaseWatch, sweep, take_when_free


@dataclass(frozen=True)
class PackingState:
    """Progress of the packs of a dataset.

    Attributes:
        jobs: blocks that are missing.
        blocks: number of blocks.
        index: of the packs; None if they have to be made, or finished.
    """

    jobs: list[PackJob]
    blocks: int
    index: PackIndex | None


class PackMaker:
    """The packs of a dataset for one length, and making them.

    Args:
        dataset: of the documents.
        length: L, tokens of a pack.

    Raises:
        UserError: packs cannot have this length.
    """

    def __init__(self, dataset: Dataset, length: int) -> None:
        check_length(length)
        self.dataset = dataset
        self.length = length
        self._folder = packs_folder(dataset.folder, length)
        self._identity = identity(dataset.fingerprint, length)
        self._jobs = [
            pack_job(self._folder, dataset.folder, length, hash_of(self._identity), block, documents)
            for block, documents in enumerate(block_bounds(dataset.documents))
        ]

    def state(self, *, hashes: bool = False) -> PackingState:
        """The progress so far; changes nothing.

        Args:
            hashes: compare the hashes of all files, and the index with the receipts, and not only sizes with the index.
        """
        index = self._index()
        if index is not None and not hashes and self._has_sizes(index):
            return PackingState([], len(self._jobs), index)
        receipts = [job.block_receipt(hashes=hashes) for job in self._jobs]
        jobs = [job for job, receipt in zip(self._jobs, receipts, strict=True) if receipt is None]
        found = [receipt for receipt in receipts if receipt is not None]
        is_finished = not jobs and index == self._index_of(found)[0]
        return PackingState(jobs, len(self._jobs), index if is_finished else None)

    def make(self, console: Console, workers: int, *, hashes: bool = False) -> PackIndex:
        """Make what is missing.

        Args:
            console: where progress goes.
            workers: processes at most.
            hashes: as in `state`.

        Raises:
            UserError: the dataset is damaged, or a document too long for packs of this length.
            MachineError: a job failed again and again.
            OSError: the disk is full or read-only, say; what was committed stays.
        """
        if index := self.state(hashes=hashes).index:
            return index
        with storage.naming(self._folder):
            storage.make_below(self.dataset.folder, self._folder)
        with (
            take_when_free(
                self._folder,
                "pack",
                LeaseWatch(),
                lambda holder: say(console, f"waiting for {holder}, which packs {self.dataset.folder}"),
            ) as lease,
            lease.beating(),
        ):
            self._sweep()
            state = self.state(hashes=hashes)
            if state.index is None:
                self._run(state.jobs, console, state.blocks - len(state.jobs), workers)
            return state.index or self._finish()

    def _index(self) -> PackIndex | None:
        try:
            index = read_index(self.dataset.folder, self.dataset.newer, self.length)
            read_groups(self.dataset.folder, index)
        except UserError:
            return None
        return index

    def _has_sizes(self, index: PackIndex) -> bool:
        paths = [str(block_path(self._folder, block)) for block in range(len(self._jobs))]
        return bool(file_sizes(paths).tolist() == [file.size for file in index.blocks])

    def _run(self, jobs: list[PackJob], console: Console, before: int, workers: int) -> None:
        if jobs:
            each = sum(job.documents[1] - job.documents[0] for job in jobs) // min(workers, len(jobs))
            verb = f"packing {self.dataset.folder} for {self.length:,} tokens:"
            outcome = JobRun[PackJob, JobDone](console, each, workers, verb, "block", leased=False).run(jobs, before)
            outcome.check("block", str(self._folder), "Without them the packs cannot be used")

    def _finish(self) -> PackIndex:
        """Write the index of blocks that are all there."""
        receipts = [job.block_receipt() for job in self._jobs]
        found = [receipt for receipt in receipts if receipt is not None]
        if len(found) < len(receipts):
            raise UserError(f"{self._folder}: blocks were removed while packing; run the same command again")
        index, groups = self._index_of(found)
        storage.put(self._folder / GROUPS_FILE, groups)
        storage.put_json(self._folder / INDEX_FILE, index.model_dump())
        return index

    def _index_of(self, receipts: list[BlockReceipt]) -> tuple[PackIndex, bytes]:
        """The index of all blocks, and the bytes of `groups.bin`."""
        groups = groups_bytes([count for receipt in receipts for count in receipt.groups])
        index = PackIndex(
            **self._identity,
            documents=self.dataset.documents,
            tokens=self.dataset.tokens,
            packs=sum(sum(receipt.groups) for receipt in receipts),
            chunks=sum(receipt.chunks for receipt in receipts),
            cut=sum(receipt.cut for receipt in receipts),
            groups=FileListing(size=len(groups), xxh3=xxhash.xxh3_64_hexdigest(groups)),
            blocks=[receipt.file for receipt in receipts],
        )
        return index, groups

    def _sweep(self) -> None:
        """Remove what processes that were killed left behind, and blocks of a dataset that was longer."""
        with suppress(OSError):
            for path in self._folder.rglob(f"*{storage.TEMPORARY_SUFFIX}"):
                storage.remove_if_stale(path)
            for path in _numbered_files(self._folder):
                if int(path.stem) >= len(self._jobs):
                    links.remove(path, missing_ok=True)
            sweep(self._folder)


def _numbered_files(folder: Path) -> Iterator[Path]:
    for name in ("blocks", "receipts"):
        yield from (path for path in (folder / name).glob("*/*") if path.stem.isdecimal())


def packs_in_words(index: PackIndex) -> str:
    """Number of packs, documents that are cut, and padding."""
    share = percent(index.cut / index.documents, 1) if index.documents else "none"
    return (
        f"{counted(index.packs, 'pack')} of {index.length:,} tokens; {share} of the documents are cut, and "
        f"{percent(index.padding, 3)} is padding"
    )
