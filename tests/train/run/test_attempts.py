"""The attempts at a run as files tell them, and the end of a loop of crashes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

import pipeline
from pipeline.common.errors import HangError, MachineError, NumericalError, Stopped, UserError
from pipeline.common.run_files import RunFiles
from pipeline.common.storage import JsonLines, json_lines_backwards
from pipeline.common.versions import code_hash, versions
from pipeline.config.load import load
from pipeline.train.run.attempts import (
    attempts,
    correct_end,
    last_begun,
    refuse_crash_loop,
    steps_lost,
)
from pipeline.train.run.folder import open_run
from pipeline.train.run.heartbeat import beat_file
from pipeline.train.start import open_run as train_start
from pipeline.train.start.open_run import _what_is_tried
from slurm.local.stage_ledger import Ledger
from tests import tiny
from tests.train.runs import column, exact, start, train

LAYOUT = {"pp": 1, "dp": 2, "world_size": 2}


def attempt(run: Path, first: int, last: int, error: BaseException | None = None, config: str = "same") -> None:
    """An attempt that makes steps up to `last`, and ends so."""
    with suppress(Exception, KeyboardInterrupt), open_run(run) as folder:
        folder.begin(first, layout=LAYOUT, config=config)
        write_rows(run, folder.attempt, first, last)
        folder.step = last
        if error is not None:
            raise error


def write_rows(run: Path, number: int, first: int, last: int) -> None:
    lines = JsonLines(RunFiles(run).metrics)
    for step in range(first + 1, last + 1):
        lines.write({"step": step, "attempt": number, "time": time.time(), "tokens": step, "step_seconds": 0.0})
    lines.close()


def killed(run: Path, first: int, last: int, config: str = "same") -> None:
    """An attempt that is killed by SIGKILL, in a process of its own."""

    def make() -> None:
        with open_run(run) as folder:
            folder.begin(first, layout=LAYOUT, config=config)
            write_rows(run, folder.attempt, first, last)
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=make)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_resume_tells_of_steps_that_were_lost(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 10)
    assert steps_lost(tmp_path, 8, 100) == ""
    killed(tmp_path, 8, 12)
    assert steps_lost(tmp_path, 12, 100) == steps_lost(tmp_path, 9, 9) == ""
    assert steps_lost(tmp_path, 9, 100).startswith("attempt 2 ended after step 12 (killed: ")
    assert steps_lost(tmp_path, 9, 100).endswith("; steps 10 to 12 are trained again")
    assert steps_lost(tmp_path, 9, 11).endswith("; steps 10 to 11 are trained again")


def outcomes(run: Path) -> list[tuple[int, int, int, str]]:
    return [(each.number, each.first_step, each.step, each.outcome) for each in attempts(run)]


def refused(run: Path, checkpoint: int, limit: int = 3, config: str = "same", skipped: int | None = None) -> str | None:
    try:
        refuse_crash_loop(run, limit, checkpoint, config, lambda step: step == skipped)
    except UserError as error:
        assert error.exit_code == 2
        return str(error)
    return None


def test_each_attempt_is_one_line_with_where_it_began_and_how_it_ended(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 7, Stopped("SIGTERM at step 7"))
    attempt(tmp_path, 7, 9, ZeroDivisionError("x"))
    attempt(tmp_path, 7, 20)
    assert outcomes(tmp_path) == [(1, 0, 7, "stopped"), (2, 7, 9, "failed"), (3, 7, 20, "done")]
    first = attempts(tmp_path)[0]
    assert (first.code, first.reason, first.host, first.pid) == (
        75,
        "SIGTERM at step 7",
        socket.gethostname(),
        os.getpid(),
    )
    assert first.layout == LAYOUT and first.job is None
    assert first.end is not None and first.begin <= first.end <= attempts(tmp_path)[1].begin


def test_the_job_of_an_attempt_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    attempt(tmp_path, 0, 1)
    assert [(each.job, each.restarts) for each in attempts(tmp_path)] == [("77", 2)]


def test_one_that_was_refused_before_it_began_is_no_attempt_at_training(tmp_path: Path) -> None:
    with pytest.raises(UserError), open_run(tmp_path):
        raise UserError("no data")
    attempt(tmp_path, 0, 1)
    assert outcomes(tmp_path) == [(1, 0, 1, "done")], "the refused one leaves its number to the next"


def test_a_killed_attempt_is_known_by_its_metrics(tmp_path: Path) -> None:
    begin = time.time()
    killed(tmp_path, 3, 8)
    events = [line["event"] for line in Ledger(tmp_path).entries()]
    assert events == ["attempt"], "it has said nothing of its end"
    assert outcomes(tmp_path) == [(1, 3, 8, "killed")]
    (seen,) = attempts(tmp_path)
    assert seen.code is None and seen.end is not None and begin <= seen.begin <= seen.end <= time.time()


def test_a_killed_attempt_is_known_by_its_heartbeat_which_the_next_one_overwrites(tmp_path: Path) -> None:
    killed(tmp_path, 3, 8)
    begin = attempts(tmp_path)[0].begin
    beat_file(tmp_path, 0).parent.mkdir()
    beat: dict[str, Any] = {"rank": 0, "host": "h", "pid": 1, "attempt": 1, "step": 12, "phase": "step"}
    beat_file(tmp_path, 0).write_bytes(orjson.dumps({**beat, "time": begin + 30}))
    expected = (begin + 30, 11)  # it was in step 12
    assert [(each.end, each.step) for each in attempts(tmp_path)] == [expected]
    with open_run(tmp_path) as folder:
        beat_file(tmp_path, 0).write_bytes(orjson.dumps({**beat, "attempt": folder.attempt, "time": begin + 90}))
    (seen,) = attempts(tmp_path)
    assert (seen.end, seen.step, seen.outcome) == (pytest.approx(expected[0]), expected[1], "killed")


def test_a_heartbeat_tells_a_hang_where_nobody_saw_the_exit_code(tmp_path: Path) -> None:
    killed(tmp_path, 0, 2)
    beat_file(tmp_path, 0).parent.mkdir()
    beat = {"rank": 0, "host": "h", "pid": 1, "attempt": 1, "step": 3, "phase": "hang", "time": time.time()}
    beat_file(tmp_path, 0).write_bytes(orjson.dumps(beat))
    assert outcomes(tmp_path) == [(1, 0, 2, "hung")]


def test_the_launcher_knows_better_how_an_attempt_ended(tmp_path: Path) -> None:
    before = time.time()
    killed(tmp_path, 0, 4)
    correct_end(tmp_path, before, 1, "rank 0 of 2 was killed by SIGKILL")
    assert outcomes(tmp_path) == [(1, 0, 4, "failed")]
    attempt(tmp_path, 2, 5, RuntimeError("lost the others"))
    correct_end(tmp_path, before, 76, "rank 1 hung")
    assert outcomes(tmp_path)[1] == (2, 2, 5, "hung")
    correct_end(tmp_path, time.time() + 1, 1, "of a start that never came so far")
    assert outcomes(tmp_path)[1] == (2, 2, 5, "hung")


def test_one_that_runs_has_no_end(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.begin(0, layout=LAYOUT, config="")
        (seen,) = attempts(tmp_path)
        assert (seen.outcome, seen.end, seen.code) == ("running", None, None)
    assert outcomes(tmp_path) == [(1, 0, 0, "done")]


def test_going_back_within_a_process_is_another_attempt(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.begin(0, layout=LAYOUT, config="")
        write_rows(tmp_path, 1, 0, 9)
        folder.step = 5
        folder.next_attempt(write=True)
        write_rows(tmp_path, 2, 5, 12)
        folder.step = 12
    assert outcomes(tmp_path) == [(1, 0, 9, "rewound"), (2, 5, 12, "done")]
    first, second = attempts(tmp_path)
    assert first.end == pytest.approx(second.begin, abs=0.5) and second.layout == LAYOUT


def test_time_counts_from_the_start_of_the_stage(tmp_path: Path) -> None:
    with Ledger(tmp_path).stage("train"):
        first = time.time()
        time.sleep(0.2)
        attempt(tmp_path, 0, 1, Stopped("x"))
    with Ledger(tmp_path).stage("train"):
        time.sleep(0.2)
        attempt(tmp_path, 1, 2)
    stages = [line["start"] for line in Ledger(tmp_path).entries() if line["event"] == "start"]
    assert [each.begin for each in attempts(tmp_path)] == stages
    assert stages[0] <= first


def test_damaged_lines_of_the_ledger_are_passed_over(tmp_path: Path) -> None:
    with RunFiles(tmp_path).ledger.open("ab") as file:
        file.write(b'{"event": "attempt", "attempt": 9}\n{"event": "attempt end"}\nnull\n{"event": "att')
    attempt(tmp_path, 0, 1)
    assert outcomes(tmp_path) == [(1, 0, 1, "done")]
    assert last_begun(tmp_path) == 1


@pytest.mark.parametrize("block", [1, 7, 64, 2**20])
def test_rows_come_backwards_as_they_are_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("pipeline.common.storage._BLOCK", block)
    path = tmp_path / "metrics.jsonl"
    assert list(json_lines_backwards(path)) == []
    rows = [{"step": step, "text": "é" * (step % 50)} for step in range(200)]
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b'\nnull\n\n{"cut": ')
    assert list(json_lines_backwards(path)) == rows[::-1]
    path.write_bytes(b"")
    assert list(json_lines_backwards(path)) == []


def test_so_many_deaths_at_the_same_step_and_the_next_attempt_is_refused(tmp_path: Path) -> None:
    killed(tmp_path, 5, 8)
    assert refused(tmp_path, 5) is None
    attempt(tmp_path, 5, 8, HangError("no progress"))
    assert refused(tmp_path, 5) is None
    attempt(tmp_path, 5, 8, ZeroDivisionError("x"))
    text = refused(tmp_path, 5)
    assert text is not None
    for part in ("attempts 1, 2, 3", "died in step 9", "no progress", "checkpoint of step 5", "{steps: 9}", "(3)"):
        assert part in text
    assert refused(tmp_path, 5, limit=4) is None
    assert refused(tmp_path, 5, limit=2) is not None


def test_a_loop_ends_with_a_newer_checkpoint_or_where_the_step_is_passed_over(tmp_path: Path) -> None:
    for _ in range(3):
        attempt(tmp_path, 5, 8, NumericalError("nan"))
    assert refused(tmp_path, 8) is not None, "it would reach step 9"
    assert refused(tmp_path, 9) is None
    assert refused(tmp_path, 5, skipped=8) is None, "counted from 0"
    assert refused(tmp_path, 5, skipped=7) is not None


def test_another_config_or_code_is_a_new_try(tmp_path: Path) -> None:
    for _ in range(3):
        attempt(tmp_path, 5, 8, MachineError("out of memory"))
    assert refused(tmp_path, 5, config="with a smaller micro-batch") is None
    attempt(tmp_path, 5, 8, MachineError("out of memory"), config="with a smaller micro-batch")
    assert refused(tmp_path, 5, config="with a smaller micro-batch") is None
    assert refused(tmp_path, 5, config="with a smaller micro-batch", limit=1) is not None


def test_code_that_was_changed_is_other_code_whatever_git_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tiny.write_run(tmp_path))
    before, found = _what_is_tried(config), versions()
    monkeypatch.setattr(train_start, "versions", lambda: {**found, "git": {"revision": "of a page", "changed": True}})
    assert _what_is_tried(config) == before
    monkeypatch.setattr(train_start, "versions", lambda: {**found, "torch": "9.9"})
    assert _what_is_tried(config) != before
    monkeypatch.undo()

    (tmp_path / "package").mkdir()
    monkeypatch.setattr(pipeline, "__file__", str(tmp_path / "package" / "__init__.py"))
    hashes = set()
    for text in ("a = 1", "a = 2", "a = 2"):
        (tmp_path / "package" / "a.py").write_text(text)
        hashes.add(code_hash.__wrapped__())
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("between", "breaks"),
    [
        (lambda run: attempt(run, 5, 8, Stopped("SIGTERM")), True),
        (lambda run: attempt(run, 5, 8), True),
        (lambda run: attempt(run, 5, 7, ZeroDivisionError("x")), True),
        (lambda run: attempt(run, 5, 8, UserError("a key")), False),
        (lambda run: attempt(run, 5, 6, KeyboardInterrupt()), False),
    ],
    ids=["stopped", "done", "another step", "refused", "by hand"],
)
def test_what_breaks_a_row_of_deaths(tmp_path: Path, between: Any, breaks: bool) -> None:
    attempt(tmp_path, 5, 8, ZeroDivisionError("x"))
    between(tmp_path)
    attempt(tmp_path, 5, 8, ZeroDivisionError("x"))
    assert (refused(tmp_path, 5, limit=2) is None) is breaks


@pytest.mark.guard
def test_a_run_that_dies_again_and_again_at_a_step_is_refused_and_goes_on_when_it_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 5 raises each time; step 3 was saved."""
    from pipeline.data.loading.batch import StepData
    from pipeline.train.loop.step import Stepper

    original = Stepper.step

    def step(self: Stepper, data: StepData, lr: float) -> Any:
        if data.step == 4:
            raise ZeroDivisionError("in step 5")
        return original(self, data, lr)

    monkeypatch.setattr(Stepper, "step", step)
    in_time = "train.checkpoint.async_save=false"
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            start(root, "loop", in_time)
    code, out = start(root, "loop", in_time)
    assert code == 2
    assert "attempts 1, 2, 3 at this run died in step 5 (failed: in step 5)" in out
    assert "the checkpoint of step 3" in out
    assert orjson.loads((root / "loop" / "exit.json").read_bytes())["code"] == 2
    assert outcomes(root / "loop") == [(1, 0, 4, "failed"), (2, 3, 4, "failed"), (3, 3, 4, "failed")]
    with pytest.raises(ZeroDivisionError):
        start(root, "loop", in_time, "launch.crash_loop=4")
    assert start(root, "loop", in_time, "launch.crash_loop=4")[0] == 2
    train(root, "loop", "blend.skip=[{steps: 5}]")
    assert column(root / "loop", "passed_over") == [None] * 4 + [True] + [None] * 3
    assert start(root, "loop", "blend.skip=[{steps: 5}]")[0] == 0, "nothing to do"
    assert [each.outcome for each in attempts(root / "loop")][-2:] == ["failed", "done"]


