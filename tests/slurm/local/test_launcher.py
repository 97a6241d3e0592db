"""Ranks that are started, watched and ended: real processes, with a stand-in for the training."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.common.errors import RankFailed, Stopped, UserError
from pipeline.config.load import load
from pipeline.train.distributed.rank import record_error
from pipeline.train.run.heartbeat import read_beats
from slurm.local import launcher
from slurm.local.launcher import _quiet, _raise_failure, _Ranks, check_devices
from tests.tiny import write_run
from tests.waiting import runs, until

pytestmark = pytest.mark.parallel

WAIT = 300.0
"""Seconds after which a test gives up; nothing takes that long."""


class Launched:
    """A command that runs, in a session of its own so that no signal of a test reaches the tests."""

    def __init__(self, root: Path, case: str, *overrides: str, command: tuple[str, ...] = ()) -> None:
        changes = {"launch.device": "cpu", "launch.processes": None if command else 3}
        self.run = root / "run"
        file = write_run(root, changes)
        environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        self.process = subprocess.Popen(
            [
                *(command or (sys.executable,)),
                "-m",
                "tests.train.distributed.launched",
                case,
                "train",
                str(file),
                *overrides,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )

    def pids(self, ranks: int = 3, folder: str = ".") -> list[int]:
        """Process ids of the ranks, when all have begun the case."""
        files = [self.run / folder / f"pid-{rank}" for rank in range(ranks)]
        until(lambda: all(file.exists() for file in files) or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return [int(file.read_text()) for file in files]

    def result(self) -> tuple[int, str, str]:
        """Exit code, output without the launcher's own first line, errors."""
        out, err = self.process.communicate(timeout=WAIT)
        first, _, rest = out.partition("\n")
        return self.process.returncode, rest if first.startswith("train: starting ") else out, err

    @property
    def logs(self) -> Path:
        (folder,) = (self.run / "logs").iterdir()
        return folder

    def ledger(self) -> list[tuple[str, int | None]]:
        lines = [json.loads(line) for line in (self.run / "ledger.jsonl").read_text().splitlines()]
        return [(line["event"], line.get("exit")) for line in lines]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    commands: list[Launched] = []

    def start(*arguments: str, command: tuple[str, ...] = ()) -> Launched:
        commands.append(Launched(tmp_path, *arguments, command=command))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()  # its ranks go with it
        command.process.communicate()


@pytest.mark.slow
def test_all_end_well(start: Callable[..., Launched]) -> None:
    launched = start("good")
    code, out, err = launched.result()
    assert (code, out, err) == (0, "out of rank 0\n", "err of rank 0\n"), "rank 0 has the terminal, and nobody else"
    assert sorted(path.name for path in launched.logs.iterdir()) == ["config.yaml", "rank-0001.log", "rank-0002.log"]
    for rank in (1, 2):
        log = (launched.logs / f"rank-{rank:04d}.log").read_text()
        assert log == f"out of rank {rank}\nerr of rank {rank}\n"
    assert launched.ledger() == [("start", None), ("end", 0)]


@pytest.mark.guard
def test_a_rank_that_raises_ends_all_and_is_told(start: Callable[..., Launched]) -> None:
    launched = start("raises")
    code, _, err = launched.result()
    assert code == 1
    assert "error: rank 1 of 3 failed: KeyError: 'what'" in err
    assert 'raise KeyError("what")' in err, "its traceback"
    assert str(launched.logs) in err
    assert err.count("Traceback") == 1, "not those of the ranks that lost it"
    assert launched.ledger() == [("start", None), ("end", 1)]
    state = json.loads((launched.run / "exit.json").read_text())
    assert state["code"] == 1
    assert "KeyError" in state["reason"], "not that rank 0 lost its connection"
    assert not any(runs(int((launched.run / f"pid-{rank}").read_text())) for rank in range(3))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) for c in ("mistake", "slow_mistake", "same_mistake")]
)
def test_what_rank_0_has_said_is_not_said_again(start: Callable[..., Launched], case: str) -> None:
    launched = start(case)
    code, out, err = launched.result()
    assert code == 2
    assert err.startswith("error: train.")
    assert err.count("\n") == 1
    assert out == ""
    assert launched.ledger() == [("start", None), ("end", 2)]


@pytest.mark.slow
def test_what_is_no_exception_is_told_too(start: Callable[..., Launched]) -> None:
    code, _, err = start("base_exception").result()
    assert code == 1
    assert "rank 1 of 3 failed: Odd: no Exception" in err


@pytest.mark.slow
def test_a_network_that_fails_is_told_with_a_traceback(start: Callable[..., Launched]) -> None:
    code, _, err = start("lost").result()
    assert code == 1
    assert "failed: RuntimeError: [gloo/transport" in err
    assert err.count("Traceback") == 1


