from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import IO

import pytest

from pipeline.train.monitor.straggler import Stragglers, WallClock, WorkClock, summary


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.guard
def test_work_is_what_a_thread_does_itself() -> None:
    clock = WorkClock()
    spin(0.3)
    worked = clock.take()
    assert worked >= 0.3
    time.sleep(1)
    assert clock.take() < worked, "waiting is no work"
    assert clock.take() < worked, "each time since the last one"
    with clock.pause():
        spin(0.3)
    assert clock.take() < worked, "as a thread does that waits for a GPU"


def test_time_in_which_the_process_was_stopped_is_part_of_no_step() -> None:
    stopped = [100.0]
    clock = WallClock(lambda: stopped[0])
    assert clock.suspended() == {}
    stopped[0] += 1000
    assert clock.take() == 0.0 and clock.suspended() == {"suspended": 1000.0}
    time.sleep(0.05)
    assert clock.take() >= 0.05 and clock.suspended() == {}


def stopped(given: IO[str], said: IO[str]) -> float:
    """Answer of a process to a line."""
    given.write("\n")
    given.flush()
    return float(said.readline())


@pytest.mark.slow
def test_a_process_notices_that_it_was_stopped() -> None:
    code = """
import sys
from pipeline.config.run import TimeLimitsConfig
from pipeline.train.distributed.watchdog import Watchdog
with Watchdog(TimeLimitsConfig()) as watchdog:
    for _ in sys.stdin:
        print(watchdog.stopped(), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None and process.stdout is not None
        places = process.stdin, process.stdout
        assert stopped(*places) == 0.0
        process.send_signal(signal.SIGSTOP)
        time.sleep(8)
        process.send_signal(signal.SIGCONT)
        first = stopped(*places)
        assert first >= 6
        time.sleep(2)
        assert stopped(*places) == pytest.approx(first, abs=1.5), "each stop counts once"
        process.stdin.close()


def test_summary_of_the_ranks() -> None:
    assert summary([1.0]) == {}
    assert summary([1.0, 3.0]) == {"median": 1.0, "max": 3.0, "slowest": 1, "ratio": 3.0}
    assert summary([2.0, 5.0, 1.0]) == {"median": 2.0, "max": 5.0, "slowest": 1, "ratio": 2.5}
    assert summary([0.0, 0.0]) == {"median": 0.0, "max": 0.0, "slowest": 0, "ratio": 1.0}


def told(works: list[list[float]], seconds: float = 1.0) -> dict[int, str]:
    """What is said at which step, from 1."""
    stragglers = Stragglers(lambda rank: f"n{rank}")
    said = {step: stragglers.see(step, summary(work), seconds) for step, work in enumerate(works, start=1)}
    return {step: text for step, text in said.items() if text}


def test_a_rank_that_is_always_the_slowest_is_told_now_and_then() -> None:
    found = told([[0.2, 0.6, 0.2]] * 250)
    assert list(found) == [20, 120, 220]
    assert found[20].startswith("rank 1 on n1 works 3.0 times as long as the median rank")


@pytest.mark.parametrize(
    "works",
    [
        [[0.2, 0.6, 0.2]] * 19,
        [[0.2, 0.6, 0.2]] * 19 + [[0.2, 0.2, 0.2]] + [[0.2, 0.6, 0.2]] * 19,
        [[0.2, 0.6, 0.2], [0.2, 0.2, 0.6]] * 50,
        [[0.2, 0.29, 0.2]] * 50,
        [[0.01, 0.03, 0.01]] * 50,
    ],
    ids=["too few steps", "not in each step", "not the same rank", "not by much", "nobody waits for it"],
)
def test_what_is_no_straggler(works: list[list[float]]) -> None:
    assert told(works) == {}


def test_a_run_that_goes_back_is_told_again() -> None:
    stragglers = Stragglers(lambda rank: None)
    work = summary([0.2, 0.6])
    said = [step for step in [*range(100, 120), *range(10, 12)] if stragglers.see(step, work, 1.0)]
    assert said == [119, 10]
