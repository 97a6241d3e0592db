"""What makes a run save and stop, or save and go on, in this process."""

from __future__ import annotations

import errno
import io
import os
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.common.errors import Stopped
from pipeline.config.load import load
from pipeline.train.loop import trainer
from pipeline.train.run.stop_requests import Requests, StopRequest
from slurm.local.stages import _terminate_stops
from tests.clock import set_time
from tests.train.runs import exact, train

NOTHING = StopRequest(stop=False, save=False)


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("hangup")
def test_signals_ask_for_a_stop(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Requests(tmp_path) as requests:
        assert requests.request() == NOTHING
        os.kill(os.getpid(), number)
        assert requests.reason() == number.name
        assert requests.request() == StopRequest(stop=True, save=False)
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("hangup")
def test_the_end_of_a_terminal_stays_ignored_under_nohup(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Requests(tmp_path) as requests, _terminate_stops():
        os.kill(os.getpid(), signal.SIGHUP)
        assert requests.request() == NOTHING
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_rank_that_is_not_the_first_listens_to_signals_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    with Requests(None, started=0.0, max_minutes=1e-9, before_end=60, save_minutes=1e-9) as requests:
        assert requests.request() == NOTHING
        requests.saved()
        requests.remove_stop_file()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.request().stop


def test_files_in_the_run_folder_ask(tmp_path: Path) -> None:
    with Requests(tmp_path) as requests:
        (tmp_path / "save").touch()
        assert requests.request() == StopRequest(stop=False, save=True)
        requests.saved()
        assert requests.request() == NOTHING
        assert not (tmp_path / "save").exists()
        (tmp_path / "stop").touch()
        assert requests.reason() == "stop requested (pipeline cancel or a stop file)"
        requests.remove_stop_file()
        assert requests.request() == NOTHING
        assert not (tmp_path / "stop").exists()


def test_a_run_folder_that_does_not_answer_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.stat

    def stat(self: Path, **keys: bool) -> os.stat_result:
        if self.parent == tmp_path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(self, **keys)

    monkeypatch.setattr(Path, "stat", stat)
    with Requests(tmp_path) as requests:
        assert requests.request() == NOTHING


def test_a_save_file_that_cannot_be_removed_counts_once(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    with Requests(tmp_path) as requests:
        assert requests.request().save
        requests.saved()
        assert not requests.request().save
        os.utime(tmp_path / "save", ns=(1, 1))
        assert requests.request().save, "somebody has asked again"


def test_the_clock_asks(tmp_path: Path) -> None:
    now = time.monotonic()
    with Requests(tmp_path, started=now - 61, max_minutes=1) as requests:
        assert requests.reason() == "launch.max_minutes (1)"
    with Requests(tmp_path, started=now, max_minutes=60) as requests:
        assert requests.reason() is None
    with Requests(tmp_path, save_minutes=1e-9) as requests:
        assert requests.request() == StopRequest(stop=False, save=True)
    with Requests(tmp_path, save_minutes=60) as requests:
        assert requests.request() == NOTHING


@pytest.mark.parametrize(("end", "stops"), [(None, False), (100, True), (140, False), ("", False), ("Unknown", False)])
def test_the_end_of_the_allocation_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int | str | None, stops: bool
) -> None:
    if end is not None:
        text = str(int(time.time()) + end) if isinstance(end, int) else end
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    with Requests(tmp_path, before_end=120) as requests:
        assert requests.request().stop == stops
        if stops:
            assert "120 s ahead (launch.stop_before_end_seconds=120)" in (requests.reason() or "")


def test_the_time_kept_for_the_end_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.time()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(begin + 100))

    def asks(after: float) -> str | None:
        set_time(monkeypatch, time=lambda: begin + after)
        return requests.reason()

    with Requests(tmp_path, before_end=None) as requests:
        assert not asks(74)  # a quarter of what is there, at most
        assert asks(76)
        requests.note_durations(step=3.0, save=2.0)
        assert not asks(89)
        assert "10 s ahead (measured)" in (asks(91) or "")


def stopped(root: Path, name: str, *overrides: str) -> str:
    with pytest.raises(Stopped) as ended:
        trainer.train(load(root / "run.yaml", [f"run.dir={root / name}", *overrides]), Console(file=io.StringIO()))
    return str(ended.value)


def test_a_run_stops_in_time_and_goes_on_with_the_same_bits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(root, "whole")
    assert stopped(root, "parts", "launch.max_minutes=0.000001").startswith("launch.max_minutes (1e-06) at step 1 of 8")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    assert "the end of the allocation" in stopped(root, "parts", "launch.stop_before_end_seconds=120")
    run = train(root, "parts", "launch.stop_before_end_seconds=0")
    assert exact(run) == exact(whole)
    assert {path.name for path in (run / "checkpoints").glob("step-*")} >= {"step-00000008"}


@pytest.mark.guard
def test_save_file_and_minutes_save_and_go_on(root: Path) -> None:
    (root / "saves").mkdir()
    (root / "saves" / "save").touch()
    keep = "train.checkpoint.keep=99"
    run = train(root, "saves", keep, "train.checkpoint.every_steps=5")
    assert not (run / "save").exists()
    names = [path.name for path in sorted((run / "checkpoints").glob("step-*"))]
    assert names == ["step-00000001", "step-00000005", "step-00000008"]

    run = train(root, "minutes", keep, "train.checkpoint.every_steps=5", "train.checkpoint.every_minutes=0.0000001")
    assert len(list((run / "checkpoints").glob("step-*"))) == 8, "after each step"
