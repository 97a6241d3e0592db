from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import orjson
import pytest

from pipeline.train.run.heartbeat import (
    Beat,
    Heartbeat,
    beat_file,
    blocking_ranks_text,
    host_of,
    node_file,
    read_beat,
    read_beats,
)
from tests.waiting import until

NOW = 1_000_000.0


def heartbeat(run: Path, *, rank: int = 0, world: int = 2, seconds: float = 100.0) -> Heartbeat:
    place = lambda: ("save", None)  # noqa: E731
    return Heartbeat(run, rank=rank, world=world, per_node=2, attempt=lambda: 3, seconds=seconds, place=place)


def beat(
    rank: int, phase: str = "hang", *, place: str = "x.py:1 (f)", waits: bool | None = True, ago: float = 0
) -> Beat:
    return Beat(rank, f"n{rank}", 100 + rank, 3, 7, phase, NOW - ago, place, waits)


def appears(run: Path) -> None:
    until(lambda: bool(read_beats(run)), why="there is no heartbeat")


def test_a_heartbeat_is_there_from_the_beginning_and_says_when_it_ended(tmp_path: Path) -> None:
    with heartbeat(tmp_path):
        appears(tmp_path)
        found = read_beat(tmp_path)
        assert found is not None
        assert (found.rank, found.host, found.pid) == (0, socket.gethostname(), os.getpid())
        assert (found.attempt, found.step, found.phase) == (3, None, "save")
        assert host_of(tmp_path, 0) == socket.gethostname()
    assert read_beats(tmp_path)[0].phase == "end"
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["node-0000.jsonl"], "nothing temporary stays"


def test_a_file_for_each_node_which_its_ranks_write_in_place(tmp_path: Path) -> None:
    beats = [heartbeat(tmp_path, rank=rank, world=4) for rank in range(4)]
    (tmp_path / "heartbeats").mkdir()
    beats[3].write("step", 7)  # before those whose lines come first
    assert list(read_beats(tmp_path)) == [3]
    for step in range(20):
        for each in beats:
            each.write("step", step, place="x" * 5000)
    files = sorted((tmp_path / "heartbeats").iterdir())
    assert [(file.name, file.stat().st_size) for file in files] == [
        ("node-0000.jsonl", 2048),
        ("node-0001.jsonl", 2048),
    ]
    assert {rank: beat.step for rank, beat in read_beats(tmp_path).items()} == dict.fromkeys(range(4), 19)
    found = read_beat(tmp_path, 3)
    assert found is not None and found.place is not None and 100 < len(found.place) < 1000, "its end"


