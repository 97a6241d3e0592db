"""`pipeline logs` over run folders made by hand: which log it finds, from which end it reads, whom it blames."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.common.run_files import RunFiles
from pipeline.train.run.attempts import append_entry
from slurm import jobs
from slurm.jobs import Stage
from slurm.logs.command import show_logs
from slurm.logs.follow import follow_logs
from slurm.logs.parts import parts
from slurm.record.launch_log import Launch, LaunchEnd, Next, begin, end
from slurm.record.rank_logs import rank_log
from slurm.record.tail import Tail, last_lines

WAIT = 60.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder on a machine whose scheduler has forgotten all jobs."""
    folder = tmp_path / "run"
    RunFiles(folder).slurm.mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return folder


def launched(
    run: Path,
    job: str = "77",
    stage: Stage = "train",
    *,
    restarts: int = 0,
    number: int = 1,
    nodes: tuple[str, ...] = ("n1", "n2"),
) -> Launch:
    logs = run / "logs" / f"2026-01-01_00-00-00-{job}.{restarts}.{number}"
    logs.mkdir(parents=True)
    return begin(
        run,
        stage,
        job,
        restarts=restarts,
        number=number,
        link=1,
        nodes=nodes,
        processes_per_node=2,
        logs=str(logs.relative_to(run)),
        checkpoint=0,
    )


def ended(run: Path, launch: Launch, code: int, following: Next, reason: str = "so it was") -> None:
    end(run, launch, LaunchEnd(code, reason, following, 0, time.time()))


def attempted(run: Path, number: int, job: str | None = "77", **more: Any) -> None:
    line = {"attempt": number, "host": "n1", "pid": number, "layout": {"world_size": 4}, "first_step": 0, "config": ""}
    append_entry(run, {"event": "attempt", "time": time.time(), "job": job, "restarts": 0, **line, **more})


def shown(run: Path, **how: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    given = {"follow": False, "rank": None, "attempt": None, "first_error": False, "lines": 50, **how}
    show_logs(run, console, **given)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def write(run: Path, launch: Launch, rank: int, text: str | bytes) -> Path:
    file = run / launch.logs / f"rank-{rank:04d}.log"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_the_newest_launch_or_that_of_an_attempt(run: Path) -> None:
    first = launched(run)
    attempted(run, 1)
    write(run, first, 0, "".join(f"step {step}\n" for step in range(100)))
    write(run, first, 3, "I am rank 3\n")
    ended(run, first, 1, "relaunch")
    second = launched(run, number=2)
    attempted(run, 2)
    attempted(run, 3, pid=2)
    write(
        run, second, 0, "bar 10%\rbar 20%\n\xff caf\xe9\n\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\n".encode("latin-1")
    )
    text = shown(run)
    assert "train, attempts 2-3, job 77, launch 2 on n1, n2, from " in text
    assert "bar 10%\nbar 20%\n\ufffd caf\ufffd\nred \\u001b]0;title\\u0007\\u001b[2J\n" in text
    text = shown(run, attempt=1, lines=2)
    assert text.endswith("rank-0000.log\nstep 98\nstep 99\n")
    assert shown(run, attempt=1, lines=0).count("step ") == 100
    assert shown(run, attempt=1, rank=3).endswith("I am rank 3\n")
    assert "there is no log of rank 2 yet" in shown(run, rank=2)
    with pytest.raises(UserError, match="--rank 4: .* there are ranks 0 to 3; name one"):
        shown(run, rank=4)
    with pytest.raises(UserError, match="--attempt 9: .* there are 1 to 3"):
        shown(run, attempt=9)
    other = launched(run, "78_1", "preprocess")
    write(run, other, 0, "units\n")
    assert "preprocess, job 78_1 on n1, n2" in shown(run)
    jobs.note(run, jobs.new_job("finish", "79", "slurm", "name", "none.json"))
    finish = launched(run, "79", "finish", nodes=())
    write(run, finish, 0, "done\n")
    assert "end of preprocess, job 79 on " in shown(run)


def test_a_log_for_each_node(run: Path) -> None:
    """As `srun --label` writes it; rank 0 has one of its own, and what SLURM says of it is in that of its node."""
    launch = launched(run)
    write(run, launch, 0, "".join(f"step {step}\n" for step in range(100)))
    for node, (one, other) in enumerate(((0, 1), (2, 3))):
        lines = [f"{one}: here is {one}\rstill\n", *(f"{other}: {other} says {line}\n" for line in range(9))]
        (run / launch.logs / f"node-{node:04d}.log").write_text("".join(lines) + f"{one}: end\n{other}: cut")
    ended(run, launch, 1, "end")
    assert shown(run, rank=3, lines=2).endswith("node-0001.log\n3 says 8\n")
    assert shown(run, rank=2, lines=9).endswith("node-0001.log\nhere is 2\nstill\nend\n")
    assert shown(run, rank=1, lines=0).count("1 says") == 9
    assert shown(run, lines=2).endswith("rank-0000.log\nstep 98\nstep 99\nhere is 0\nstill\nend\n")
    tail = rank_log(run / launch.logs, 3, 2).tail(1)
    assert tail.read() == ""
    with (run / launch.logs / "node-0001.log").open("a") as file:
        file.write(" off\n2: x\n" + "2: y\n" * 10**6 + "3: after much\n")
    assert tail.read() + tail.read() == "cut off\nafter much\n"


def test_trained_by_hand(run: Path) -> None:
    ended(run, launched(run), 0, "done")
    with pytest.raises(UserError):
        show_logs(run / "logs", Console(), follow=False, rank=0, attempt=None, first_error=False, lines=1)
    start = time.time() + 5
    append_entry(run, {"event": "start", "stage": "train", "start": start, "host": "n1", "pid": 1})
    folder = run / "logs" / time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(start + 2))
    folder.mkdir()
    attempted(run, 1, None, time=start + 4)
    (folder / "rank-0001.log").write_text("here is rank 1\n")
    (folder / "rank-0001.error.json").write_text(
        '{"message": {"message": "KeyError: 1"}, "time": 5, "exit_code": 1, "traceback": "T", "consequence": false, '
        '"said": false}'
    )
    text = shown(run)
    assert "attempt 1, by hand on n1" in text
    assert (
        "rank 0 of a training that was started by hand writes to its terminal, not to a log; the logs of ranks " in text
    )
    assert shown(run, rank=1).endswith("here is rank 1\n")
    assert "rank 1: KeyError: 1 (code 1)\nT\n" in shown(run, first_error=True)


