"""Mirrors of checkpoints in memory: what counts, in which order, who may write, and what becomes of failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from obstore.store import MemoryStore

from pipeline.common import run_identity
from pipeline.common.errors import MachineError, UserError
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.urls import parse_folder
from pipeline.common.objects.writing import delete_objects
from pipeline.config.checkpoint import CheckpointConfig, MirrorConfig
from pipeline.train.checkpoint.committed import COMMIT, record_of
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror import bucket, leader, owner
from pipeline.train.checkpoint.mirror.board import Board, Task
from pipeline.train.checkpoint.mirror.bucket import Mirror, OwnerLost
from pipeline.train.checkpoint.mirror.commits import MirrorCommit, current_line
from pipeline.train.checkpoint.mirror.follower import MirrorFollower
from pipeline.train.checkpoint.mirror.leader import MirrorLeader
from pipeline.train.checkpoint.mirror.owner import STALE_S, MirrorLease, OwnedByOther, read_owner
from pipeline.train.checkpoint.mirror.uploads import Uploads
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.mirror_state import MirrorRecord, read_mirror_state
from tests.waiting import until

ACCESS = RemoteAccess(patience_s=0)
URL = "s3://corpus/runs/one"
RUN = "the-run"


class Recorded:
    """A store in memory that notes what is written and removed, and fails where a test asks for it."""

    def __init__(self) -> None:
        self.inside = MemoryStore()
        self.calls: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], bool] = lambda action, key: False

    def names(self) -> set[str]:
        return {str(meta["path"]) for page in self.inside.list() for meta in page}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    found = Recorded()
    stores.use_store(parse_folder(URL), ACCESS, found.inside)
    library = stores.load_obstore()
    put, delete = library.put, library.delete

    def recorded_put(store: Any, key: str, *args: Any, **keys: Any) -> Any:
        if found.fail("put", key):
            raise OSError("the store is down")
        found.calls.append(("put", key))
        return put(store, key, *args, **keys)

    def recorded_delete(store: Any, keys: list[str] | str) -> None:
        for key in [keys] if isinstance(keys, str) else keys:
            if found.fail("delete", key):
                raise OSError("the store is down")
            found.calls.append(("delete", key))
            delete(store, [key])

    monkeypatch.setattr(library, "put", recorded_put)
    monkeypatch.setattr(library, "delete", recorded_delete)
    monkeypatch.setattr(leader, "_FIRST_S", 0.01)
    yield found
    stores._Stores.opened.clear()


class Run:
    """A run folder with checkpoints of made-up files, and the mirror of it."""

    def __init__(self, path: Path, *, keep: int = 2, patience: float = 60, ranks: int = 1, id: str = RUN) -> None:
        path.mkdir(exist_ok=True)
        run_identity.take_id(path)
        (path / "metrics.jsonl").write_text('{"step": 1}\n')
        self.path, self.id, self.ranks = path, id, ranks
        self.rules = CheckpointConfig(mirror=MirrorConfig(to=URL, keep=keep, patience_seconds=patience))
        self.checkpoints = Checkpoints.of_run(path)
        self.record = MirrorRecord(RunFolder(path, 1), URL)
        self.mirror = Mirror.of(URL, ACCESS)

    def save(self, step: int, ranks: int = 1) -> list[list[str]]:
        tmp = self.checkpoints.begin(step, 1)
        names = [[f"__{rank}_0.distcp"] for rank in range(ranks)]
        for (name,) in names:
            (tmp / name).write_bytes(f"{step} {name}".encode() * 1000)
        files = {path.name: record_of(path) for path in tmp.iterdir()}
        self.checkpoints.commit(tmp, step, files, {"attempt": step})
        return names

    def leader(self, began: int = 0, board: Board | None = None) -> MirrorLeader:
        lease = MirrorLease(self.mirror, self.id, run_identity.read_id(self.path) or "")
        found = MirrorLeader(
            *(self.rules, self.path, began, self.ranks, self.mirror, lease),
            *(board or Board(None, 1), Uploads(self.mirror, None), self.record),
        )
        found.start()
        return found

    def steps(self) -> list[int]:
        return [each.step for each in self.mirror.commits()]


def upload(run: Run, *steps: int, began: int = 0) -> MirrorLeader:
    """Mirror checkpoints that are saved one after the other."""
    found = run.leader(began)
    for step in steps:
        found.add(step, run.save(step)[0])
        until(lambda: found.is_idle)
    found.close(10)
    return found


def whole(run: Run) -> bool:
    """True if every commit in the bucket has its files there, with the bytes of the run folder or of their hashes."""
    for commit in run.mirror.commits():
        for name, (size, _) in commit.files.items():
            url = run.mirror.files_url(commit.step, commit.upload).below(name)
            data = stores.open_store(url, ACCESS).get(url.key).bytes()
            if len(bytes(data)) != size:
                return False
    return True


def test_the_commit_comes_last_and_names_all_files(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run")
    upload(run, 10)
    puts = [key for action, key in store.calls if action == "put" and not key.endswith("OWNER")]
    assert puts[-1] == "runs/one/step-00000010/COMMIT"
    (commit,) = run.mirror.commits()
    local = run.checkpoints.at(10)
    assert commit.files == {**local.files(), COMMIT: record_of(local.path / COMMIT)} and commit.run == RUN
    assert set(commit.run_files) == {"metrics.jsonl"} and whole(run)
    assert {key.rpartition("/")[2] for key in puts[:-1]} == {*commit.files, *commit.run_files}
    state = read_mirror_state(run.path)
    assert state is not None and (state.step, state.behind, state.failed) == (10, 0, 0)
    released = read_owner(run.mirror)
    assert released is not None and released[0].released


def test_what_the_policy_does_not_keep_goes_and_its_commit_first(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run", keep=2)
    upload(run, 10, 20, 30)
    assert run.steps() == [20, 30] and whole(run)
    gone = [key for action, key in store.calls if action == "delete"]
    assert gone[0] == "runs/one/step-00000010/COMMIT" and len(gone) > 3
    assert not any(key.startswith("runs/one/step-00000010/") for key in store.names())


def test_newer_checkpoints_are_uploaded_in_place_of_older_ones_that_wait(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run", keep=9)
    held, go_on = threading.Event(), threading.Event()

    def hold(action: str, key: str) -> bool:
        if "step-00000010" in key:
            held.set()
            go_on.wait(60)
        return False

    store.fail = hold
    found = run.leader()
    found.add(10, run.save(10)[0])
    held.wait(60)
    for step in (20, 30):
        found.add(step, run.save(step)[0])
    assert found.held == [10]
    state = read_mirror_state(run.path)
    assert state is not None and (state.step, state.behind, state.waiting) == (0, 3, 30)
    go_on.set()
    until(lambda: found.is_idle)
    found.close(10)
    assert run.steps() == [10, 30] and found.held == []


def test_a_mirror_that_fails_is_named_and_catches_up(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run")
    store.fail = lambda action, key: True
    found = run.leader()
    found.add(10, run.save(10)[0])
    until(lambda: run.record.state.failed > 2)
    state = read_mirror_state(run.path)
    assert state is not None and state.since and "has been failing" in state.words(state.since + 60)
    assert len(found.reports) == 1 and found.reports[0].warning  # once, and not with each try
    store.fail = lambda action, key: False
    until(lambda: found.is_idle)
    found.close(10)
    state = read_mirror_state(run.path)
    assert run.steps() == [10] and state is not None and state.words(0) == ""


def test_what_is_given_up_is_let_go(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run", patience=0)
    store.fail = lambda action, key: key.endswith(".distcp")
    found = run.leader()
    found.add(10, run.save(10)[0])
    until(lambda: found.is_idle)
    assert found.held == [] and run.record.state.failed == 1 and run.steps() == []
    store.fail = lambda action, key: False
    found.add(20, run.save(20)[0])
    until(lambda: found.is_idle)
    found.close(10)
    assert run.steps() == [20]


def test_a_file_that_has_changed_is_not_mirrored(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run")
    found = run.leader()
    names = run.save(10)[0]
    (run.checkpoints.step_folder(10) / names[0]).write_bytes(b"x" * len(f"10 {names[0]}") * 1000)
    found.add(10, names)
    until(lambda: found.is_idle)
    found.close(10)
    assert run.steps() == [] and "is not the file that it should be" in run.record.state.reason


class Shared:
    """What torch's stores have, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_each_rank_uploads_its_files(tmp_path: Path, store: Recorded) -> None:
    run, board = Run(tmp_path / "run", ranks=3), Board(Shared(), 1)
    found = run.leader(board=board)
    others = [MirrorFollower(rank, 3, run.checkpoints, board, Uploads(run.mirror, None)) for rank in (1, 2)]
    for each in others:
        each.start()
    failures = iter([True, True])
    store.fail = lambda action, key: key.endswith("__2_0.distcp") and next(failures, False)
    for step in (10, 20):
        names = run.save(step, ranks=3)
        for each, own in zip([found, *others], names, strict=True):
            each.add(step, own)
        until(lambda: found.is_idle)
    assert run.steps() == [10, 20] and whole(run)
    # What an earlier start has left is dealt.
    run.save(30, ranks=3)
    for each in (found, *others):
        each.add(30, None)
    until(lambda: found.is_idle)
    for each in (found, *others):
        each.close(10)
    assert run.steps() == [20, 30] and whole(run)
    puts = [key for action, key in store.calls if action == "put" and key.endswith(".distcp")]
    assert len(puts) == len(set(puts)) == 9  # each file once, whatever failed
    task = board.task()
    assert task is not None and isinstance(task, Task) and task.over == 30


