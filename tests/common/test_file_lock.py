"""Locks on files: who may hold one, and what a process learns that does not get it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.common import file_lock
from pipeline.common.errors import MachineError
from pipeline.common.file_lock import exclusive


@contextmanager
def held(path: Path) -> Iterator[int]:
    """By another process, whose number this is."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True)"
    )
    words = [sys.executable, "-S", "-c", f"{code}; sys.stdin.read()", str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        try:
            yield process.pid
        finally:
            assert process.stdin
            process.stdin.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_lock_that_is_never_let_go_ends_in_a_message(tmp_path: Path) -> None:
    path = tmp_path / "lock.guard"
    with held(path) as pid, pytest.raises(MachineError) as refused, exclusive(path, 0.0):
        pass
    message = str(refused.value)
    assert str(path) in message and f"process {pid} (python" in message and "remove the file" in message
    with exclusive(path, 0.0):
        pass


def test_who_holds_it_may_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "_pids", lambda file: [])
    with held(tmp_path / "x"), pytest.raises(MachineError, match="another machine"), exclusive(tmp_path / "x", 0.0):
        pass


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_it_is_of_this_user_alone_or_of_the_group_of_the_folder(tmp_path: Path, umask: int) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o2770)
    before = os.umask(umask)
    try:
        for folder in (alone, shared):
            with exclusive(folder / "lock"):
                pass
    finally:
        os.umask(before)
    assert mode(alone / "lock") == 0o600
    assert mode(shared / "lock") == 0o660 and (shared / "lock").stat().st_gid == shared.stat().st_gid


def test_one_of_an_older_version_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o644)
    with exclusive(path):
        assert mode(path) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place, which only root may")
def test_another_user_can_neither_read_nor_hold_it() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's folders let nobody else in
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "lock.guard"
        path.touch()
        path.chmod(0o644)
        assert as_nobody(path)
        with exclusive(path):
            assert not as_nobody(path)
        assert not as_nobody(path)


def as_nobody(path: Path) -> bool:
    """Whether another user can open a file."""
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.open(path, os.O_RDONLY)
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_link_or_a_pipe_in_its_place_is_refused_and_nothing_is_cut(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(MachineError, match=f"{name} .*lock.* remove the file"), exclusive(tmp_path / name):
            pass
    assert precious.read_text() == "mine"


def test_a_file_that_was_removed_meanwhile_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    flock, calls = file_lock.fcntl.flock, []

    def slow(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if not calls:
            path.unlink()  # as its owner may, just before this process got the lock
        calls.append(descriptor)

    monkeypatch.setattr(file_lock.fcntl, "flock", slow)
    with exclusive(path):
        assert len(calls) == 2
        with pytest.raises(MachineError), exclusive(path, 0.0):
            pass
