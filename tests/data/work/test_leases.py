"""Leases between real processes: never two holders, the dead are followed at once, and no clock of another machine."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import orjson
import pytest

from pipeline.data.work import leases
from pipeline.data.work.leases import Holder, Lease, LeaseWatch, lease_path, read_leases, sweep, take, take_when_free

HOLD = """
    from pipeline.data.work.leases import LeaseWatch, take
    lease = take(folder, 3, LeaseWatch())
    print(type(lease).__name__, flush=True)
    sys.stdin.read()
"""
RACE = """
    import random, time
    from pipeline.data.work.leases import Lease, LeaseWatch, take
    chance, watch, left = random.Random(int(sys.argv[2])), LeaseWatch(), set(range(int(sys.argv[3])))
    sys.stdin.readline()
    with open(folder / f"log{sys.argv[2]}", "w") as log:
        while left:
            unit = chance.choice(sorted(left)[:8])
            lease = take(folder, unit, watch)
            if isinstance(lease, Lease):
                begin = time.monotonic()
                time.sleep(chance.random() * 0.001)
                print(unit, begin, time.monotonic(), lease.lost, file=log, flush=True)
                left.discard(unit)
                lease.release()
"""


def start(program, *arguments):
    """A process that runs a program with `folder`, the first argument, and a pipe it can wait on."""
    lines = "import sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n" + textwrap.dedent(program)
    command = [sys.executable, "-c", lines, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lease on unit 3."""
    process = start(HOLD, tmp_path)
    assert process.stdout.readline() == "Lease\n"
    yield process
    process.kill()
    process.communicate()


def forge(folder, unit=3, **values):
    """A lease as this process would write it, but for `values`; its path."""
    with take(folder, unit, LeaseWatch()) as lease:
        value = orjson.loads(lease.path.read_bytes())
    lease.path.write_bytes(orjson.dumps(value | {"nonce": "forged"} | values))
    return lease.path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_one_holder(tmp_path):
    with take(tmp_path, 1234, LeaseWatch()) as lease:
        assert isinstance(lease, Lease)
        assert files(tmp_path) == ["leases/00001/00001234.json"]
        found = take(tmp_path, 1234, LeaseWatch())
        assert isinstance(found, Holder)
        assert (found.pid, str(found)) == (os.getpid(), f"process {os.getpid()} on {found.host}")
        assert abs(found.since - time.time()) < 60
        with take(tmp_path, 1235, LeaseWatch()) as other:
            assert isinstance(other, Lease)
    assert files(tmp_path) == []
    with take(tmp_path, 1234, LeaseWatch()) as lease:
        assert isinstance(lease, Lease)


@pytest.mark.first(1)
@pytest.mark.parametrize("stale", [False, True])
def test_racing_processes_never_hold_the_same(tmp_path, stale):
    """200 leases, all wanted by all processes; in one case each is first a dead process's."""
    units, processes = 200, 3
    if stale:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        for unit in range(units):
            forge(tmp_path, unit, pid=gone.pid)
    racing = [start(RACE, tmp_path, number, units) for number in range(processes)]
    for process in racing:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in racing] == [0] * processes
    held = []
    for number in range(processes):
        rows = [line.split() for line in (tmp_path / f"log{number}").read_text().splitlines()]
        assert sorted(int(row[0]) for row in rows) == list(range(units))
        held += [(int(unit), float(begin), float(end)) for unit, begin, end, _ in rows]
    held.sort()
    for (unit, _, end), (other, begin, _) in itertools.pairwise(held):
        assert unit != other or end <= begin
    assert [name for name in files(tmp_path) if name.startswith("leases")] == []