def test_before_anything_was_launched(run: Path) -> None:
    assert "it was never submitted" in shown(run)
    jobs.note(run, jobs.new_job("train", "77", "slurm", "name", "none.json"))
    assert "jobs 77 have not begun" in shown(run)
    log = jobs.sent(run)[0].log(run)
    log.parent.mkdir()
    log.write_text("module: command not found\n")
    assert shown(run).endswith("module: command not found\n")
    followed = shown(run, follow=True)
    assert "no job of the run waits or runs any more" in followed
    assert followed.endswith("module: command not found\n")
    write(run, launched(run), 0, "it runs\n")
    assert "job 78" not in shown(run)
    later = jobs.new_job("train", "78", "slurm", "name", "none.json")
    jobs.note(run, later)
    later.log(run).write_text("module: command not found\n")
    assert f"job 78 (train) was sent later and has launched nothing so far: {later.log(run)}" in shown(run)


def test_the_error_of_a_job_that_launched_nothing_is_the_first(run: Path) -> None:
    """Of one that was refused, also at a later start."""
    first = launched(run)
    ended(run, first, 75, "requeue")
    job = jobs.new_job("train", "77", "slurm", "name", "none.json")
    jobs.note(run, job)
    file = job.log(run)
    file.parent.mkdir()
    file.write_text("error: x.json has changed\nsubmit again\n")
    os.utime(file, (first.time - 9, first.time - 9))
    assert shown(run, first_error=True).startswith("nothing failed in the newest start: "), "it is of an earlier start"
    os.utime(file, (time.time() + 9, time.time() + 9))
    assert shown(run, first_error=True).endswith(f"x.json has changed\nsubmit again\n==> {file}\n")
    jobs.note(run, jobs.new_job("train", "78", "slurm", "name", "none.json"))
    assert "x.json has changed" in shown(run, first_error=True), "a job that waits has no log"
    ended(run, launched(run, "78"), 1, "end", "rank 0 failed")
    os.utime(file, (first.time, first.time))
    assert "rank 0 failed" in shown(run, first_error=True)