def test_mirrors_of_others_are_refused(tmp_path: Path, store: Recorded) -> None:
    run, other = Run(tmp_path / "run"), Run(tmp_path / "other", id="another-run")
    upload(run, 10)
    with pytest.raises(OwnedByOther, match="of another run"):
        MirrorLease(other.mirror, other.id, "folder").take()
    stores.open_store(run.mirror.owner, ACCESS).delete(run.mirror.owner.key)
    with pytest.raises(OwnedByOther, match="of another run"):  # by its commits
        MirrorLease(other.mirror, other.id, "folder").take()
    mine = MirrorLease(run.mirror, RUN, "folder")
    mine.take()
    assert mine.generation == 2  # above that of the commits
    with pytest.raises(OwnedByOther, match="from another run folder"):
        MirrorLease(run.mirror, RUN, "another").take()
    MirrorLease(run.mirror, RUN, "folder").take()  # after a crash: the lock of the folder says that it is gone
    with pytest.raises(OwnerLost):
        mine.check()


def test_an_owner_in_another_folder_that_is_silent_is_followed(
    tmp_path: Path, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror.of(URL, ACCESS)
    first = MirrorLease(mirror, RUN, "folder")
    first.take()
    second = MirrorLease(mirror, RUN, "another")
    with pytest.raises(OwnedByOther):
        second.take()
    monkeypatch.setattr(owner, "STALE_S", 0.0)
    second.take()
    assert STALE_S > 0 and second.generation == first.generation + 1
    with pytest.raises(OwnerLost):
        first.renew(released=True)


def test_a_start_that_has_lost_the_mirror_stops(tmp_path: Path, store: Recorded) -> None:
    zombie, new = Run(tmp_path / "run"), Run(tmp_path / "run")
    old = zombie.leader()
    old.add(10, zombie.save(10)[0])
    until(lambda: old.is_idle)
    upload(new, began=10)
    upload(new, 20, began=10)
    old.add(30, zombie.save(30)[0])
    until(lambda: old.is_idle and zombie.record.state.is_lost)
    old.close(10)
    assert new.steps() == [10, 20] and whole(new)
    assert "another start" in zombie.record.state.words(0)


def test_one_commit_a_step_of_the_later_start(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run")
    upload(run, 10)
    (first,) = run.mirror.commits()
    run.mirror.put_commit(first)  # as after an answer that was lost
    later = MirrorCommit(**{**vars(first), "generation": 7, "upload": "000007-00000000"})
    run.mirror.put_commit(later)
    assert run.mirror.commit(10) == later
    with pytest.raises(OwnerLost):
        run.mirror.put_commit(first)
    assert run.mirror.commit(10) == later


def test_a_commit_after_the_mirror_was_lost_is_taken_back(
    tmp_path: Path, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, put = Run(tmp_path / "run"), Mirror.put_commit

    def late(self: Mirror, commit: MirrorCommit) -> None:
        MirrorLease(self, RUN, run_identity.read_id(run.path) or "").take()  # a new start, at the worst moment
        put(self, commit)

    monkeypatch.setattr(Mirror, "put_commit", late)
    upload(run, 10)
    assert run.steps() == [] and run.record.state.is_lost


def commit(generation: int, step: int, began: int) -> MirrorCommit:
    return MirrorCommit(step, RUN, generation, began, f"{generation:06d}-00000000", 0.0, {COMMIT: (1, "")}, {})


def test_what_a_run_has_gone_back_from_is_not_in_its_line() -> None:
    line = [commit(1, 10, 0), commit(1, 20, 0), commit(2, 30, 10), commit(3, 40, 30)]
    assert [(each.generation, each.step) for each in current_line(line)] == [(1, 10), (2, 30), (3, 40)]
    assert [each.step for each in current_line([commit(1, 90, 0), commit(2, 50, 40)])] == [50]
    assert current_line([]) == []


def test_abandoned_checkpoints_go_when_the_new_line_has_one(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run", keep=9)
    upload(run, 10, 20, 30)
    run.checkpoints.rewind(10, lambda line: None)
    again = run.leader(began=10)
    until(lambda: (found := read_owner(run.mirror)) is not None and not found[0].released)
    assert run.steps() == [10, 20, 30]  # nothing goes before something newer is there
    again.add(15, run.save(15)[0])
    until(lambda: again.is_idle)
    again.close(10)
    assert run.steps() == [10, 15] and whole(run)


def test_objects_of_others_are_refused_or_left_alone(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run", patience=0)
    for key in ("step-00000010/COMMIT", "OWNER"):
        store.inside.put(f"runs/one/{key}", b"{}")
        upload(run, 10)
        assert run.record.state.failed and store.names() - {f"runs/one/{key}"} == set()
        store.inside.delete(f"runs/one/{key}")
    store.inside.put("runs/one/step-00000010/notes.txt", b"mine")
    upload(run, 20)
    upload(run, 30, 40, 50)
    assert run.steps() == [40, 50] and "runs/one/step-00000010/notes.txt" in store.names()


def test_names_of_files_cannot_leave_the_folder(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run")
    upload(run, 10)
    key = "runs/one/step-00000010/COMMIT"
    values = orjson.loads(bytes(store.inside.get(key).bytes()))
    for files in ({"../x": [1, "0"]}, {"a/b": [1, "0"]}, {COMMIT: [-1, "0"]}, {}):
        store.inside.put(key, orjson.dumps({**values, "files": files}))
        with pytest.raises(UserError, match="is damaged"):
            Mirror.of(URL, ACCESS).commits()


def test_links_in_the_run_folder_are_not_uploaded(tmp_path: Path, store: Recorded) -> None:
    run = Run(tmp_path / "run")
    (tmp_path / "private").write_text("secret")
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").symlink_to(tmp_path / "private")
    upload(run, 10)
    assert run.mirror.commits()[0].run_files == {}


def test_a_forked_process_refuses(store: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores._Stores, "owner", 1)
    with pytest.raises(MachineError, match="was forked"):
        bucket.Mirror.of(URL, ACCESS).commits()


def test_a_mirror_without_checkpoints_is_free_when_its_owner_is_silent(
    tmp_path: Path, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    MirrorLease(Mirror.of(URL, ACCESS), "another-run", "folder").take()
    mine = MirrorLease(Mirror.of(URL, ACCESS), RUN, "mine")
    with pytest.raises(OwnedByOther, match="another run writes"):
        mine.take()
    monkeypatch.setattr(owner, "STALE_S", 0.0)
    mine.take()


class Killed(BaseException):
    """The process is gone."""


def test_a_kill_at_any_write_leaves_whole_checkpoints_and_the_next_start_goes_on(
    tmp_path: Path, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    steps, at = (10, 20), 0
    while True:
        at += 1
        run = Run(tmp_path / f"run-{at}", keep=1)
        count = 0

        def kill(action: str, key: str, at: int = at) -> bool:
            nonlocal count
            count += 1
            if count > at:
                raise Killed
            return False

        store.fail = kill
        found = run.leader()
        for step in steps:
            found.add(step, run.save(step)[0])
            until(lambda found=found: found.is_idle)
        found.close(10)
        store.fail = lambda action, key: False
        ended, reached = count <= at, run.steps()
        assert whole(run) and reached in ([], [10], [10, 20], [20]), at
        # A later start of the same run: on its checkpoints, without a trace of the killed one's files.
        upload(run, 40, began=max(reached, default=0))
        assert run.steps() == [40] and whole(run)
        (commit,) = run.mirror.commits()
        names = {f"runs/one/step-00000040/{commit.upload}/{name}" for name in commit.files}
        names |= {f"runs/one/step-00000040/{commit.upload}/run/{name}" for name in commit.run_files}
        assert store.names() == {*names, "runs/one/OWNER", "runs/one/step-00000040/COMMIT"}, at
        delete_objects([run.mirror.owner, *map(run.mirror.url.with_key, names)], ACCESS)
        delete_objects([run.mirror.commit_url(40)], ACCESS)
        if ended:
            break
    assert at > 12
