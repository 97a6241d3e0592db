"""Jobs: when one is done, what a receipt of others can do, and how often a stage makes the same again."""

from __future__ import annotations

import errno
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common.errors import MachineError, UserError
from pipeline.data.datasets.indexed import HashedFile
from pipeline.data.work import job as job_module
from pipeline.data.work.job import Busy, JobDone, ReceiptJob, WorkerState, run_leased
from pipeline.data.work.job_run import FAILURES_FILE, JobRun
from pipeline.data.work.leases import LeaseWatch, take
from pipeline.data.work.passes import Rounds
from pipeline.data.work.worker_pool import Progress

RECEIPT = {"job": "copy", "inputs": "inputs", "counts": {}}
FILES: list[Any] = [{"made": 3}, ["made"], {"made": {}}, {"made": {"size": "3"}}, {"../none": {"size": 3}}]
FILES += [{"x" * 300: {"size": 3}}, {"a\0": {"size": 3}}, None]


@dataclass(frozen=True)
class Copy(ReceiptJob):
    """Writes what is shared."""

    def make(self, shared: Any, progress: Progress) -> dict[str, Any]:
        if shared is None:
            raise ValueError("there is nothing to write")
        with HashedFile(self.folder / "made") as file:
            file.write(shared)
            progress(len(shared))
            return self.commit({"made": file}, {"bytes": len(shared)})


@pytest.fixture
def job(tmp_path: Path) -> Copy:
    return Copy(tmp_path, "copy", "inputs", 3)


def run(job: Copy, shared: bytes) -> JobDone | Busy:
    return run_leased(job, shared, LeaseWatch(), lambda _: None)


def test_it_is_made_once(job: Copy) -> None:
    assert job.find() is None
    first = run(job, b"abc")
    assert isinstance(first, JobDone) and first.made == 1 and (job.folder / "made").read_bytes() == b"abc"
    receipt = job.find()
    assert run(job, b"xyz") == JobDone(0) and job.find() == receipt
    assert Copy(job.folder, "copy", "other inputs", 3).find() is None
    os.truncate(job.folder / "made", 2)
    assert job.find() is None


def test_other_bytes_of_the_same_inputs_are_refused(job: Copy) -> None:
    run(job, b"abc")
    with pytest.raises(UserError, match="gave other bytes than when"):
        job.make(b"xyz", lambda _: None)
    assert (job.folder / "made").read_bytes() == b"abc"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'{"job": "copy", "inputs": "inputs"}',
        *(json.dumps(RECEIPT | {"files": files}).encode() for files in FILES),
    ],
)
def test_a_receipt_of_a_stranger_is_none(job: Copy, content: bytes) -> None:
    run(job, b"abc")
    job.receipt.write_bytes(content)
    assert job.find() is None


def test_a_held_job_is_left(job: Copy) -> None:
    lease = take(job.folder, "copy", LeaseWatch())
    assert isinstance(run(job, b"abc"), Busy) and job.find() is None
    lease.release()  # type: ignore[union-attr]
    assert isinstance(run(job, b"abc"), JobDone)


def test_a_job_that_fails_is_tried_again_listed_and_given_up(job: Copy) -> None:
    shown = io.StringIO()
    outcome = JobRun[Copy, JobDone](Console(file=shown, width=200), None, 1, "copying", "job").run([job])
    ((failed, how),) = outcome.failed
    assert failed == job and "nothing to write (3 attempts)" in how
    rows = [json.loads(line) for line in (job.folder / FAILURES_FILE).read_text().splitlines()]
    assert [(row["job"], row["attempt"]) for row in rows] == [("copy", 1), ("copy", 2), ("copy", 3)]
    with pytest.raises(MachineError, match=r"1 job of copies failed:\n  copy in .*\nNothing follows\. "):
        outcome.check("job", "copies", "Nothing follows")


def test_a_job_that_is_always_missing_ends_the_stage(job: Copy) -> None:
    rounds = Rounds()
    for number in range(50):
        assert not rounds.count("copies", [Copy(job.folder, f"copy-{number}", "inputs", 3)])
    for _ in range(10):
        assert not rounds.count("copies", [job])
    assert "jobs of copies are made and removed repeatedly" in rounds.count("copies", [job])


def test_on_a_disk_that_cannot_be_written_a_job_is_found_or_refused(job: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "lease")

    monkeypatch.setattr(job_module, "take", refuse)
    with pytest.raises(OSError, match="lease"):
        run(job, b"abc")
    job.make(b"abc", lambda _: None)
    assert isinstance(found := run(job, b"abc"), JobDone) and found.made == 0


def test_a_lease_that_a_dead_command_left_holds_up_no_job_of_who_has_all(job: Copy) -> None:
    take(job.folder, "copy", LeaseWatch())
    outcome = JobRun[Copy, JobDone](Console(quiet=True), b"abc", 1, "copying", "job", leased=False).run([job])
    assert outcome.made == 1


@dataclass
class Opened(WorkerState):
    """Says in a file that it was opened, or that it cannot be."""

    path: Path

    def open(self) -> None:
        if not self.path.exists():
            raise UserError(f"{self.path} is missing")


def test_what_workers_share_is_opened_by_them(job: Copy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shared is missing"):
        JobRun[Copy, JobDone](Console(quiet=True), Opened(tmp_path / "shared"), 1, "copying", "job").run([job])