def test_the_first_error(run: Path) -> None:
    assert shown(run, first_error=True) == "nothing failed\n"
    first = launched(run)
    attempted(run, 1)
    write(run, first, 2, "allocating\n")
    (run / first.logs / "srun.log").write_text("srun: error: n2: task 2: Segmentation fault\n")
    ended(run, first, 1, "relaunch")
    ended(run, launched(run, number=2), 0, "done")
    text = shown(run, first_error=True)
    log = run / first.logs / "rank-0002.log"
    assert text.split("\n")[1:] == ["rank 2 on n2: was killed by SIGSEGV (SIGSEGV)", "allocating", f"==> {log}", ""]
    third = launched(run, number=3)
    attempted(run, 3)
    ended(run, third, 78, "end", "of the job's nodes n1 cannot be used")
    assert "of the job's nodes n1 cannot be used (code 78)\n" in shown(run, first_error=True)
    assert shown(run).endswith("the end: of the job's nodes n1 cannot be used\n"), "no rank was started"
    assert "SIGSEGV" in shown(run, first_error=True, attempt=1)


def test_failures_of_an_earlier_submission_are_only_named(run: Path) -> None:
    for number in ("77", "78"):
        jobs.note(run, jobs.new_job("train", number, "slurm", "name", "none.json"))
    jobs.note(run, jobs.new_job("eval", "79", "slurm", "name", "none.json", after=("78",)))
    first = launched(run)
    attempted(run, 1)
    ended(run, first, 1, "end", "the disk is full")
    second = launched(run, "78")
    text = shown(run, first_error=True)
    assert text.splitlines()[0].startswith("nothing failed in the newest start: train, job 78 ")
    assert text.splitlines()[1].startswith("an earlier start failed: train, attempt 1, job 77 ")
    assert text.endswith("; --attempt 1 shows it\n") and "disk" not in text
    assert "the disk is full" in shown(run, first_error=True, attempt=1)
    ended(run, second, 1, "end", "rank 0 failed")
    ended(run, launched(run, "79", "eval"), 0, "done")
    assert "train, job 78" in shown(run, first_error=True), "the evaluation is of the same submission"


class Follower:
    """`pipeline logs -f` beside the test."""

    def __init__(self, run: Path) -> None:
        self.console = Console(file=io.StringIO(), width=200)
        self.thread = threading.Thread(
            target=lambda: show_logs(
                run, self.console, follow=True, rank=None, attempt=None, first_error=False, lines=2
            ),
            daemon=True,
        )
        self.thread.start()

    def text(self) -> str:
        return self.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    def until(self, what: Callable[[str], bool]) -> None:
        limit = time.monotonic() + WAIT
        while not what(self.text()):
            assert time.monotonic() < limit and (self.thread.is_alive() or what(self.text())), self.text()
            time.sleep(0.02)


def test_following_goes_over_requeues_to_the_end(run: Path) -> None:
    first = launched(run)
    log = write(run, first, 0, "one\ntwo\nthree\n")
    follower = Follower(run)
    follower.until(lambda text: text.endswith("rank-0000.log\ntwo\nthree\n"))
    with log.open("ab") as file:
        file.write(b"four and \xc3")
        file.flush()
        follower.until(lambda text: text.endswith("four and "))
        file.write(b"\xa4\n")
    follower.until(lambda text: text.endswith("four and ä\n"))
    ended(run, first, 75, "requeue", "saved; requeue")
    second = launched(run, restarts=1)
    write(run, second, 0, "five\n")
    follower.until(lambda text: "==> ended: saved; requeue\n" in text and text.endswith("five\n"))
    third = launched(run, restarts=2)
    write(run, third, 0, "six\n")
    follower.until(lambda text: "==> ended: no reason was recorded" in text and text.endswith("six\n"))
    ended(run, third, 0, "done", "all is done")
    follower.thread.join(WAIT)
    assert not follower.thread.is_alive()
    assert follower.text().endswith("six\n==> ended: all is done\n")


