"""Worker processes: what they answer, how they end, and what is known of one that dies."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from multiprocessing.context import ForkProcess, SpawnProcess

import pytest

from pipeline.data.work import worker_pool as workers_module
from pipeline.data.work.worker_pool import Advanced, Died, Done, Failed, Lost, Silent, Workers


@pytest.fixture(params=[ForkProcess, SpawnProcess], ids=["forked", "spawned"], autouse=True)
def kind(request, monkeypatch):
    """Both kinds of processes, whatever threads the tests have. The class of a process."""
    monkeypatch.setattr(workers_module, "can_fork", lambda: request.param is ForkProcess)
    return request.param


def make_doubler(base):
    return lambda job, progress: doubled(job, progress, base)


def doubled(job, progress, base):
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "abort":
        os.abort()
    if job == "half":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        # The length of a message, as `multiprocessing` writes it, and some of the message.
        os.write(_pipe().fileno(), (100_000).to_bytes(4, "big") + b"x" * 1000)
        time.sleep(60)
    if job == "advance and leave":
        progress(5)
        progress(2)
        os._exit(3)
    if job == "leave":
        os._exit(3)
    if job == "reset":
        raise ConnectionResetError(104, "Connection reset by peer", "hf://datasets/some/shard")
    if job == "hang":
        _pipe().close()
        time.sleep(60)
    if job == "endless":
        while True:
            with contextlib.suppress(Exception):  # a job may take errors for its own
                progress(1)
    if job == "fail":
        raise OSError(28, "No space left on device", "somewhere")
    progress(1)
    return base + 2 * job


def _pipe():
    """The worker's end of the pipe."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_serve":
        frame = frame.f_back
    return frame.f_locals["connection"]


def results(events):
    return sorted((event.job, event.result) for event in events if isinstance(event, Done))


def test_results_and_progress():
    with Workers(make_doubler, (100,), 3) as workers:
        events = list(workers.run(list(range(20))))
    assert results(events) == [(job, 100 + 2 * job) for job in range(20)]
    advanced = [event for event in events if isinstance(event, Advanced)]
    assert sorted(event.job for event in advanced) == list(range(20))
    assert sum(event.amount for event in advanced) == 20
    assert len(events) == 40


@pytest.mark.first(2)
@pytest.mark.parametrize(("job", "how"), [("die", "SIGKILL"), ("leave", "exit code 3"), ("abort", "SIGABRT")])
def test_a_death_is_reported_and_the_others_go_on(job, how):
    with Workers(make_doubler, (0,), 2) as workers:
        events = list(workers.run([1, 2, job, 3, 4, job, 5]))
        assert len(workers._processes) == 2
        died = [event for event in events if isinstance(event, Died)]
        assert [event.job for event in died] == [job, job]
        assert all(f"died by {how}" in event.how for event in died)
        assert ("memory" in died[0].how) == (how == "SIGKILL")
        assert results(events) == [(n, 2 * n) for n in range(1, 6)]
        assert results(workers.run([6])) == [(6, 12)]


def test_a_worker_killed_inside_of_an_answer():
    """Half of a long answer has come."""
    with Workers(make_doubler, (0,), 1) as workers:
        events = list(workers.run(["half", 1]))
    assert [event.job for event in events if isinstance(event, Died)] == ["half"]
    assert results(events) == [(1, 2)]


def test_an_idle_worker_that_dies():
    with Workers(make_doubler, (0,), 1) as workers:
        assert results(workers.run([1])) == [(1, 2)]
        (process,) = workers._processes.values()
        process.kill()
        process.join()
        events = list(workers.run([2, 3]))
        assert [event.job for event in events if isinstance(event, Died)] == [2]
        assert results(events) == [(3, 6)]


def test_a_job_that_is_added_while_others_run():
    with Workers(make_doubler, (0,), 2) as workers:
        found = []
        for event in workers.run(["die", 1]):
            found.append(event)
            if isinstance(event, Died):
                workers.add(7)
        assert results(found) == [(1, 2), (7, 14)]


def test_an_error_keeps_its_kind_and_path():
    with Workers(make_doubler, (0,), 1) as workers:
        failed, *_, done = workers.run(["fail", 1])
    assert isinstance(failed, Failed)
    assert (failed.error.errno, failed.error.filename) == (28, "somewhere")
    assert any("in a worker process, running fail" in note for note in failed.error.__notes__)
    assert done == Done(1, 2)


def test_a_connection_that_a_job_lost_is_an_error_of_the_job():
    """Of the network, say; the pipe to the parent is fine."""
    with Workers(make_doubler, (0,), 1) as workers:
        (process,) = workers._processes.values()
        failed, *_, done = workers.run(["reset", 1])
        assert isinstance(failed, Failed)
        assert type(failed.error) is ConnectionResetError
        assert failed.error.filename == "hf://datasets/some/shard"
        assert done == Done(1, 2)
        assert list(workers._processes.values()) == [process]


def test_a_worker_whose_parent_is_gone_leaves():
    with Workers(make_doubler, (0,), 1) as workers:
        next(workers.run(["endless"]))
        ((connection, process),) = workers._processes.items()
        connection.close()
        process.join(20)
        assert process.exitcode == 0
        del workers._processes[connection]


