"""The lock, the attempt counter, and metrics of a run that was trained in several attempts."""

import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from pipeline.data.store import JsonLines, temporary
from pipeline.errors import MachineError, NumericalError, Stopped, UserError
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


def test_a_killed_process_that_nobody_has_waited_for_does_not_hold_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from pipeline.train.run_folder import open_run\n"
        f"with open_run(Path({str(tmp_path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.Popen([sys.executable, "-c", script])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with open_run(tmp_path) as folder:
        assert folder.attempt == 2
    assert child.wait() == -9


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from pipeline.data import store\n"
        f"store.temporary(Path({str(tmp_path)!r}) / 'exit.json').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    mine = temporary(tmp_path / "exit.json")
    mine.touch()
    with open_run(tmp_path):
        assert list(tmp_path.glob(".*.tmp")) == [mine], "a process that lives may be writing"


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
    with pytest.raises(MachineError, match="run.dir .* cannot be written to"), open_run(tmp_path / "file" / "run"):
        pass
    with pytest.raises(UserError, match="run.dir .* is a file"), open_run(tmp_path / "file"):
        pass


@pytest.mark.parametrize(("name", "content"), [("lock", "[]"), ("lock", ""), ("attempt", ""), ("attempt", "x")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} is damaged"), open_run(tmp_path):
        pass


def test_only_one_of_many_takes_over_a_stale_lock(tmp_path: Path) -> None:
    """All start at once on the lock of a dead process; each that gets it says so, and keeps it for a while."""
    script = f"""
import sys, time
from pathlib import Path
from pipeline.train.run_folder import open_run
while time.time() < float(sys.argv[1]):
    pass
with open_run(Path({str(tmp_path)!r})) as folder:
    Path({str(tmp_path)!r}, f"held-{{folder.attempt}}").touch(exist_ok=False)
    time.sleep(1)
"""
    import socket

    (tmp_path / "lock").write_bytes(orjson.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": 1}))
    start = str(time.time() + 3)
    processes = [subprocess.Popen([sys.executable, "-c", script, start], stderr=subprocess.DEVNULL) for _ in range(4)]
    codes = [process.wait() for process in processes]
    assert codes.count(0) == len(list(tmp_path.glob("held-*"))) >= 1
    # Whoever came while it was held was refused: had two held it at once, they would have counted one attempt.
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (UserError("no"), 2), (Stopped("now"), 75), (NumericalError("nan"), 77), (KeyboardInterrupt(), 130),
     (ZeroDivisionError("x"), 1)],
)  # fmt: skip
def test_how_it_ended_is_written_however_it_ended(tmp_path: Path, error: BaseException | None, code: int) -> None:
    (tmp_path / "exit.json").write_text("from the attempt before")

    def attempt() -> None:
        with open_run(tmp_path) as folder:
            assert not (tmp_path / "exit.json").exists()
            folder.step = 7
            if error is not None:
                raise error

    if error is None:
        attempt()
    else:
        with pytest.raises(type(error)):
            attempt()
    written = orjson.loads((tmp_path / "exit.json").read_bytes())
    assert (written["code"], written["step"], written["attempt"]) == (code, 7, 1)


def test_a_lock_that_was_taken_over_is_noticed(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.assert_mine()
        (tmp_path / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
        with pytest.raises(MachineError, match="taken over"):
            folder.assert_mine()
    assert (tmp_path / "lock").exists()  # it is the other's


def test_the_last_attempt_of_a_step_counts_and_cut_lines_are_passed_over(tmp_path: Path) -> None:
    lines = JsonLines(metrics_path(tmp_path))
    for step in (1, 2, 3):
        lines.write({"step": step, "attempt": 1, "loss": float(step)})
    lines.write({"step": 3, "attempt": 1, "validation_loss": 9.0})
    lines.close()
    with metrics_path(tmp_path).open("ab") as file:
        file.write(b'null\n{"a": 1}\n{"step": 4, "att')
    lines = JsonLines(metrics_path(tmp_path))
    lines.write({"step": 2, "attempt": 2, "loss": 2.5})
    lines.close()
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [(1, 1, 1.0), (2, 2, 2.5), (3, 1, 3.0)]
    assert rows[2]["validation_loss"] == 9.0