def test_a_killed_process_is_followed_at_once(tmp_path, holder):
    watch = LeaseWatch(patience=1e9)
    assert take(tmp_path, 3, watch).pid == holder.pid
    holder.kill()
    # It is still a zombie here: its parent has not waited for it yet.
    deadline = time.monotonic() + 10
    while not isinstance(lease := take(tmp_path, 3, watch), Lease):
        assert time.monotonic() < deadline
    assert Path(f"/proc/{holder.pid}").exists()
    lease.release()
    assert files(tmp_path) == []


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_stopped_process_is_watched(tmp_path, holder):
    """It is there, but for how long nobody knows: as one of another machine that says nothing."""
    stop(holder)
    now = 0.0
    watch = LeaseWatch(clock=lambda: now)
    assert isinstance(take(tmp_path, 3, watch), Holder)
    now = 119.0
    assert take(tmp_path, 3, watch).pid == holder.pid
    sweep(tmp_path)
    now = 120.0
    with take(tmp_path, 3, watch) as lease:
        assert isinstance(lease, Lease)
        holder.send_signal(signal.SIGCONT)
        assert take(tmp_path, 3, watch).pid == os.getpid()


def test_a_pid_that_is_used_again(tmp_path):
    forge(tmp_path, pid=os.getpid(), started=12345)
    assert isinstance(take(tmp_path, 3, LeaseWatch(patience=1e9)), Lease)


def test_a_process_of_another_user_is_there(tmp_path):
    """Without the start time, which the system may hide, a pid that exists is only waited for."""
    forge(tmp_path, started=None)
    assert isinstance(take(tmp_path, 3, LeaseWatch()), Holder)
    assert isinstance(take(tmp_path, 3, LeaseWatch(patience=0)), Holder)
    watch = LeaseWatch(patience=0)
    assert isinstance(take(tmp_path, 3, watch), Holder)
    assert isinstance(take(tmp_path, 3, watch), Lease)


@pytest.mark.parametrize("elsewhere", [{"boot": "other", "host": "far"}, {"boot": "other"}, {"namespace": "pid:[1]"}])
def test_another_machine_is_watched(tmp_path, elsewhere):
    """Another host, a kernel booted again or elsewhere, a container: stale after 120 s of our clock without a beat."""
    now = 5000.0
    watch = LeaseWatch(clock=lambda: now)
    path = forge(tmp_path, pid=2**30, since=time.time() + 1e6, **elsewhere)  # its clock is wrong
    assert isinstance(take(tmp_path, 3, watch), Holder)
    now += 119
    assert isinstance(take(tmp_path, 3, watch), Holder)
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"beat": 7}))
    now += 119
    assert isinstance(take(tmp_path, 3, watch), Holder)
    now += 119
    assert isinstance(take(tmp_path, 3, watch), Holder)
    now += 2
    assert isinstance(take(tmp_path, 3, watch), Lease)
    assert isinstance(take(tmp_path, 3, LeaseWatch()), Holder)


@pytest.mark.parametrize("data", [b"", b'{"host": "a", "pid"', b"[]", b"7", b'{"pid": -1}', b"x" * 10**5])
def test_a_damaged_lease(tmp_path, data):
    path = forge(tmp_path)
    path.write_bytes(data)
    now = 0.0
    watch = LeaseWatch(clock=lambda: now)
    assert "not written its name" in str(take(tmp_path, 3, watch))
    assert list(read_leases(tmp_path)) == []
    now = 121.0
    lease = take(tmp_path, 3, watch)
    assert isinstance(lease, Lease)
    assert files(tmp_path) == ["leases/00000/00000003.json"]


def test_release_leaves_what_others_took(tmp_path):
    lease = take(tmp_path, 3, LeaseWatch())
    path = forge_over = lease_path(tmp_path, 3)
    theirs = orjson.dumps(orjson.loads(path.read_bytes()) | {"nonce": "theirs"})
    forge_over.write_bytes(theirs)
    lease.release()
    assert path.read_bytes() == theirs
    lease.release()


def test_beats(tmp_path, monkeypatch):
    with take(tmp_path, 3, LeaseWatch()) as lease:
        before = lease.path.read_bytes()
        lease.beat(100)
        assert lease.path.read_bytes() == before  # not yet
        monkeypatch.setattr(leases, "HEARTBEAT_S", 0.0)
        lease.beat(100)
        lease.beat(250)
        [(unit, record, time_s)] = read_leases(tmp_path)
        assert (unit, record.beat, record.done, record.pid) == (3, 2, 250, os.getpid())
        assert abs(time_s - time.time()) < 60
        assert isinstance(take(tmp_path, 3, LeaseWatch()), Holder)
        assert files(tmp_path) == ["leases/00000/00000003.json"]
    lease.beat(300)
    assert files(tmp_path) == []