@pytest.mark.slow
def test_a_killed_rank_ends_all(start: Callable[..., Launched]) -> None:
    launched = start("killed")
    code, _, err = launched.result()
    assert code == 1
    assert "rank 1 of 3 was killed by SIGKILL" in err
    assert "memory" in err
    assert "the last words" in err


@pytest.mark.slow
def test_a_rank_that_just_exits_is_told_with_the_end_of_its_log(start: Callable[..., Launched]) -> None:
    code, _, err = start("exits").result()
    assert code == 9
    assert "rank 1 of 3 ended with exit code 9" in err
    assert "a library gave up" in err


@pytest.mark.guard
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGINT)),
    ],
)
@pytest.mark.usefixtures("hangup")
def test_signals_stop_the_run_in_order(start: Callable[..., Launched], number: signal.Signals) -> None:
    launched = start("stop")
    launched.pids(folder="listening")
    launched.process.send_signal(number)
    code, _, err = launched.result()
    assert code == 75
    assert f"stopped: {number.name} at step" in err
    assert err.count("stopped: ") == 1
    assert (launched.run / "closed").exists(), "rank 0 had time to close"
    assert launched.ledger() == [("start", None), ("end", 75)]


@pytest.mark.slow
def test_who_asks_twice_does_not_kill_ranks_that_leave(start: Callable[..., Launched]) -> None:
    launched = start("stop")
    launched.pids(folder="listening")
    launched.process.send_signal(signal.SIGUSR2)
    until((launched.run / "closing").exists)
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.result()
    assert code == 75
    assert err.count("stopped: SIGUSR2 at step") == 1, err
    assert (launched.run / "closed").exists(), "rank 0 had time to close"
    assert json.loads((launched.logs / "rank-0001.error.json").read_text())["exit_code"] == 75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGTERM, 75, "stopped: received SIGTERM before training began"),
        (signal.SIGINT, 130, "interrupted: "),
    ],
)
def test_signal_before_the_ranks_listen(
    start: Callable[..., Launched], number: signal.Signals, code: int, message: str
) -> None:
    launched = start("early")
    pids = launched.pids()
    launched.process.send_signal(number)
    got, _, err = launched.result()
    assert got == code
    assert err.count(message) == 1
    assert "Traceback" not in err
    assert not any(map(runs, pids))


@pytest.mark.slow
def test_second_interrupt_ends_all_at_once(start: Callable[..., Launched]) -> None:
    launched = start("deaf")
    pids = launched.pids(folder="listening")
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.stderr is not None
    while "once more" not in launched.process.stderr.readline():
        pass
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.result()
    assert code == 130
    assert "interrupted: " in err
    assert json.loads((launched.run / "exit.json").read_text())["code"] == 130
    assert not any(map(runs, pids))


@pytest.mark.guard
def test_no_rank_outlives_a_killed_launcher(start: Callable[..., Launched]) -> None:
    launched = start("deaf")
    pids = launched.pids(folder="listening")
    launched.process.kill()
    until(lambda: not any(map(runs, pids)))


@pytest.mark.slow
def test_a_hang_ends_all_with_76_and_the_stacks(start: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "heartbeats").write_text("no heartbeat can be written")
    launched = start("hang", "launch.time_limits.step_seconds=2")
    code, _, err = launched.result()
    assert code == 76
    assert "no progress for" in err
    assert "launch.time_limits.step_seconds (2)" in err
    assert "a step (step 2)" in err
    log = (launched.logs / "rank-0001.log").read_text()
    assert "this_is_where_it_hangs" in log
    record = json.loads((launched.logs / "rank-0001.error.json").read_text())
    assert record["exit_code"] == 76
    assert "this_is_where_it_hangs" in record["traceback"]


@pytest.mark.slow
def test_one_process_alone_is_watched_too(start: Callable[..., Launched]) -> None:
    limits = ["launch.time_limits.step_seconds=1", "launch.time_limits.first_step_seconds=1"]
    launched = start("hang_alone", "launch.processes=1", *limits)
    code, _, err = launched.result()
    assert code == 76
    assert "hang: " in err
    assert "this_is_where_it_hangs" in err
    assert "The stacks of each rank" not in err, "there is but one"
    beat = read_beats(launched.run)[0]
    assert (beat.phase, beat.step) == ("hang", 1), "what the next attempt notes of this one"


@pytest.mark.guard
def test_under_torchrun(start: Callable[..., Launched]) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launched = start("good", command=command)
    code, out, err = launched.result()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert launched.ledger() == [("start", None), ("end", 0)], "rank 0 keeps it"
    assert not (launched.run / "logs").exists()


