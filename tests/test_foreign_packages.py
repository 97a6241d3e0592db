"""Another package called `pipeline` or `slurm`: the command says which file it is, without running it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.common.imports import module_command

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-P", "-c", "from pretraining_pipeline import main; main()", "--version")
"""The console script, which has the folder of programs in place of the working directory on its path."""


def refused(*command: str, cwd: Path, path: Path | str = "") -> str:
    """The message of a command that is refused in one line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, (path, ROOT))))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def foreign(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("raise SystemExit('the script of a user')\n")
    return file


@pytest.mark.parametrize("package", ["pipeline", "slurm"])
def test_of_pythonpath(package: str, tmp_path: Path) -> None:
    file = foreign(tmp_path / "other" / package / "__init__.py")
    message = refused(*COMMAND, cwd=tmp_path, path=tmp_path / "other")
    assert str(file) in message and f"Take {tmp_path / 'other'} out of PYTHONPATH" in message


def test_of_the_working_directory(tmp_path: Path) -> None:
    file = foreign(tmp_path / "slurm" / "slurm.py")
    message = refused(sys.executable, "-m", "pipeline", "--version", cwd=file.parent)
    assert str(file) in message and "Rename" in message
    file.rename(file.with_name("pipeline.py"))
    assert "Rename" in refused(sys.executable, "-m", "pretraining_pipeline", cwd=file.parent)


@pytest.mark.guard
def test_of_another_distribution(tmp_path: Path) -> None:
    """In the folder of ours, where pip has replaced the file that both have; or alone, beside its metadata."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text('__version__ = "7"\n')
    about = tmp_path / "other_pipe-7.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-pipe\nVersion: 7\n")
    (about / "RECORD").write_text("pipeline/__init__.py,,\n")
    # Not by PYTHONPATH, as a folder of packages that Python knows otherwise.
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {COMMAND[3]}"
    command = (*COMMAND[:3], start, "--version")
    alone = refused(*command, cwd=ROOT)
    assert str(tmp_path / "pipeline" / "__init__.py") in alone and "Uninstall other-pipe" in alone
    for folder in (ROOT / "pipeline").iterdir():
        if folder.is_dir():
            (tmp_path / "pipeline" / folder.name).symlink_to(folder)
    mixed = refused(*command, cwd=ROOT)
    assert str(tmp_path / "pipeline" / "__init__.py") in mixed and "Uninstall other-pipe" in mixed


def test_modules_run_as_they_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine.py").write_text("print('fine')")
    monkeypatch.chdir(tmp_path)
    assert "-P" in module_command("fine")
    monkeypatch.syspath_prepend(tmp_path)
    assert subprocess.run(module_command("fine"), capture_output=True, text=True).stdout == "fine\n"
