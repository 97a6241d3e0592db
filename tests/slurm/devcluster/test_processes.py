"""Processes of the development cluster are killed as by a loss of power: none of them notices the end of another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm.devcluster import processes
from tests.waiting import until

_CHILD = """
import pathlib, signal, sys, time
signal.signal(signal.SIGHUP, lambda *_: pathlib.Path(sys.argv[1], "told").touch())
pathlib.Path(sys.argv[1], "ready").touch()
while True:
    time.sleep(0.01)
"""
_PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], process_group=0).wait()
"""


def test_none_notices_that_another_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process group whose parent is gone is sent SIGHUP, and continued."""
    kill = os.kill

    def slowly(pid: int, number: int) -> None:
        kill(pid, number)
        if number == signal.SIGKILL:
            time.sleep(0.3)  # a loaded machine: those that are not dead yet have time to act

    with subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path), _CHILD], start_new_session=True) as parent:
        until((tmp_path / "ready").exists)
        found = processes.with_descendants([parent.pid])
        assert len(found) == 2
        monkeypatch.setattr(os, "kill", slowly)
        processes.send(found, signal.SIGSTOP)
        processes.kill_stopped(found)
        assert parent.wait(timeout=300) == -signal.SIGKILL
    assert not any(processes.alive(pid) for pid in found)
    assert not (tmp_path / "told").exists()
