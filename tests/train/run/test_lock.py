"""Who may write in a run folder: the lock, when it is taken over, and what its loser learns."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.common import file_lock, process_identity, storage
from pipeline.common.errors import MachineError, UserError
from pipeline.common.slurm_commands import whether_runs
from pipeline.train.run import lock as lock_module
from pipeline.train.run import lock_holder
from pipeline.train.run.folder import open_run
from pipeline.train.run.heartbeat import beat_file
from pipeline.train.run.lock import Lock, is_held
from tests.common.test_file_lock import held

BEGIN = 'folder.begin(0, layout={}, config="")'
"""From then on an attempt counts."""


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)


def held_by(run: Path, **fields: Any) -> Path:
    """A lock as another process has left it."""
    run.mkdir(exist_ok=True)
    (run / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1, **fields}))
    return run


def may_open(run: Path) -> bool:
    try:
        with open_run(run):
            return True
    except UserError as error:
        assert "in use by" in str(error)
        return False


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of the name `scontrol` first in PATH, with a given body for a question about a job."""

    def put(body: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "scontrol"
        config = "echo NEXT_JOB_ID = 100; exit 0"
        program.write_text(f'#!/bin/sh\n[ "$2" = config ] && {{ {config}; }}\necho "$@" > {folder}/asked\n{body}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return put


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    with open_run(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"), open_run(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from pipeline.train.run.folder import open_run\n"
        f"with open_run(Path({str(tmp_path)!r})) as folder:\n"
        f"    {BEGIN}; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (tmp_path / "lock").exists()
    with open_run(tmp_path) as folder:
        assert folder.attempt == 2


def test_a_killed_process_that_nobody_has_waited_for_does_not_hold_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from pipeline.train.run.folder import open_run\n"
        f"with open_run(Path({str(tmp_path)!r})) as folder:\n"
        f"    {BEGIN}; os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.Popen([sys.executable, "-c", script])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with open_run(tmp_path) as folder:
        assert folder.attempt == 2
    assert child.wait() == -9


def test_a_lock_from_another_host_is_respected(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
    with pytest.raises(UserError, match="process 1 on elsewhere"), open_run(tmp_path):
        pass


def test_a_pid_that_was_given_to_another_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(orjson.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": 1}))
    with open_run(tmp_path) as folder:
        assert folder.attempt == 1


@pytest.mark.guard
def test_only_one_of_many_takes_over_a_stale_lock(tmp_path: Path) -> None:
    """All start at once on the lock of a dead process; each that gets it says so, and keeps it for a while."""
    script = f"""
import sys, time
from pathlib import Path
from pipeline.train.run.folder import open_run
from tests.common.test_file_lock import held
while time.time() < float(sys.argv[1]):
    pass
with open_run(Path({str(tmp_path)!r})) as folder:
    {BEGIN}
    Path({str(tmp_path)!r}, f"held-{{folder.attempt}}").touch(exist_ok=False)
    time.sleep(1)
"""
    (tmp_path / "lock").write_bytes(orjson.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": 1}))
    start = str(time.time() + 3)
    processes = [subprocess.Popen([sys.executable, "-c", script, start], stderr=subprocess.DEVNULL) for _ in range(4)]
    codes = [process.wait() for process in processes]
    assert codes.count(0) == len(list(tmp_path.glob("held-*"))) >= 1
    # Whoever came while it was held was refused: had two held it at once, they would have counted one attempt.
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_was_taken_over_is_noticed(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.assert_mine()
        (tmp_path / "lock").write_bytes(orjson.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
        with pytest.raises(MachineError, match="taken over"):
            folder.assert_mine()
    assert (tmp_path / "lock").exists()  # it is the other's


def test_the_refusal_says_who_holds_it_since_when_and_its_last_sign_of_life(tmp_path: Path) -> None:
    since = time.mktime((2026, 1, 31, 18, 0, 5, 0, 0, -1))
    held_by(tmp_path, job="77", since=since, attempt=3)
    beat_file(tmp_path, 0).parent.mkdir()
    beat = {"rank": 0, "host": "elsewhere", "pid": 1, "attempt": 3, "step": 57, "phase": "step", "time": since + 60}
    beat_file(tmp_path, 0).write_bytes(orjson.dumps(beat))
    with pytest.raises(UserError) as refused, open_run(tmp_path):
        pass
    text = str(refused.value)
    for part in (
        "process 1 on elsewhere of job 77, attempt 3",
        "since 2026-01-31 18:00:05",
        "last sign of life was at 2026-01-31 18:01:05, at step 57 (phase step)",
        f"touch {tmp_path / 'stop'}",
        "--take-over",
    ):
        assert part in text
    assert refused.value.exit_code == 2


def test_the_lock_says_what_tells_its_holder_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with open_run(tmp_path) as folder:
        said = orjson.loads((tmp_path / "lock").read_bytes())
        assert folder.attempt == said["attempt"] == 1
    assert (said["job"], said["restarts"], said["host"], said["pid"]) == ("77", 2, socket.gethostname(), os.getpid())
    # proc(5): field 22, counted from the one after the name in parentheses, which is the third.
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert said["started"] == int(stat[22 - 3])


@pytest.mark.parametrize(("theirs", "mine", "free"), [(0, 1, True), (1, 3, True), (1, 1, False), (2, 1, False)])
def test_a_job_that_the_scheduler_started_again_takes_its_own_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: int, mine: int, free: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(mine))
    assert may_open(held_by(tmp_path / "run", job="77", restarts=theirs, cluster=None)) is free


def test_a_process_that_runs_here_holds_the_lock_though_its_job_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with subprocess.Popen(["sleep", "60"]) as child:
        found = process_identity.process(child.pid)
        assert found is not None
        run = held_by(
            tmp_path / "run", host=socket.gethostname(), pid=child.pid, started=found[1], job="77", restarts=0
        )
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert not may_open(run)
        child.kill()
        child.wait()
        assert may_open(run)


@pytest.mark.parametrize(
    ("body", "free"),
    [
        ("echo JobState=RUNNING", False),
        ("echo JobState=COMPLETING", False),
        ("echo JobState=SUSPENDED", False),
        ("echo JobState=RUNNING; echo JobState=PENDING", False),
        ("echo JobState=PENDING", True),
        ("echo JobState=NODE_FAIL", True),
        ("exit 0", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", False),
        pytest.param("sleep 5; echo JobState=COMPLETED", False, marks=pytest.mark.guard),
    ],
)
def test_a_job_that_the_scheduler_no_longer_runs_does_not_hold_the_lock(
    tmp_path: Path, scheduler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, body: str, free: bool
) -> None:
    monkeypatch.setattr(lock_holder, "whether_runs", partial(whether_runs, seconds=2.0))
    scheduler(body)
    run = held_by(tmp_path / "run", job="77", restarts=0, cluster=None, uid=os.getuid())
    assert may_open(run) is free
    assert "77" in (tmp_path / "bin" / "asked").read_text().split()


def test_without_a_scheduler_nothing_is_known_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not may_open(held_by(tmp_path / "run", job="77", restarts=0))


def test_the_scheduler_of_another_cluster_is_not_asked(
    tmp_path: Path, scheduler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler("exit 0")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    assert not may_open(held_by(tmp_path / "run", job="77", restarts=0, cluster="there"))
    assert not (tmp_path / "bin" / "asked").exists()
    assert may_open(held_by(tmp_path / "run", job="77", restarts=0, cluster="here", uid=os.getuid()))


def test_a_machine_that_was_started_anew_holds_nothing_and_another_container_may(tmp_path: Path) -> None:
    here = {"host": socket.gethostname(), "boot": process_identity.boot(), "namespace": process_identity.namespace()}
    assert may_open(held_by(tmp_path / "boot", **{**here, "boot": "another"}))
    assert not may_open(held_by(tmp_path / "space", **{**here, "namespace": "pid:[1]"}))
    assert may_open(held_by(tmp_path / "gone", **here))


def test_what_another_attempt_has_written_is_left_alone_by_the_loser(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.begin(0, layout={"dp": 1}, config="")
        ledger = (tmp_path / "ledger.jsonl").read_bytes()
        held_by(tmp_path)
        (tmp_path / "exit.json").write_text("of the other one")
    assert (tmp_path / "exit.json").read_text() == "of the other one"
    assert (tmp_path / "ledger.jsonl").read_bytes() == ledger


def test_a_lock_that_somebody_removed_is_noticed(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        (tmp_path / "lock").unlink()
        with pytest.raises(MachineError, match="lock was removed"):
            folder.assert_mine()


def test_going_on_as_the_next_attempt_keeps_the_lock(tmp_path: Path) -> None:
    with open_run(tmp_path) as folder:
        folder.begin(0, layout={}, config="")
        folder.next_attempt(write=True)
        folder.assert_mine()
        assert folder.attempt == 2
        assert orjson.loads((tmp_path / "lock").read_bytes())["attempt"] == 2
        held_by(tmp_path)
        with pytest.raises(MachineError, match="taken over by process 1 on elsewhere"):
            folder.next_attempt(write=True)
    assert (tmp_path / "attempt").read_text() == "2\n"


def test_a_report_knows_whether_a_run_is_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with open_run(tmp_path):
        assert is_held(tmp_path)
    held_by(tmp_path)
    assert is_held(tmp_path), "it may be"
    held_by(tmp_path, host=socket.gethostname())
    assert not is_held(tmp_path)


@contextmanager
def no_guard(lock: Path) -> Iterator[None]:
    """A file system without flock between its nodes."""
    yield


def take_one(run: Path, start: float, chance: int) -> None:
    """A process that takes the lock of a run as soon as it can, and notes when it had it."""
    lock_module._guard = no_guard  # type: ignore[assignment]
    time.sleep(max(0.0, start - time.time()) + (chance % 7) * 2e-4)
    try:
        lock = Lock.take(run)
    except UserError:
        return
    begin = time.monotonic()
    time.sleep(0.3)
    if not lock.is_mine():
        return  # it has lost it, and would learn so at its next commit
    storage.put_json(run / f"held-{os.getpid()}", [begin, time.monotonic()])
    os._exit(0)  # the lock stays, of a process that is gone


@pytest.mark.guard
@pytest.mark.parametrize("stale", [True, False])
def test_where_the_file_system_has_no_flock_two_never_both_keep_the_lock(tmp_path: Path, stale: bool) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(5):
        run = tmp_path / str(number)
        run.mkdir()
        if stale:
            held_by(run, host=socket.gethostname())
        start = time.time() + 0.2
        processes = [context.Process(target=take_one, args=(run, start, 3 * number + each)) for each in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        times = sorted(orjson.loads(path.read_bytes()) for path in run.glob("held-*"))
        assert times, "somebody gets it"
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))


def test_the_second_of_two_processes_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from pipeline.train.run.folder import open_run\n"
        f"with open_run(Path({str(tmp_path)!r})) as folder:\n"
        f"    {BEGIN}; print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        who = f"process {process.pid} on {socket.gethostname()}, attempt 1 \\(it runs\\)"
        with pytest.raises(UserError, match=who), open_run(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
    with open_run(tmp_path) as folder:
        assert folder.attempt == 2


def test_a_guard_that_is_held_does_not_block_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "SECONDS", 0.0)
    with held(tmp_path / "lock.guard") as pid:
        with pytest.raises(MachineError, match=f"lock.guard is locked by process {pid} "), open_run(tmp_path):
            pass
        assert "lock.guard is locked by" in (lock_module.clear(tmp_path, "77") or "")
    with ExitStack() as stack:
        with open_run(tmp_path) as folder:
            folder.begin(0, layout={}, config="")
            stack.enter_context(held(tmp_path / "lock.guard"))
        assert not (tmp_path / "lock").exists()
    with open_run(tmp_path) as folder:
        assert folder.attempt == 2
