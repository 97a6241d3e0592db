"""The lock, the attempt counter, and metrics of a run that was trained in several attempts."""

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from pipeline.errors import UserError
from pipeline.train.metrics import JsonLines
from pipeline.train.run_folder import metrics_path, open_run, read_metrics


def test_attempts_are_counted(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with open_run(tmp_path / "run") as folder:
            assert folder.attempt == expected
    assert not (tmp_path / "run" / "lock").exists()


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    with open_run(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"), open_run(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from pipeline.train.run_folder import open_run\n"
        f"with open_run(Path({str(tmp_path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (tmp_path / "lock").exists()
    with open_run(tmp_path) as folder:
        assert folder.attempt == 2


def test_a_lock_from_another_host_is_respected(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
    with pytest.raises(UserError, match="process 1 on elsewhere"), open_run(tmp_path):
        pass


def test_a_pid_that_was_given_to_another_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    import socket

    (tmp_path / "lock").write_bytes(orjson.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": 1}))
    with open_run(tmp_path) as folder:
        assert folder.attempt == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run.dir .* cannot be written to"), open_run(tmp_path / "file" / "run"):
        pass


def test_the_last_attempt_of_a_step_counts_and_cut_lines_are_passed_over(tmp_path: Path) -> None:
    lines = JsonLines(metrics_path(tmp_path))
    for step in (1, 2, 3):
        lines.write({"step": step, "attempt": 1, "loss": float(step)})
    lines.write({"step": 3, "attempt": 1, "validation_loss": 9.0})
    lines.close()
    with metrics_path(tmp_path).open("ab") as file:
        file.write(b'{"step": 4, "att')
    lines = JsonLines(metrics_path(tmp_path))
    lines.write({"step": 2, "attempt": 2, "loss": 2.5})
    lines.close()
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [(1, 1, 1.0), (2, 2, 2.5), (3, 1, 3.0)]
    assert rows[2]["validation_loss"] == 9.0
