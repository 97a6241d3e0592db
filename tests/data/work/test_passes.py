"""Passes one after the other, with the example of CONTRIBUTING.md among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from pipeline.data.datasets.indexed import part_prefix
from pipeline.data.work.job import JobDone, ReceiptJob
from pipeline.data.work.job_run import JobRun
from pipeline.data.work.passes import MissingJobs, Pass, missing_jobs
from tests.data.datasets.packing.made import write_lengths
from tests.data.work.lengths import lengths_pass
from tests.data.work.test_job import Copy


def run(found: MissingJobs) -> int:
    quiet = Console(quiet=True)
    outcome = JobRun[ReceiptJob, JobDone](quiet, found.shared, 2, "making", "job").run(found.jobs)
    outcome.check("job", " and ".join(found.names), "Nothing follows")
    return outcome.made


def test_a_pass_over_a_dataset(tmp_path: Path) -> None:
    lengths = [3, 1, 8, 2, 5, 4, 9, 7, 6]
    dataset = write_lengths(tmp_path / "s", lengths)
    parts = [part_prefix(dataset, number) for number in range(4)]
    folder = tmp_path / "lengths"
    folder.mkdir()
    assert run(missing_jobs([[lengths_pass(folder, parts)]])) == 4
    made = np.concatenate([np.fromfile(path, "<u4") for path in sorted(folder.glob("*.bin"))])
    assert made.sum() == sum(lengths)
    assert missing_jobs([[lengths_pass(folder, parts)]]) == MissingJobs()
    (folder / "lengths-00001.bin").unlink()
    assert [job.name for job in missing_jobs([[lengths_pass(folder, parts)]]).jobs] == ["lengths-00001"]


def test_the_first_pass_of_each_list_that_is_not_complete(tmp_path: Path) -> None:
    done, first, second, other = (Copy(tmp_path / name, name, "inputs", 1) for name in ("done", "a", "b", "c"))
    done.folder.mkdir()
    done.make(b"x", lambda _: None)
    asked: list[str] = []

    def jobs(job: Copy) -> list[ReceiptJob]:
        asked.append(job.name)
        return [job]

    def passes(*of: Copy) -> list[Pass]:
        return [Pass(each.name, lambda each=each: jobs(each), lambda each=each: {each.folder: 1}) for each in of]

    found = missing_jobs([passes(done, first, second), passes(other)])
    assert found == MissingJobs(["a", "c"], [first, other], {first.folder: 1, other.folder: 1})
    assert asked == ["done", "a", "c"]  # the jobs of a pass may need the files of the pass before it