@pytest.mark.slow
def test_a_process_that_is_killed_at_the_same_step_again_and_again_is_refused(root: Path) -> None:
    """As by the kernel, for memory. The code that kills it is not in the package."""
    (root / "killer").mkdir()
    (root / "killer" / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pipeline.train.loop.trainer':\n"
        "            sys.meta_path.remove(self)\n"
        "            from pipeline.train.loop.step import Stepper\n"
        "            original = Stepper.step\n"
        "            def step(self, data, lr):\n"
        "                if data.step == 4:\n"
        "                    os.kill(os.getpid(), signal.SIGKILL)\n"
        "                return original(self, data, lr)\n"
        "            Stepper.step = step\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    keys = (f"run.dir={root / 'killed'}", "launch.crash_loop=2", "train.checkpoint.async_save=false")
    command = tiny.command("train", root / "run.yaml", *keys)
    environment = os.environ | {"PYTHONPATH": f"{root / 'killer'}:{os.environ.get('PYTHONPATH', '')}"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)

    assert [run().returncode for _ in range(2)] == [-signal.SIGKILL] * 2
    done = run()
    assert done.returncode == 2
    assert "attempts 1, 2 at this run died in step 5 (killed:" in done.stderr
    assert outcomes(root / "killed") == [(1, 0, 4, "killed"), (2, 3, 4, "killed")]


@pytest.mark.slow
def test_a_signal_that_comes_while_an_attempt_starts_is_a_stop_and_no_death(root: Path) -> None:
    command = tiny.command("train", root / "run.yaml", f"run.dir={root / 'early'}", "train.duration=9999 steps")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 100
    while last_begun(root / "early") == 0:  # the model is not built yet, and nothing has been saved
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert [each.outcome for each in attempts(root / "early")] == ["stopped"]
    assert orjson.loads((root / "early" / "exit.json").read_bytes())["code"] == 75


@pytest.mark.slow
def test_the_ledger_of_a_run_on_one_process(root: Path) -> None:
    done = tiny.pipeline("train", root / "run.yaml", f"run.dir={root / 'ledger'}")
    assert done.returncode == 0, done.stderr
    assert " wall time (1 attempt)" in done.stdout
    lines = Ledger(root / "ledger").entries()
    assert [line["event"] for line in lines] == ["start", "attempt", "attempt end", "end"]
    (seen,) = attempts(root / "ledger")
    assert (seen.first_step, seen.step, seen.outcome, seen.begin) == (0, 8, "done", lines[0]["start"])
    assert lines[1]["layout"]["world_size"] == 1
    assert lines[2]["goodput"]["attempts"] == 1
    again = tiny.pipeline("train", root / "run.yaml", f"run.dir={root / 'ledger'}")
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert len(attempts(root / "ledger")) == 1, "there was nothing to attempt"
    assert len(exact(root / "ledger")) == 8