def test_what_other_ranks_and_an_older_version_have_left_goes(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    for rank in range(8):
        beat_file(tmp_path, rank).write_bytes(orjson.dumps(beat(rank).__dict__))
    assert read_beats(tmp_path).keys() == set(range(8))
    for rank in range(6):
        Heartbeat(
            tmp_path, rank=rank, world=6, per_node=3, attempt=lambda: 2, seconds=1, place=lambda: ("step", 1)
        ).write("step", 1)
    with heartbeat(tmp_path):
        appears(tmp_path)
        until(lambda: read_beats(tmp_path).keys() == {0, 1}, why="rank 1 is that of the run before, on the same node")
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["node-0000.jsonl"]


def test_what_another_rank_writes_at_the_same_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def access(path: Path, mode: int) -> bool:
        path.write_bytes(b"theirs")
        return False

    monkeypatch.setattr("pipeline.train.run.heartbeat.os.access", access)
    first = heartbeat(tmp_path)
    first._prepare()
    file = node_file(tmp_path, 0)
    assert not file.exists() or file.read_bytes() == b"theirs"


def test_beats_of_another_attempt_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    with heartbeat(tmp_path):
        pass
    beat_file(tmp_path, 1).write_text('{"rank": 1')
    beat_file(tmp_path, 2).write_text('["no object"]')
    beat_file(tmp_path, 3).write_text('{"rank": 3}')
    assert read_beats(tmp_path).keys() == {0}
    assert read_beats(tmp_path, attempt=3).keys() == {0}
    assert read_beats(tmp_path, attempt=4) == {}
    assert read_beats(tmp_path / "nowhere") == {}


def test_a_disk_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").touch()
    with heartbeat(tmp_path) as beats:
        beats.write("hang", 1)
    assert read_beats(tmp_path) == {}


def test_nothing_replaces_the_last_beat(tmp_path: Path) -> None:
    with heartbeat(tmp_path) as beats:
        appears(tmp_path)
        beats.write("hang", 5, place="here", waits=False, last=True)
        beats.write("step", 6)
    found = read_beats(tmp_path)[0]
    assert (found.phase, found.step, found.place, found.waits) == ("hang", 5, "here", False)


def test_silent_ranks_are_those_that_should_have_spoken(tmp_path: Path) -> None:
    beats = heartbeat(tmp_path, seconds=10)
    now = time.time()
    times = {0: now, 1: now - 20, 2: now - 30}
    found = {rank: Beat(rank, "n", 1, 3, 1, "step", at) for rank, at in times.items()}
    assert beats.silent(found) == {2}
    assert beats.silent({0: Beat(0, "n", 1, 3, 1, "end", now - 30)}) == set(), "it has said that it goes"


def test_others_are_waited_for_until_all_have_noticed(tmp_path: Path) -> None:
    mine, other = heartbeat(tmp_path), heartbeat(tmp_path, rank=1)
    (tmp_path / "heartbeats").mkdir()
    mine.write("hang", 1)
    other.write("step", 1)
    notice = threading.Timer(0.3, lambda: other.write("hang", 1, last=True))
    notice.start()
    assert {beat.phase for beat in mine.others_have_noticed(60).values()} == {"hang"}
    notice.join()


def test_a_silent_rank_is_to_blame() -> None:
    beats = {0: beat(0), 1: beat(1, "step", waits=None, ago=30)}
    assert blocking_ranks_text(beats, 2, {1}, now=NOW) == (
        "rank 1 on n1 (process 101) has given no sign of life for 30 s; the last one came from step 7 (phase step)"
    )


def test_a_rank_that_never_came_is_to_blame() -> None:
    assert blocking_ranks_text({0: beat(0)}, 2, now=NOW) == "rank 1 has given no sign of life at all"


def test_a_rank_outside_of_a_collective_is_to_blame() -> None:
    beats = {0: beat(0), 1: beat(1, waits=False, place="data.py:3 (read)"), 2: beat(2)}
    assert blocking_ranks_text(beats, 3, now=NOW) == (
        "rank 1 on n1 (process 101) is not in a collective, but at data.py:3 (read)"
    )


def test_a_rank_that_has_left_is_to_blame() -> None:
    assert blocking_ranks_text({0: beat(0), 1: beat(1, "end")}, 2, now=NOW) == (
        "rank 1 on n1 (process 101) has left the training"
    )


def test_where_nobody_is_to_blame_those_that_have_not_noticed_are_told() -> None:
    assert blocking_ranks_text({0: beat(0), 1: beat(1, "save", waits=None)}, 2, now=NOW) == (
        "rank 1 on n1 (process 101) is at step 7 (phase save)"
    )
    assert "every rank waits" in blocking_ranks_text({0: beat(0), 1: beat(1)}, 2, now=NOW)
    assert blocking_ranks_text({0: beat(0)}, 1, now=NOW) == ""


def test_of_many_ranks_some_are_named() -> None:
    beats = {rank: beat(rank, "step", waits=None, ago=30) for rank in range(100)}
    told = blocking_ranks_text(beats, 100, set(beats), now=NOW)
    assert told.count("no sign of life") == 8
    assert told.endswith("; and 92 more")
