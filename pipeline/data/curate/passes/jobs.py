"""Jobs of the passes of a curation: each is done when its receipt is there and fits, whoever made it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work.worker_pool import Progress

RECEIPT_KEYS = ("job", "inputs", "files", "counts")


@dataclass(frozen=True)
class CurationJob(ABC):
    """A job of a pass behind `measure`. Instances are small, and pickled.

    Its result is a function of what `inputs` is a hash of, never of workers, machines or the order of jobs.

    Attributes:
        folder: whose `leases/` has its lease, and to which the names of its files are relative.
        name: of the job, unique in the folder: `match-bands-00012`.
        inputs: hash (`value_hash`) of the settings, and of the hashes of all files that it reads.
        bytes: that it is expected to read, for progress.
    """

    folder: Path
    name: str
    inputs: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} in {self.folder}"

    @property
    def receipt(self) -> Path:
        """Path of its receipt."""
        return self.folder / "receipts" / f"{self.name}.json"

    @abstractmethod
    def run(self, progress: Progress) -> dict[str, Any]:
        """Do it: write the files, `commit` them, and return the receipt.

        Args:
            progress: called with bytes done since the last call.
        """

    def find(self) -> dict[str, Any] | None:
        """The receipt, if it is of the same inputs and its files are there."""
        found: dict[str, Any] | None = storage.find_json(self.receipt, *RECEIPT_KEYS)
        if found is None or (found["job"], found["inputs"]) != (self.name, self.inputs):
            return None
        try:
            same = all(os.stat(self.folder / file).st_size == about["size"] for file, about in found["files"].items())
        except OSError:
            return None
        return found if same else None

    def commit(self, files: Mapping[str, HashedFile], counts: dict[str, Any]) -> dict[str, Any]:
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
        receipt = {"job": self.name, "inputs": self.inputs, "files": about, "counts": counts}
        storage.make_below(self.folder, self.receipt.parent)
        storage.put_json(self.receipt, receipt)
        return receipt


@dataclass(frozen=True)
class SharedJob(CurationJob):
    """A job that takes what all jobs of its pass have in common from the worker, which is given it once."""

    @abstractmethod
    def run_with(self, shared: Any, progress: Progress) -> dict[str, Any]:
        """As `run`, with what is shared."""

    def run(self, progress: Progress) -> dict[str, Any]:
        raise NotImplementedError(f"{self} is run by `run_with`")
