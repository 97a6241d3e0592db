"""What failed first in a launch, told from records of ranks and the very lines that srun 22.05 wrote."""

import signal
from pathlib import Path

import pytest

from pipeline.common.errors import EXIT_HANG, EXIT_REFUSED, EXIT_STOPPED, HangError, RankFailed, Stopped, UserError
from pipeline.train.distributed.rank import NODE_ERRORS, record_error
from slurm.record import failure_analysis
from slurm.record.drill_record import DrillRecord
from slurm.record.failure_analysis import Failure, first_failure, gather_errors, interrupted, stopped
from slurm.record.rank_logs import node_errors

NODES = ["n1", "n2"]
KILLED = """\
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: n2: task 2: Terminated
srun: error: n1: tasks 0-1: Terminated
srun: Force Terminated StepId=1.0
"""
FOUND_LATE = """\
srun: error: n2: task 2: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=18.0
srun: error: n2: task 3: Killed
srun: error: n1: task 1: Exited with exit code 1
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=18.0
"""
SEGMENTATION_FAULT = KILLED.replace("task 3: Killed", "task 3: Segmentation fault")
ABORTED = KILLED.replace("task 3: Killed", "task 3: Aborted (core dumped)")
EXITED = """\
srun: error: n1: task 1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.3
srun: error: n1: task 0: Terminated
srun: error: n2: tasks 2-3: Terminated
srun: Force Terminated StepId=1.3
"""
STOPPED = """\
srun: error: n1: tasks 0-1: Exited with exit code 75
srun: launch/slurm: _step_signal: Terminating StepId=1.5
srun: error: n2: tasks 2-3: Exited with exit code 75
"""
ANNOUNCED = """\
srun: error: n1: task 0: User defined signal 2
srun: launch/slurm: _step_signal: Terminating StepId=1.5
srun: error: n2: tasks 2-3: Exited with exit code 140
srun: error: n1: task 1: Exited with exit code 75
"""
NO_PROGRAM = STOPPED.replace("75", "2")
WAITED = """\
srun: error: n1: task 1: Exited with exit code 3
srun: First task exited 3s ago
srun: StepId=1.9 tasks 0,2-3: running
srun: StepId=1.9 task 1: exited abnormally
srun: launch/slurm: _step_signal: Terminating StepId=1.9
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: n1: task 0: Killed
srun: error: n2: tasks 2-3: Killed
"""
NODE_LOST = """\
srun: error: Node failure on n2
srun: error: n1: tasks 0-1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=6.0
srun: Force Terminated StepId=6.0
"""
CANCELLED = """\
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: got SIGCONT
srun: forcing job termination
srun: error: n2: tasks 2-3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=4.0
srun: error: n1: tasks 0-1: Killed
"""
TIME_LIMIT = "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-21T02:54:30 DUE TO TIME LIMIT ***\n"
AFTERMATH = "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-21T02:51:26 ***\n"
NOT_STARTED = "srun: error: task 0 launch failed: Slurmd could not connect IO\n"
NO_STEP = "srun: error: Unable to create step for job 1: Requested node configuration is not available\n"


class Clock:
    """The time at which records are written: a second after one another."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Let a rank write down an error, as it does when it ends."""
    monkeypatch.setattr("pipeline.train.distributed.rank.time", Clock())

    def fail(rank: int, error: BaseException) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"rank-{rank:04d}.error.json"))
        monkeypatch.setenv("RANK", str(rank))
        record_error(error)

    return fail


def found(logs: Path, srun: str = "") -> Failure:
    failure = first_failure(logs, NODES, 2, srun)
    assert failure is not None
    return failure


def lost_connection() -> RuntimeError:
    return RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")