def test_a_lost_lease_stops_beating(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.0)
    lease = take(tmp_path, 3, LeaseWatch())
    forge(tmp_path, 4)
    theirs = lease_path(tmp_path, 4).read_bytes()
    lease.path.write_bytes(theirs)
    lease.beat(1)
    assert lease.lost
    lease.beat(2)
    assert lease.path.read_bytes() == theirs
    removed = take(tmp_path, 5, LeaseWatch())
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    removed.beat(1)
    assert removed.lost
    removed.release()
    assert files(tmp_path) == []


def test_beating_from_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.01)
    with take(tmp_path, 3, LeaseWatch()) as lease, lease.beating():
        deadline = time.monotonic() + 20
        while next(read_leases(tmp_path))[1].beat < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert files(tmp_path) == []


def test_named_work_is_waited_for(tmp_path):
    """What one process at a time does, like training the tokenizer, whose holder dies while another waits."""
    program = HOLD.replace("take(folder, 3,", "take(folder, 'train',")
    process = start(program, tmp_path)
    assert process.stdout.readline() == "Lease\n"
    assert files(tmp_path) == ["leases/train.json"]
    told = []

    def waiting(who):
        told.append(who.pid)
        process.kill()

    with take_when_free(tmp_path, "train", LeaseWatch(), waiting) as lease:
        assert [name for name, _, _ in read_leases(tmp_path)] == ["train"]
        assert not lease.lost
    assert told == [process.pid]
    process.communicate()
    assert files(tmp_path) == []


def test_sweep_removes_what_the_dead_left(tmp_path, holder):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    forge(tmp_path, 1, pid=gone.pid)
    forge(tmp_path, 2, pid=gone.pid, boot="elsewhere")
    forge(tmp_path, "train", pid=gone.pid)
    forge(tmp_path, 5).write_bytes(b"")
    sweep(tmp_path)
    assert [Path(name).stem for name in files(tmp_path)] == ["00000002", "00000003", "00000005"]


def test_a_lease_that_changes_hands_is_put_back(tmp_path):
    """What was judged stale is not what is there any more."""
    path = forge(tmp_path)
    data = path.read_bytes()
    leases._remove(path, b"as it was before")
    assert path.read_bytes() == data
    leases._remove(path, data)
    leases._remove(path, data)
    assert files(tmp_path) == []


def test_without_links(tmp_path, monkeypatch):
    """Some file systems of users' own know no hard links."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with take(tmp_path, 3, LeaseWatch()) as lease:
        assert isinstance(lease, Lease)
        assert isinstance(take(tmp_path, 3, LeaseWatch()), Holder)
        assert not leases._create(tmp_path, lease.path, leases._new_record())
        data = lease.path.read_bytes()
        leases._remove(lease.path, b"as it was before")
        assert lease.path.read_bytes() == data
    assert files(tmp_path) == []


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-1e999"])
def test_a_lease_whose_time_is_not_a_number_is_damaged(tmp_path, time):
    path = forge(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(orjson.dumps(orjson.loads(data)["since"]), time.encode()))
    assert time.encode() in path.read_bytes()
    assert list(read_leases(tmp_path)) == []


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs is not possible here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_harmless(small_disk, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.0)
    with take(small_disk, 3, LeaseWatch()) as lease:
        before = lease.path.read_bytes()
        with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        lease.beat(100)
        assert not lease.lost
        assert lease.path.read_bytes() == before
        with pytest.raises(OSError, match="No space") as error:
            take(small_disk, 4, LeaseWatch())
        assert str(small_disk) in str(error.value.filename)
        (small_disk / "filler").unlink()
        lease.beat(200)
        assert next(read_leases(small_disk))[1].done == 200
    assert files(small_disk) == []
