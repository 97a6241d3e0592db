"""Jobs: the pieces of work of a stage. Each is done when its receipt is there and fits, whoever made it."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work.leases import Lease, LeaseWatch, take
from pipeline.data.work.worker_pool import Progress

Receipt = dict[str, Any]


class JobResult(Protocol):
    """Result of a job."""

    @property
    def made(self) -> int:
        """Receipts that were written; 0 if another command was faster."""


R_co = TypeVar("R_co", bound=JobResult, covariant=True)
R = TypeVar("R", bound=JobResult)


class StageJob(Protocol[R_co]):
    """A piece of work that one process does at a time. Instances are small, and pickled."""

    @property
    def folder(self) -> Path:
        """Folder whose `leases/` has its lease, and whose list of failures names it."""

    @property
    def name(self) -> int | str:
        """Number of a unit, or a name that is unique in the folder: `match-bands-00012`."""

    @property
    def bytes(self) -> int:
        """Bytes that it is expected to read, for progress."""

    def run(self, shared: Any, progress: Progress) -> R_co:
        """Do what is missing of it.

        Args:
            shared: what all jobs of a pass have in common; a worker is given it once.
            progress: called with bytes done since the last call.

        Raises:
            OSError: the disk is full, say; nothing half-written stays.
        """

    def run_unleased(self, shared: Any, progress: Progress, refusal: OSError) -> R_co:
        """Do what can be done of it without writing.

        Args:
            shared: as in `run`.
            progress: as in `run`.
            refusal: of the lease, because the disk cannot be written; raised if there is something to write.
        """


@dataclass(frozen=True)
class Busy:
    """Another process has the job."""

    holder: str


def run_leased(job: StageJob[R], shared: Any, watch: LeaseWatch, progress: Progress) -> R | Busy:
    """Run a job while its lease is held; or tell who holds it.

    Args:
        job: to run.
        shared: as `StageJob.run` takes it.
        watch: of this process.
        progress: as `StageJob.run` takes it.
    """
    try:
        lease = take(job.folder, job.name, watch)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return job.run_unleased(shared, progress, error)
    if not isinstance(lease, Lease):
        return Busy(str(lease))
    # Beats come from a thread, too, because skipping what was read before can take long.
    with storage.naming(job.folder), lease, lease.beating():
        return job.run(shared, lease.counting(progress))


class WorkerState(ABC):
    """State that workers share, which takes time to open."""

    @abstractmethod
    def open(self) -> None:
        """Open it in this process, if it is not open."""


def make_worker(shared: Any, leased: bool) -> Callable[[StageJob[R], Progress], R | Busy]:
    """In a worker process: open what is shared; returns the function that runs jobs.

    Args:
        shared: as `StageJob.run` takes it.
        leased: whether each job has a lease of its own.
    """
    if isinstance(shared, WorkerState):
        shared.open()
    watch = LeaseWatch()

    def run(job: StageJob[R], progress: Progress) -> R | Busy:
        if leased:
            return run_leased(job, shared, watch, progress)
        with storage.naming(job.folder):
            return job.run(shared, progress)

    return run


@dataclass(frozen=True)
class JobDone:
    """A job has a receipt."""

    made: int = 1
    """0 if it was found."""


@dataclass(frozen=True)
class ReceiptJob(ABC):
    """A job with one receipt, which lists its files.

    Its result is a function of what `inputs` is a hash of, never of workers, machines or the order of jobs.

    Attributes:
        folder: as `StageJob.folder`; names of files are relative to it.
        name: as `StageJob.name`.
        inputs: hash (`value_hash`) of the settings, and of the hashes of all files that it reads.
        bytes: as `StageJob.bytes`.
    """

    folder: Path
    name: str
    inputs: str
    bytes: int

    KEYS: ClassVar[tuple[str, ...]] = ("files", "counts")
    """Keys of a receipt beside those of `identity`."""

    def __str__(self) -> str:
        return f"{self.name} in {self.folder}"

    @property
    def receipt(self) -> Path:
        """Path of its receipt."""
        return self.folder / "receipts" / f"{self.name}.json"

    @property
    def identity(self) -> Receipt:
        """Keys that a receipt of this job has, with their values."""
        return {"job": self.name, "inputs": self.inputs}

    def files(self, receipt: Receipt) -> dict[Path, Receipt]:
        """Listing (`size`, `xxh3`) of each file of a receipt."""
        return {self.folder / file: about for file, about in receipt["files"].items()}

    @abstractmethod
    def make(self, shared: Any, progress: Progress) -> Receipt:
        """Write the files, `commit` them, and return the receipt; the arguments are those of `run`."""

    def run(self, shared: Any, progress: Progress) -> JobDone:
        """Find the receipt, or make it."""
        if self.find() is not None:
            return JobDone(0)
        self.make(shared, progress)
        return JobDone()

    def run_unleased(self, shared: Any, progress: Progress, refusal: OSError) -> JobDone:
        """Find the receipt."""
        if self.find() is None:
            raise refusal
        return JobDone(0)

    def find(self) -> Receipt | None:
        """The receipt, if it is of the same inputs and its files are there."""
        found: Receipt | None = storage.find_json(self.receipt, *self.identity, *self.KEYS)
        try:
            if found is None or any(found[key] != value for key, value in self.identity.items()):
                return None
            sizes = {path: about["size"] for path, about in self.files(found).items()}
            return found if storage.have_sizes(sizes) else None
        except (KeyError, TypeError, AttributeError, ValueError, OSError, UserError):  # the receipt may be a stranger's
            return None

    def commit(self, files: Mapping[str, HashedFile], counts: Receipt) -> Receipt:
        """Commit files that were written, then the receipt.

        Args:
            files: by path relative to `folder`.
            counts: for who adds up or looks on.

        Raises:
            UserError: there is a receipt of the same inputs with other files.
        """
        about = {name: file.listing() for name, file in files.items()}
        before = self.find()
        if before is not None and before["files"] != about:
            raise UserError(
                f"{self} gave other bytes than when {self.receipt} was written, from the same input; a machine may be "
                f"broken. Remove {self.receipt} and run the same command again"
            )
        for file in files.values():
            file.commit()
        return self.put_receipt(self.identity | {"files": about, "counts": counts})

    def put_receipt(self, receipt: Receipt) -> Receipt:
        """Write a receipt, whose files are committed."""
        storage.make_below(self.folder, self.receipt.parent)
        storage.put_json(self.receipt, receipt)
        return receipt
