"""The attempt counter, how an attempt ended, and metrics of a run that was trained in several attempts."""

import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from pipeline.common.errors import MachineError, NumericalError, Stopped, UnsavedError, UserError
from pipeline.common.run_files import RunFiles
from pipeline.common.storage import JsonLines, temporary
from pipeline.train.run.folder import note_end, open_run, read_metrics, refuse_lost_checkpoints


def test_attempts_are_counted(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with open_run(tmp_path / "run") as folder:
            assert folder.attempt == expected
            folder.begin(0, layout={"dp": 1}, config="")
    assert not (tmp_path / "run" / "lock").exists()


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from pipeline.common import storage\n"
        f"storage.temporary(Path({str(tmp_path)!r}) / 'exit.json').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    mine = temporary(tmp_path / "exit.json")
    mine.touch()
    with open_run(tmp_path):
        assert list(tmp_path.glob(".*.tmp")) == [mine], "a process that lives may be writing"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="run.dir .* cannot be written to"), open_run(tmp_path / "file" / "run"):
        pass
    with pytest.raises(UserError, match="run.dir .* is a file"), open_run(tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    ("name", "content"), [("lock", "[]"), ("lock", ""), ("attempt", ""), ("attempt", "x"), ("attempt", "\xff")]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=f"{name} is damaged"), open_run(tmp_path):
        pass


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (UserError("no"), 2), (Stopped("now"), 75), (NumericalError("nan"), 77), (KeyboardInterrupt(), 130),
     (ZeroDivisionError("x"), 1), (UnsavedError("full"), 79)],
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
    assert "KeyboardInterrupt" not in written["reason"]
    assert not list(tmp_path.glob(".*"))


def test_the_last_attempt_of_a_step_counts_and_cut_lines_are_passed_over(tmp_path: Path) -> None:
    lines = JsonLines(RunFiles(tmp_path).metrics)
    for step in (1, 2, 3):
        lines.write({"step": step, "attempt": 1, "loss": float(step)})
    lines.write({"step": 3, "attempt": 1, "validation_loss": 9.0})
    lines.close()
    with RunFiles(tmp_path).metrics.open("ab") as file:
        file.write(b'null\n{"a": 1}\n{"step": 4, "att')
    lines = JsonLines(RunFiles(tmp_path).metrics)
    lines.write({"step": 2, "attempt": 2, "loss": 2.5})
    lines.close()
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [(1, 1, 1.0), (2, 2, 2.5), (3, 1, 3.0)]
    assert rows[2]["validation_loss"] == 9.0


def test_what_a_process_writes_that_has_lost_the_lock_does_not_count(tmp_path: Path) -> None:
    lines = JsonLines(RunFiles(tmp_path).metrics)
    for step, attempt in ((1, 1), (2, 1), (2, 2), (3, 2), (2, 1), (3, 1), (4, 1)):
        lines.write({"step": step, "attempt": attempt, "loss": attempt})
    lines.close()
    assert [(row["step"], row["attempt"]) for row in read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 2), (4, 1)]


def test_a_lost_counter_of_attempts_does_not_give_a_number_twice(tmp_path: Path) -> None:
    for _ in range(2):
        with open_run(tmp_path) as folder:
            folder.begin(0, layout={"dp": 1}, config="")
    (tmp_path / "attempt").unlink()
    with open_run(tmp_path) as folder:
        assert folder.attempt == 3


def test_whatever_the_metrics_hold_it_is_told_how_an_attempt_ended(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="SIGTERM at step 1"), open_run(tmp_path) as folder:
        folder.begin(0, layout={"dp": 1}, config="")
        RunFiles(tmp_path).metrics.write_text('{"step": 1, "attempt": 1, "step_seconds": "x", "time": []}\n')
        raise Stopped("SIGTERM at step 1", agreed=True)
    end = orjson.loads((tmp_path / "exit.json").read_bytes())
    assert (end["reason"], end["agreed"]) == ("SIGTERM at step 1", True)
    assert orjson.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])["reason"] == "SIGTERM at step 1"


def test_a_run_that_has_saved_does_not_start_again_without_its_checkpoints(tmp_path: Path) -> None:
    refuse_lost_checkpoints(tmp_path)
    rows = [{"step": 1, "loss": 2.0}, {"step": 3, "save_blocked": 0.1}]
    write = (tmp_path / "metrics.jsonl").write_bytes
    write(b"\n".join(map(orjson.dumps, rows)))
    refuse_lost_checkpoints(tmp_path)  # ended before its first save was done
    write(b"\n".join(map(orjson.dumps, [*rows, {"step": 3, "save_seconds": 0.2}, {"step": 4, "loss": 1.0}])))
    with pytest.raises(UserError, match="has saved step 3 .*no checkpoint in .*checkpoints"):
        refuse_lost_checkpoints(tmp_path)


def test_an_end_before_the_folder_was_taken_is_noted(tmp_path: Path) -> None:
    with pytest.raises(UserError), open_run(tmp_path):
        raise UserError("of an earlier start")
    note_end(tmp_path, KeyboardInterrupt(), time.time() + 1)
    assert orjson.loads((tmp_path / "exit.json").read_bytes())["code"] == 130
