"""The id of a run folder, and what a process does whose run folder is not there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.common import run_identity
from pipeline.common.run_files import RunFiles
from pipeline.common.run_identity import LostRunFolder
from pipeline.train.run.folder import make_writable


def test_a_folder_gets_an_id_once(tmp_path: Path) -> None:
    """Also of many processes at a time, and where the file is damaged."""
    with ThreadPoolExecutor(8) as pool:
        (found,) = set(pool.map(run_identity.take_id, [tmp_path] * 64))
    assert run_identity.take_id(tmp_path) == found == run_identity.read_id(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RunFiles.folder_id], "no temporary file is left"
    RunFiles(tmp_path).folder_id.write_bytes(b"\n")
    assert run_identity.take_id(tmp_path) not in (found, "")
    with pytest.raises(FileNotFoundError):
        run_identity.take_id(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_another_folder_at_the_path_is_told_from_the_one_that_was_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    wanted = run_identity.take_id(run)
    assert run_identity.problem(run, wanted) is None
    assert run_identity.problem(tmp_path / "gone", None) is None, "of a submission by an older version"
    away = run.rename(tmp_path / "away")
    assert "is not there" in str(run_identity.problem(run, wanted))
    run.mkdir()  # a mount point, on which nothing is mounted
    assert "has no id" in str(run_identity.problem(run, wanted))
    run_identity.take_id(run)
    assert "is another folder" in str(run_identity.problem(run, wanted))
    assert run_identity.problem(away, wanted) is None


def test_a_process_of_a_job_never_makes_its_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    make_writable(run)
    wanted = run_identity.read_id(run)
    assert wanted is not None
    for name, value in run_identity.environment(run, wanted).items():
        monkeypatch.setenv(name, value)
    assert run_identity.expected_id(run) == run_identity.expected_id(Path(os.path.relpath(run))) == wanted
    assert run_identity.expected_id(tmp_path / "other") is None, "another run, which it may start"
    make_writable(run)
    away = run.rename(tmp_path / "away")
    with pytest.raises(LostRunFolder) as caught:
        make_writable(run)
    assert caught.value.exit_code == 1 and not run.exists()
    make_writable(tmp_path / "other")
    away.rename(run)
    make_writable(run)
    assert run_identity.read_id(run) == wanted