@pytest.mark.guard
def test_jobs_that_run_beside_one_another_end_on_their_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations of two checkpoints while training goes on, and one that is lost without a word."""
    monkeypatch.setattr("slurm.logs.follow._ASK", 0.1)
    queue = run.parent / "queue"
    asked = run.parent / "asked"
    (run.parent / "bin" / "squeue").write_text(f"#!/bin/sh\ncat {queue}\necho >> {asked}\n")

    def wait_until_asked(times: int) -> None:
        end, before = time.monotonic() + WAIT, asked.stat().st_size if asked.exists() else 0
        while (asked.stat().st_size if asked.exists() else 0) < before + times:
            assert time.monotonic() < end, "the scheduler is not asked"
            time.sleep(0.02)

    def queued(*numbers: str) -> None:
        lines = "".join(f"{number}|RUNNING|None|n1|N/A|N/A|\n" for number in numbers)
        queue.with_suffix(".new").write_text(lines)
        queue.with_suffix(".new").replace(queue)

    for stage, number in (("train", "7"), ("eval", "9"), ("eval", "10"), ("eval", "11")):
        jobs.note(run, jobs.new_job(stage, number, "slurm", "name", "none.json"))  # type: ignore[arg-type]
    queued("7", "9", "10", "11")
    training = launched(run, "7")
    nine = launched(run, "9", "eval")
    log = write(run, nine, 0, "nine\n")
    follower = Follower(run)
    follower.until(lambda text: text.endswith("nine\n"))
    ten = launched(run, "10", "eval")
    write(run, ten, 0, "ten\n")
    eleven = launched(run, "11", "eval")
    write(run, eleven, 0, "eleven\n")
    wait_until_asked(3)
    with log.open("a") as file:
        file.write("nine goes on\n")
    follower.until(lambda text: text.endswith("nine goes on\n"))
    assert "ended" not in follower.text()
    ended(run, nine, 0, "done", "nine is done")
    follower.until(lambda text: text.endswith("ten\n"))
    assert "nine goes on\n==> ended: nine is done\n" in follower.text()
    queued("7", "11")
    follower.until(lambda text: text.endswith("eleven\n"))
    assert "ten\n==> ended: no reason was recorded" in follower.text()
    ended(run, training, 0, "done")
    ended(run, eleven, 0, "done", "eleven is done")
    queued()
    follower.thread.join(WAIT)
    assert not follower.thread.is_alive()
    assert follower.text().count("==> ended: ") == 3 and follower.text().endswith("==> ended: eleven is done\n")


def test_following_what_was_started_by_hand(run: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pipeline.train.run.lock import Lock\n"
        "run = Path(sys.argv[1])\nlock = Lock.take(run)\nprint(flush=True)\nsys.stdin.readline()\nlock.release()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        log = run / "rank-0001.log"
        log.write_text("one\n")
        console = Console(file=io.StringIO())
        part = _by_hand(run)
        follower = threading.Thread(target=follow_logs, args=(run, part, 1, Tail(log), console), daemon=True)
        follower.start()
        with log.open("a") as file:
            file.write("two\n")
        holder.stdin.close()
        follower.join(WAIT)
        assert not follower.is_alive()
        assert console.file.getvalue() == "one\ntwo\n==> the training has ended\n"  # type: ignore[attr-defined]
    finally:
        holder.kill()
        holder.wait()


def _by_hand(run: Path) -> Any:
    attempted(run, 1, None)
    (part,) = parts(run)
    assert part.launch is None
    return part


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small ones, so that lines lie across them."""
    monkeypatch.setattr("slurm.record.tail._BLOCK", 7)
    yield


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("text", ["", "a", "a\n", "\n", "\n\n", "one\ntwo two two two\nthree", "x" * 50 + "\n\ny\n"])
def test_last_lines(tmp_path: Path, text: str) -> None:
    file = tmp_path / "log"
    file.write_text(text)
    everything = text.removesuffix("\n").split("\n") if text else []
    for lines in range(6):
        assert last_lines(file, lines) == (everything[-lines:] if lines else everything)
    assert last_lines(tmp_path / "none", 3) == []


def test_a_log_that_is_replaced_vanishes_or_shrinks(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file, 1)
    assert tail.read() == ""
    file.write_text("one\ntwo\n")
    assert tail.read() == "two\n"
    file.unlink()
    assert tail.read() == ""
    file.write_text("new one\n")
    assert tail.read() == "new one\n"
    file.write_text("cut\n")
    assert tail.read() == "cut\n"
    tail.close()