def test_nothing_failed(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    assert first_failure(tmp_path, NODES, 2) is None
    assert first_failure(tmp_path / "not there", NODES, 2) is None
    assert not stopped(tmp_path)
    assert first_failure(tmp_path, NODES, 2, STOPPED) is None, "that is how srun tells a stop"
    for rank in range(4):
        fail(rank, Stopped("a checkpoint of step 5 was saved"))
    assert first_failure(tmp_path, NODES, 2, STOPPED) is None
    assert stopped(tmp_path)
    assert first_failure(tmp_path, NODES, 2, STOPPED + CANCELLED) is None, "what hung at its end is not looked at"


def test_a_drill_is_the_reason_for_what_it_killed_alone(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    DrillRecord("rank", "77", "n2", (3,), 30, 1005.0).write(tmp_path)
    failure = found(tmp_path, KILLED)
    assert (failure.rank, failure.node, failure.signal) == (3, "n2", "SIGKILL")
    assert failure.message.startswith("was killed by `pipeline drill` at ") and "after step 30" in failure.message
    assert "memory" not in failure.message
    assert "drill" not in found(tmp_path, KILLED.replace("task 3", "task 1")).words, "another rank was killed"
    assert "drill" not in found(tmp_path, NODE_LOST).words
    fail(1, lost_connection())
    assert found(tmp_path, KILLED).rank == 3, "that followed from it"
    fail(0, RuntimeError("before it"))
    assert found(tmp_path, KILLED).rank == 0


def test_a_drill_kills_the_only_process_of_this_machine(tmp_path: Path) -> None:
    assert first_failure(tmp_path, (), 1) is None
    DrillRecord("rank", "77", "here", (0,), 30, 1.0).write(tmp_path)
    failure = first_failure(tmp_path, (), 1)
    assert failure is not None and "pipeline drill" in failure.words


@pytest.mark.parametrize("told", ["received SIGTERM before", "SIGTERM came before"], ids=["now", "0.1"])
def test_stops_that_came_of_a_failure_are_none(tmp_path: Path, fail, told: str) -> None:  # type: ignore[no-untyped-def]
    """Else a job whose ranks never find each other would go back into the queue for ever, and count no crash."""
    fail(0, lost_connection())
    for rank in (1, 2, 3):
        fail(rank, Stopped(f"{told} training began"))
    failure = found(tmp_path, EXITED.replace("task 1", "task 0"))
    assert (failure.rank, failure.code) == (0, 1) and not stopped(tmp_path)
    (tmp_path / "rank-0002.error.json").unlink()
    fail(2, Stopped("received SIGUSR2 before training began"))
    assert first_failure(tmp_path, NODES, 2) is None and stopped(tmp_path), "which srun does not send"
    for rank in range(4):
        (tmp_path / f"rank-000{rank}.error.json").unlink()
    fail(1, Stopped(f"{told} training began"))
    fail(0, lost_connection())
    assert first_failure(tmp_path, NODES, 2) is None and stopped(tmp_path), "it was the first"


def test_a_signal_ahead_of_the_end_before_a_rank_listens_is_a_stop(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    assert first_failure(tmp_path, NODES, 2, ANNOUNCED) is None
    assert stopped(tmp_path, ANNOUNCED)
    fail(1, Stopped("received SIGUSR2 before training began"))
    assert first_failure(tmp_path, NODES, 2, ANNOUNCED) is None
    assert stopped(tmp_path, ANNOUNCED)
    fail(3, ValueError("no"))
    assert found(tmp_path, ANNOUNCED).rank == 3 and not stopped(tmp_path, ANNOUNCED)


def test_ranks_that_leave_because_a_node_is_lost(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    for rank in range(2):
        fail(rank, Stopped("received SIGTERM before training began"))
    assert found(tmp_path, NODE_LOST).message == "node n2 was lost"


def test_a_step_that_was_told_to_end(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    """What its processes found till then says nothing."""
    unhealthy = "srun: error: n1: task 0: Exited with exit code 78\n"
    assert not interrupted(tmp_path, unhealthy + "srun: error: n2: task 1: Killed\n")
    for how in ("User defined signal 2", "Terminated"):
        assert interrupted(tmp_path, unhealthy + f"srun: error: n2: task 1: {how}\n")
    fail(1, Stopped("received SIGUSR2 before the check of this node ended"))
    assert interrupted(tmp_path, unhealthy)


def test_the_first_of_those_that_say_why(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    fail(0, lost_connection())
    fail(3, KeyError("what"))
    fail(2, RankFailed("rank 3 failed", 1))
    fail(1, ValueError("later"))
    failure = found(tmp_path, EXITED)
    assert (failure.rank, failure.node, failure.code, failure.signal) == (3, "n2", 1, None)
    assert failure.message == "KeyError: 'what'"
    assert failure.details.startswith("KeyError: 'what'"), "its traceback"
    assert failure.time == 1002
    assert not stopped(tmp_path)


def test_ranks_that_are_told_to_end_because_one_was_killed(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    """As before training begins, when nobody waits for the one that was killed and so nobody fails by it."""
    for rank in (0, 2, 3):
        fail(rank, Stopped("received SIGTERM; what was committed is kept"))
    killed = "srun: error: n1: task 1: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
    failure = found(tmp_path, killed + "srun: error: n1: task 0: Killed\nsrun: error: n2: tasks 2-3: Killed\n")
    assert (failure.rank, failure.signal) == (1, "SIGKILL")


def test_a_rank_that_is_killed_while_the_others_start(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    """Another one loses it first, and srun tells the first one to end, which is a stop to it."""
    fail(3, lost_connection())
    fail(0, Stopped("received SIGTERM; what was committed is kept; run the same command again to resume"))
    fail(2, lost_connection())
    srun = (
        "srun: error: n2: task 3: Exited with exit code 1\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
    )
    srun += "srun: error: n1: task 1: Killed\nsrun: error: n2: task 2: Exited with exit code 1\n"
    failure = found(tmp_path, srun + "srun: error: n1: task 0: Killed\nsrun: Force Terminated StepId=1.0\n")
    assert (failure.rank, failure.signal) == (1, "SIGKILL") and not stopped(tmp_path, srun)


def test_only_consequences_are_better_than_nothing(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    fail(2, lost_connection())
    fail(0, lost_connection())
    assert found(tmp_path).rank == 0, "of those that say the same"
    fail(1, Stopped("saved"))
    assert first_failure(tmp_path, NODES, 2) is None, "ranks that leave are lost by those that are yet to leave"
    fail(3, UserError("dataset sea is damaged:\n  part 3"))
    failure = found(tmp_path)
    assert (failure.rank, failure.code, failure.message) == (3, EXIT_REFUSED, "dataset sea is damaged:")
    assert failure.details == "  part 3"


def test_the_one_that_could_not_say_why_where_the_others_lost_it(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    """Killed from outside, but srun noticed another one first."""
    for rank in (2, 0, 1):
        fail(rank, lost_connection())
    failure = first_failure(tmp_path, NODES, 2, FOUND_LATE)
    assert failure is not None
    assert (failure.rank, failure.node, failure.signal) == (3, "n2", "SIGKILL")


def test_a_hang_names_the_guilty_and_rank_0_speaks_for_all(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    said = "nothing for 60 s in a step: rank 3 on n2 (process 7) is in no collective, but at data.py:12"
    for rank in (2, 0, 1):
        fail(rank, HangError(said))
    failure = found(tmp_path, STOPPED.replace("75", "76"))
    assert (failure.rank, failure.code, failure.message) == (0, EXIT_HANG, said)


@pytest.mark.parametrize(
    ("srun", "name", "words"),
    [
        (KILLED, "SIGKILL", "most likely the kernel"),
        (SEGMENTATION_FAULT, "SIGSEGV", "was killed by SIGSEGV"),
        (ABORTED, "SIGABRT", "was killed by SIGABRT"),
        (KILLED.replace("Killed", "Out Of Memory"), "SIGKILL", "mem_gb"),
        (KILLED.replace("Killed", "Exited with exit code 137"), "SIGKILL", "was killed by SIGKILL"),
        (KILLED.replace("Killed", "Bus error"), "SIGBUS", "was killed by SIGBUS"),
    ],
)
def test_one_that_could_not_say_why(tmp_path: Path, fail, srun: str, name: str, words: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "rank-0003.log").write_text("".join(f"line {line}\n" for line in range(100)))
    (tmp_path / "rank-0000.log").write_text(AFTERMATH)
    fail(1, lost_connection())
    failure = found(tmp_path, srun)
    assert (failure.rank, failure.node, failure.code, failure.signal) == (3, "n2", 1, name)
    assert words in failure.message
    assert failure.details.split("\n") == [f"line {line}" for line in range(80, 100)]


def test_ranks_of_a_node_share_a_file(tmp_path: Path, fail, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """As `slurm.job.srun_task` lets them; when the launch has ended one file has all of them."""
    for rank, error in ((0, lost_connection()), (1, lost_connection()), (3, KeyError("\udcff")), (3, KeyError("more"))):
        monkeypatch.setenv(NODE_ERRORS, str(node_errors(tmp_path, rank // 2)))
        fail(rank, error)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["node-0000.errors.jsonl", "node-0001.errors.jsonl"]
    with node_errors(tmp_path, 1).open("a") as file:
        file.write('{"rank": 2, "mess')  # a full disk
    monkeypatch.setenv(NODE_ERRORS, str(node_errors(tmp_path, 1)))
    fail(2, Stopped("as it was told"))
    (tmp_path / "rank-0000.log").write_text("step 1\n")
    (tmp_path / "node-0001.log").write_text("2: a\n3: b\n" * 30 + "2: last\n")
    for _ in range(2):
        failure = found(tmp_path, EXITED)
        assert (failure.rank, failure.node, failure.message) == (3, "n2", "KeyError: '\\udcff'")
        gather_errors(tmp_path)
    assert [file.name for file in tmp_path.glob("*errors*")] == ["errors.jsonl"]
    (tmp_path / "errors.jsonl").unlink()
    assert found(tmp_path, KILLED).details.split("\n") == ["b"] * 20, "the lines of this rank"
    (tmp_path / "node-0000.log").write_text(f"0: {TIME_LIMIT}1: more\n")
    assert "time limit" in found(tmp_path, CANCELLED).message
    (tmp_path / "node-0000.log").write_text(
        "0: slurmstepd-n1: error: execve(): /no/python: No such file or directory\n"
    )
    assert found(tmp_path, NO_PROGRAM).message == "was not started: /no/python: No such file or directory"


def test_aftermath_of_one_that_did(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    fail(1, ValueError("bad"))
    for srun in (EXITED, WAITED, EXITED.replace("Terminated\n", "Segmentation fault\n"), ABORTED + EXITED):
        assert found(tmp_path, srun).message == "ValueError: bad"
    assert found(tmp_path, SEGMENTATION_FAULT + EXITED).rank == 3, "it was before the other one"


def test_exit_codes_without_a_word(tmp_path: Path) -> None:
    failure = found(tmp_path, WAITED)
    assert (failure.rank, failure.code) == (1, 3)
    assert "exit code 3" in failure.message
    assert found(tmp_path, NO_PROGRAM).code == EXIT_REFUSED
    (tmp_path / "rank-0000.log").write_text("slurmstepd-n1: error: execve(): /no/python: No such file or directory\n")
    failure = found(tmp_path, NO_PROGRAM)
    assert failure.code == 1, "another node may have it"
    assert "/no/python" in failure.message
    (tmp_path / "rank-0000.log").unlink()
    assert found(tmp_path, "srun: error: n[1-2]: tasks 0-3: Exited with exit code 76\n").code == EXIT_HANG


def test_a_lost_node(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    failure = found(tmp_path, NODE_LOST)
    assert (failure.rank, failure.node, failure.lost_nodes, failure.code) == (None, "n2", ("n2",), 1)
    fail(0, lost_connection())
    assert found(tmp_path, NODE_LOST + ABORTED.replace("task 3", "task 1")).message == "node n2 was lost"
    fail(1, KeyError("before that"))
    failure = found(tmp_path, NODE_LOST)
    assert (failure.rank, failure.node, failure.lost_nodes) == (1, "n1", ("n2",))
    several = first_failure(tmp_path / "none", ["a08", "a09", "a10", "b"], 1, "srun: error: Node failure on a[09-10],b")
    assert several is not None
    assert several.lost_nodes == ("a09", "a10", "b")


def test_the_step_as_a_whole(tmp_path: Path, fail) -> None:  # type: ignore[no-untyped-def]
    failure = found(tmp_path, CANCELLED)
    assert (failure.rank, failure.node, failure.code) == (None, None, 1)
    assert "scancel" in failure.message
    (tmp_path / "rank-0000.log").write_text(f"step 3\n{TIME_LIMIT}")
    assert "time limit" in found(tmp_path, CANCELLED).message
    fail(2, lost_connection())
    assert "time limit" in found(tmp_path, CANCELLED).message
    for rank in (0, 1):
        fail(rank, Stopped("saved"))
    assert first_failure(tmp_path, NODES, 2, CANCELLED) is None


def test_what_never_ran(tmp_path: Path) -> None:
    failure = found(tmp_path, NOT_STARTED)
    assert (failure.rank, failure.node) == (0, "n1")
    assert failure.message == "was not started: Slurmd could not connect IO"
    failure = found(tmp_path, NO_STEP)
    assert failure.rank is None
    assert failure.message.startswith("srun: Unable to create step")


def test_names_of_signals() -> None:
    assert failure_analysis._SIGNALS["Segmentation fault"] == signal.SIGSEGV
    assert EXIT_STOPPED not in {abs(number) for number in failure_analysis._SIGNALS.values()}
