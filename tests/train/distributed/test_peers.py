"""Ranks that no launcher watches notice when another one is killed while they start, and wait for slow ones."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.config.run import TimeLimitsConfig
from pipeline.train.distributed import peers, process_group
from pipeline.train.distributed.peers import is_watched
from pipeline.train.distributed.rank import Processes
from tests.train.distributed.ranks import Ranks

pytestmark = pytest.mark.parallel

LIMIT = 60.0
"""Seconds after which the ranks should have noticed; the limit of the start is ten times that."""
FOREVER = 600.0
PATIENCE = 0.5


def _join() -> None:
    peers.PATIENCE = PATIENCE
    process_group.init_process_group(
        process_group.of_environment(), torch.device("cpu"), TimeLimitsConfig(init_seconds=FOREVER)
    )


def dies_while_others_come(victim: int) -> None:
    """The last rank is slow; the victim has arrived and waits for it, as all do."""
    rank = process_group.of_environment().rank
    if rank == victim:
        threading.Thread(target=_dies_when_it_has_arrived, daemon=True).start()
    if rank == 2:
        time.sleep(FOREVER)
    _join()


def _wait_until_arrived() -> None:
    while process_group._Joined.peers is None:
        time.sleep(0.01)


def _dies_when_it_has_arrived() -> None:
    _wait_until_arrived()
    os.kill(os.getpid(), signal.SIGKILL)


def dies_while_data_is_opened(victim: int) -> None:
    """Rank 0 looks at datasets, and the others wait for what it says."""
    _join()
    rank = process_group.of_environment().rank
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    process_group.broadcast_from_rank0(lambda: time.sleep(FOREVER))


@pytest.mark.guard
@pytest.mark.parametrize(("case", "survivors"), [(dies_while_others_come, [0]), (dies_while_data_is_opened, [0, 2])])
def test_a_rank_that_is_killed_while_they_start_ends_the_others(
    case: Callable[[int], None], survivors: list[int]
) -> None:
    with Ranks(3, connect=False) as these:
        for end in these._ends:
            end.send((case, (1,)))
        until = time.monotonic() + LIMIT
        for rank in survivors:
            these._processes[rank].join(max(0.0, until - time.monotonic()))
        logs = {rank: (these._logs / f"rank-{rank}.log").read_text() for rank in survivors}
        assert {these._processes[rank].exitcode for rank in survivors} == {1}, logs
        for text in logs.values():
            assert "rank 1 on " in text and "has ended while the ranks were starting" in text


def all_come_though_one_is_suspended(resumed: Path) -> bool:
    """The one that is stopped for a while answers nobody, and lives. The last rank comes when it is resumed."""
    place = process_group.of_environment()
    if place.rank == 1:
        arrived, arrives = os.pipe()
        if os.fork() == 0:
            os.read(arrived, 1)
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(3 * PATIENCE)
            os.kill(os.getppid(), signal.SIGCONT)
            resumed.touch()
            os._exit(0)
        threading.Thread(target=_says_that_it_has_arrived, args=(arrives,), daemon=True).start()
    until = time.monotonic() + LIMIT
    while place.rank == 2 and not resumed.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    _join()
    process_group.barrier()
    process_group.start_is_over()
    return process_group._Joined.peers is None


def _says_that_it_has_arrived(pipe: int) -> None:
    _wait_until_arrived()
    os.write(pipe, b"x")


@pytest.mark.guard
def test_a_rank_that_is_slow_or_suspended_is_waited_for(tmp_path: Path) -> None:
    with Ranks(3, connect=False) as these:
        assert these.call(all_come_though_one_is_suspended, tmp_path / "resumed") == [True] * 3


def test_those_that_leave_after_the_start_are_missed_by_nobody() -> None:
    with Ranks(2, connect=False) as these:
        assert these.call(_leaves_early) == [None, None]


def _leaves_early() -> None:
    _join()
    process_group.start_is_over()
    until = time.monotonic() + LIMIT
    while (watching := "peers" in {thread.name for thread in threading.enumerate()}) and time.monotonic() < until:
        time.sleep(0.05)
    assert not watching


def test_a_launcher_that_watches_is_enough() -> None:
    assert is_watched({"TORCHELASTIC_RUN_ID": "none"}) and is_watched({"PIPELINE_STORE": "file"})
    assert not is_watched({"RANK": "0", "SLURM_PROCID": "0"})


def _rank_0_cannot_watch() -> bool:
    """It has no port for it, and the others do not wait for one."""
    if process_group.of_environment().rank == 0:
        peers._listen = _refuse  # type: ignore[assignment]
    _join()
    return process_group._Joined.peers is None


def _refuse(address: str) -> socket.socket:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_where_rank_0_cannot_watch_the_others_start_without() -> None:
    with Ranks(2, connect=False) as these:
        assert these.call(_rank_0_cannot_watch, timeout=LIMIT) == [True] * 2


@contextmanager
def _watching(world_size: int = 2) -> Iterator[tuple[peers.Peers, tuple[str, int], str]]:
    """Rank 0 alone: its watch, its address and the token."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    watch = peers.Peers(_place(world_size), store, "127.0.0.1")
    try:
        port, token = store.get("peers").decode().split()
        yield watch, ("127.0.0.1", int(port)), token
    finally:
        watch.over()


def _place(world_size: int) -> Processes:
    return Processes(0, world_size, 0, world_size)


def _is_closed(end: socket.socket) -> bool:
    """The other side closes this connection, sooner or later."""
    end.settimeout(LIMIT / 4)
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


def test_rank_0_without_open_files_watches_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be accepted would wake it again and again."""
    tries = []

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            tries.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def listen(address: str) -> socket.socket:
        return Full(fileno=socket.create_server((address, 0)).detach())

    monkeypatch.setattr(peers, "_listen", listen)
    with _watching() as (_, address, _), socket.create_connection(address) as end:
        assert _is_closed(end)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    assert len(tries) == 1


@pytest.mark.parametrize(("naming", "kept", "closed"), [(FOREVER, 2 + 16, 5), (0.2, 0, 3)])
def test_connections_without_a_name_are_few_and_short(
    monkeypatch: pytest.MonkeyPatch, naming: float, kept: int, closed: int
) -> None:
    monkeypatch.setattr(peers, "_NAMING", naming)
    with _watching(2) as (watch, address, token):
        rank = socket.create_connection(address)
        rank.sendall(f"{token} rank 1\n".encode())
        assert rank.recv(100) == b"welcome\n"
        nameless = [socket.create_connection(address) for _ in range(kept + closed)]
        assert all(map(_is_closed, nameless[kept:]))
        assert [peer.name for peer in watch._connections.values()] == ["rank 1"] + [""] * kept
        for end in (rank, *nameless):
            end.close()


def _has_open_files_for_all_ranks_or_watches_none() -> None:
    hard = 4000
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, hard))
    with _watching((hard - 512) // 2):
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    store = dist.HashStore()  # type: ignore[attr-defined]
    assert peers.watch(_place(hard), store, "127.0.0.1") is None
    assert store.get("peers") == b""


def test_rank_0_has_open_files_for_all_ranks_or_watches_none() -> None:
    """In a process of its own, with few open files: those of all earlier tests may be more than the lowered limit."""
    with Ranks(1, connect=False) as these:
        assert these.call(_has_open_files_for_all_ranks_or_watches_none) == [None]