@pytest.mark.slow
def test_a_signal_to_a_rank_of_torchrun_before_it_listens_is_a_stop(start: Callable[..., Launched]) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launched = start("early", command=command)
    for pid in launched.pids(2):
        os.kill(pid, signal.SIGTERM)
    _, _, err = launched.result()
    assert err.count("stopped: SIGTERM came") >= 1, err
    assert launched.ledger() == [("start", None), ("end", 75)]


@pytest.mark.slow
def test_stop_under_torchrun(start: Callable[..., Launched]) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launched = start("stop", command=command)
    launched.pids(2)
    (launched.run / "stop").touch()
    code, _, err = launched.result()
    assert code != 0, "torchrun has codes of its own"
    assert "stopped: stop requested (pipeline cancel or a stop file) at step" in err.replace("\n", " ")
    assert (launched.run / "closed").exists(), "no rank leaves before rank 0 has closed"


@pytest.mark.slow
def test_started_by_another_launcher_with_another_number(start: Callable[..., Launched]) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, _, err = start("good", "launch.processes=4", command=command).result()
    assert code != 0
    assert "launch.processes is 4, but 2 processes were started" in err


def test_run_is_refused_in_a_rank(tmp_path: Path) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "pipeline", "run", str(write_run(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 2
    assert "WORLD_SIZE is set" in done.stderr


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("auto", 2)
    check_devices("cpu", 8)
    with pytest.raises(UserError, match=r"launch.processes is 8, .*torch sees 2 .*launch.processes=2"):
        check_devices("auto", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_devices("auto", 8)
    with pytest.raises(UserError, match="torch sees 0"):
        check_devices("cuda", 8)


@pytest.mark.slow
def test_a_layout_that_does_not_fit_starts_nothing(start: Callable[..., Launched]) -> None:
    launched = start("good", "parallel.tp=2")
    code, _, err = launched.result()
    assert code == 2
    assert "launch.processes=" in err
    assert not (launched.run / "logs").exists()


def test_a_full_disk_does_not_hide_how_the_ranks_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with _quiet(Path("/dev/full")):
        logging.getLogger("torch.distributed.elastic.agent").error("rank 1 has ended")
    assert capsys.readouterr().err == ""


def test_a_run_without_its_end_is_told_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 could not write it, or somebody has removed it."""
    for name in ("check_memory", "check_room", "_launch_stage"):
        monkeypatch.setattr(launcher, name, lambda *_: ())
    config = load(write_run(tmp_path))
    config.run.dir.mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=r"exit\.json"):
        launcher.launch_training(config, 2)


def judged(
    tmp_path: Path, codes: dict[int, int], forwarded: set[int], lost: tuple[int, ...] = ()
) -> BaseException | None:
    """What the launcher makes of these exit codes by rank, with error files of `lost` ranks that name the network."""
    tmp_path = tmp_path / str(len(list(tmp_path.iterdir())))
    tmp_path.mkdir()
    ranks = _Ranks(3, tmp_path)
    ranks.codes, ranks.times, ranks.forwarded = codes, dict.fromkeys(codes, 1.0), forwarded
    for rank in lost:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"rank-{rank:04d}.error.json"))
            patch.setenv("RANK", str(rank))
            record_error(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed"))
    try:
        _raise_failure(ranks, tmp_path)
    except BaseException as error:
        return error
    return None


def test_judgement(tmp_path: Path) -> None:
    term, kill, abort = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGABRT
    assert judged(tmp_path, {0: 0, 1: 0, 2: 0}, set()) is None
    assert judged(tmp_path, {0: 0, 1: 0, 2: 0}, {signal.SIGTERM}) is None, "it came too late"
    stopped = judged(tmp_path, {0: 1, 1: term, 2: 1}, {signal.SIGTERM}, lost=(0, 2))
    assert isinstance(stopped, Stopped), "two ranks listened already, and have lost the third one"
    assert isinstance(judged(tmp_path, {}, {signal.SIGINT}), KeyboardInterrupt)
    killed = judged(tmp_path, {0: 1, 1: abort, 2: kill}, set(), lost=(0,))
    assert isinstance(killed, RankFailed)
    assert "rank 2 of 3 was killed by SIGKILL" in str(killed)
    assert killed.exit_code == 1


def test_ranks_that_refuse_different_pieces_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (1, 0):  # rank 0 comes second, and has shown its own message
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"rank-{rank:04d}.error.json"))
        monkeypatch.setenv("RANK", str(rank))
        record_error(UserError(f"document {rank} is damaged"))
    ranks = _Ranks(2, tmp_path)
    ranks.codes, ranks.times = {0: 2, 1: 2}, {0: 2.0, 1: 1.0}
    with pytest.raises(RankFailed, match="document 0 is damaged") as failed:
        _raise_failure(ranks, tmp_path)
    assert failed.value.shown and failed.value.exit_code == 2
