"""A run that is made longer: what its learning rate does where it resumes is said, and a rise is asked about once."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.problems import Problems
from pipeline.common.run_files import RunFiles
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.train.start.checks import SEAM_CHECK, TrainScope
from pipeline.train.start.fork import fork
from slurm.local import stages
from slurm.local.preview import preview
from slurm.submit.submit import submit
from tests import tiny

LONGER = "train.duration=16 steps"
RISE = "learning rate 1.00e-03 -> 5.50e-03 at step 9 (train.duration: 8 steps -> 16 steps)"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a training of 8 steps, whose rate has decayed."""
    file = tiny.write_run(tmp_path_factory.mktemp("trained"), {"resume.allow": []})
    config = load(file)
    stages.preprocess(config)
    stages.train(config, Console(quiet=True))
    return file


@pytest.fixture
def run_file(trained: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(trained.parent / "run", tmp_path / "run")
    (tmp_path / "run.yaml").write_text(trained.read_text().replace(f"{trained.parent}/run", f"{tmp_path}/run"))
    return tmp_path / "run.yaml"


def refusal(start: Any) -> str:
    with pytest.raises(UserError) as error:
        start()
    return str(error.value)


def agreed(config: Config) -> bool:
    return RunFiles(config.run.dir).agreements.exists()


def test_a_rise_is_refused_where_nobody_is_asked(run_file: Path) -> None:
    config, console = load(run_file, [LONGER]), Console(quiet=True)
    before = sorted(run_file.parent.rglob("*"))
    shown = refusal(lambda: stages.train(config, console))
    assert RISE in shown and shown.endswith("if it is meant, say so with resume.allow=[schedule]")
    assert refusal(lambda: preview(config, ["train"], console)) == shown
    assert refusal(lambda: preview(config, ["preprocess", "train"], console)) == shown
    assert refusal(lambda: stages.run(config, console)) == shown
    assert refusal(lambda: submit(config, ["train"], "local", console)) == f"nothing was sent: {shown}"
    assert refusal(lambda: submit(config, ["train"], "local", console, dry_run=True)) == f"nothing was sent: {shown}"
    assert sorted(run_file.parent.rglob("*")) == before


def test_what_is_allowed_or_does_not_rise_is_said(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stages.train(load(run_file, [LONGER, "train.optimizer.lr=0.001"]), Console(width=300)) == 16
    assert "at step 9" in (out := capsys.readouterr().out) and "warning: learning rate" not in out
    allowed = load(run_file, ["train.duration=24 steps", "resume.allow=[schedule]"])
    assert stages.train(allowed, Console(width=300)) == 24
    assert "warning: learning rate" in capsys.readouterr().out


@pytest.mark.parametrize(("lr", "is_shown"), [("0.00181818", False), ("0.0018", True)])
def test_a_fork_shows_rates_that_differ(run_file: Path, lr: str, is_shown: bool) -> None:
    """At this point of the longer schedule the factor is 0.55; the rate before was 1.00e-03."""
    child = load(run_file, [LONGER, f"run.dir={run_file.parent / 'child'}", f"train.optimizer.lr={lr}"])
    out = io.StringIO()
    fork(run_file, 8, child, Console(file=out, width=300), dry_run=True)
    assert ("learning rate 1.00e-03 -> 9.90e-04" in out.getvalue()) == is_shown, out.getvalue()
    assert ("learning rate" in out.getvalue()) == is_shown and f"train.optimizer.lr: 0.01 -> {lr}" in out.getvalue()


def test_a_damaged_checkpoint_is_left_to_the_start(run_file: Path) -> None:
    """It resumes from an older one."""
    config = load(run_file, [LONGER])
    state = config.run.dir / "checkpoints" / "step-00000008" / "state.json"
    state.write_bytes(b"[" * state.stat().st_size)
    found = Problems()
    found.look([SEAM_CHECK], TrainScope(config, 1))
    assert not found.problems and not found.warnings


def on_terminal(run_file: Path, answer: str, *arguments: str) -> tuple[int, str]:
    """Train as at a terminal; exit code and output."""
    ours, theirs = pty.openpty()
    command = tiny.command("train", run_file, *arguments)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    os.write(ours, answer.encode())
    shown = b""
    while True:
        try:
            shown += (more := os.read(ours, 65536))
        except OSError:  # it has ended
            break
        if not more:
            break
    os.close(ours)
    return process.wait(), " ".join(shown.decode().split())


@pytest.mark.guard
def test_it_is_asked_once(run_file: Path) -> None:
    code, shown = on_terminal(run_file, "n\n", LONGER)
    assert code == 2 and "continue? [y/N]" in shown and RISE in shown and not agreed(load(run_file))
    code, shown = on_terminal(run_file, "y\n", LONGER)
    assert code == 0 and shown.count("continue?") == 1
    config = load(run_file, [LONGER])
    assert agreed(config)
    shutil.rmtree(next(config.run.dir.glob("checkpoints/step-*16")))  # jobs and later starts resume before the end
    (config.run.dir / "checkpoints" / "latest").unlink()
    assert stages.train(config, Console(quiet=True)) == 16
    assert "learning rate" in refusal(lambda: stages.train(load(run_file, ["train.duration=32 steps"])))
