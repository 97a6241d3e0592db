"""Trainings on several processes that are killed while they export: the next start leaves whole exports alone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.common import storage
from pipeline.common.console import Console
from pipeline.common.run_files import RunFiles
from pipeline.train.export.folders import ExportFolders
from pipeline.train.huggingface.convert import to_hf
from tests import tiny
from tests.waiting import runs, until

pytestmark = [pytest.mark.parallel, pytest.mark.guard]


def stopped_in_export(folders: ExportFolders) -> tuple[Path, int] | None:
    """An export that is unfinished and stays so, since its process is stopped; that process."""
    for tmp in folders.unfinished():
        exporting = int(tmp.name.split(".")[-3])
        os.kill(exporting, signal.SIGSTOP)
        if tmp in folders.unfinished():
            return tmp, exporting
        os.kill(exporting, signal.SIGCONT)  # it was quicker; there is another one
    return None


@pytest.mark.slow
def test_a_kill_in_an_export_leaves_no_half_of_one(root: Path, tmp_path: Path) -> None:
    run = root / "killed"
    keys = ("launch.processes=2", "parallel.tp=2", "train.checkpoint={every_steps: 4, keep: 9}")
    words = ("train", root / "run.yaml", f"run.dir={run}", *keys, "train.checkpoint.export={every_steps: 4, keep: 2}")
    folders = ExportFolders.of_run(run)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(tiny.command(*words), stdout=log, stderr=log)
        tmp, exporting = until(lambda: stopped_in_export(folders), process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    until(lambda: not runs(exporting))
    assert list(folders.unfinished()) == [tmp]
    done = tiny.pipeline(*words)
    assert done.returncode == 0, done.stderr
    assert (folders.steps(), folders.unfinished()) == ([4, 8], {})
    for step in (4, 8):
        to_hf(run, tmp_path / f"step-{step:08d}", step=step, console=Console(quiet=True))
        for file in folders.path(step).iterdir():
            assert file.read_bytes() == (tmp_path / folders.path(step).name / file.name).read_bytes(), file
    assert [row["step"] for row in storage.read_json_lines(RunFiles(run).exports)] == [4, 8]