def test_a_worker_that_lost_its_pipe_and_lives_is_killed(monkeypatch):
    monkeypatch.setattr(workers_module, "_PATIENCE_S", 0.5)
    with Workers(make_doubler, (0,), 1) as workers:
        (process,) = workers._processes.values()
        events = list(workers.run(["hang", 1]))
        assert process.exitcode == -signal.SIGKILL
    (died,) = [event for event in events if isinstance(event, Died)]
    assert died.how == f"worker process {process.pid} closed its pipe, did not end within 0.5 s, and was killed"
    assert results(events) == [(1, 2)]


def test_an_interrupt_between_two_starts_is_not_lost(kind, monkeypatch):
    started = []
    real = kind.start

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        real(self)
        started.append(self)

    monkeypatch.setattr(kind, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(make_doubler, (0,), 2)
    assert len(started) == 2  # they are all known when it comes, so that all of them are ended
    assert all(process.exitcode is not None for process in started)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_workers_leave_interrupts_to_the_parent():
    with Workers(make_doubler, (0,), 2) as workers:
        for process in workers._processes.values():
            os.kill(process.pid, signal.SIGINT)
        assert len(results(workers.run(list(range(8))))) == 8
        for process in workers._processes.values():
            os.kill(process.pid, signal.SIGINT)
        assert len(results(workers.run(list(range(8))))) == 8


def make_teller():
    return lambda job, progress: {
        "handlers": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "sockets": {name for name in _open_files() if name.startswith("socket:")},
    }


def _open_files():
    names = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself is closed by now
            names.append(os.readlink(f"/proc/self/fd/{each}"))
    return names


def test_nothing_is_left_of_the_parent(kind, monkeypatch):
    """Its handlers, the signals that it blocked meanwhile, and its ends of the pipes of all workers."""
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    sockets = make_teller()("", None)["sockets"]
    try:
        with Workers(make_teller, (), 3) as workers:
            told = [event.result for event in workers.run(range(12)) if isinstance(event, Done)]
    finally:
        signal.signal(signal.SIGUSR2, before)
    for each in told:
        assert each["handlers"] == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_DFL]
        assert each["blocked"] == {signal.SIGINT}
        assert len(each["sockets"] - sockets) == 1, "a fork has those of pytest as well"
        assert kind is ForkProcess or len(each["sockets"]) == 1


def test_leaving_early_ends_the_processes():
    with Workers(make_doubler, (0,), 2) as workers:
        next(workers.run(list(range(1000))))
        processes = list(workers._processes.values())
    assert all(process.exitcode is not None for process in processes)


class TestInsisting:
    @pytest.mark.first(1)
    def test_a_job_is_run_again_three_times_at_most(self):
        with Workers(make_doubler, (0,), 2) as workers:
            events = list(workers.retry([1, "leave", 2, 3]))
        assert results(events) == [(1, 2), (2, 4), (3, 6)]
        lost = [event for event in events if isinstance(event, Lost)]
        assert [(event.job, event.attempt, event.is_last) for event in lost] == [
            ("leave", 1, False),
            ("leave", 2, False),
            ("leave", 3, True),
        ]
        assert all("died by exit code 3" in event.how for event in lost)
        assert str(lost[1]) == f"{lost[1].how} while it held leave; attempt 2 of 3"

    def test_what_was_advanced_is_taken_back(self):
        with Workers(make_doubler, (0,), 1) as workers:
            events = list(workers.retry(["advance and leave", 1]))
        amounts = [event.amount for event in events if isinstance(event, Advanced) and event.job != 1]
        assert amounts == [5, 2, -7] * 3
        (done,) = [event for event in events if isinstance(event, Done)]
        assert (done.job, done.advanced) == (1, 1)

    def test_errors(self):
        with Workers(make_doubler, (0,), 1) as workers:
            with pytest.raises(OSError, match="No space left on device"):
                list(workers.retry([1, "fail", 2]))
            events = list(workers.retry(["reset"], lambda error: isinstance(error, ConnectionError)))
            lost = [event for event in events if isinstance(event, Lost)]
            assert [event.attempt for event in lost] == [1, 2, 3]
            assert lost[0].how.startswith("ConnectionResetError: [Errno 104]")
            assert "in a worker process, running reset" in lost[0].details


def test_a_worker_that_is_stopped_is_told_of(monkeypatch):
    """When it has not been heard of for long, and again after twice as long; then it goes on."""
    monkeypatch.setattr(workers_module, "_LOOK_S", 0.001)
    clock = itertools.count(step=50.0)
    with Workers(make_doubler, (0,), 1, clock=lambda: next(clock)) as workers:
        assert results(workers.run([1])) == [(1, 2)]  # it is up
        (process,) = workers._processes.values()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        events = workers.retry([3])
        told = list(itertools.islice(events, 2))
        os.kill(process.pid, signal.SIGCONT)
        assert results(events) == [(3, 6)]
    assert [(event.job, event.seconds, event.is_stopped) for event in told] == [(3, 150.0, True), (3, 300.0, True)]
    assert str(told[0]).startswith(
        f"worker process {process.pid} has shown no sign of life for 150 s while it held 3; it is st"
    )


def test_a_quiet_worker_is_no_error(monkeypatch):
    monkeypatch.setattr(workers_module, "_LOOK_S", 0.001)
    clock = itertools.count(step=200.0)
    with Workers(make_doubler, (0,), 1, clock=lambda: next(clock)) as workers:
        events = list(workers.retry([1]))
    assert results(events) == [(1, 2)]
    assert not any(event.is_stopped for event in events if isinstance(event, Silent))
