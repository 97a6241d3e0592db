"""Processes by pid: one that runs, one that is dead and not asked for, one of another time or machine."""

from __future__ import annotations

import os
import socket
import subprocess
import time

from pipeline.common import process_identity
from tests.waiting import until


def test_a_process_runs_until_it_is_dead() -> None:
    before = time.time()
    with subprocess.Popen(["sleep", "100"]) as child:
        now = time.time()
        assert process_identity.runs(child.pid) and process_identity.start_time(child.pid) is not None
        assert process_identity.ran_at(socket.gethostname(), child.pid, now) is True
        # By the number alone it could be a process that began later.
        assert process_identity.ran_at(socket.gethostname(), child.pid, before - 60) is False
        assert process_identity.ran_at("another", child.pid, now) is None
        child.kill()
        until(lambda: not process_identity.runs(child.pid))  # a zombie
        assert process_identity.start_time(child.pid) is None
        assert process_identity.ran_at(socket.gethostname(), child.pid, now) is False
        os.kill(child.pid, 0)
    assert not process_identity.runs(child.pid)
    assert process_identity.runs(1)


def test_the_identity_of_this_process() -> None:
    mine = process_identity.identity()
    assert list(mine) == ["host", "boot", "namespace", "pid", "started"]
    found = process_identity.process(os.getpid())
    assert found is not None and (mine["pid"], mine["started"]) == (os.getpid(), found[1])
