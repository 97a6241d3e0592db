"""Mirrors of whole runs against a server that is not ours: kills, a dead server, credentials that expire, zombies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint.mirror.bucket import Mirror
from pipeline.train.checkpoint.mirror.commits import MirrorCommit
from pipeline.train.run.mirror_state import read_mirror_state
from tests import tiny
from tests.common.objects.faults import Faults, faults
from tests.common.objects.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed, environment, seaweed
from tests.train.runs import exact, train, weights_hash
from tests.waiting import until

ACCESS = RemoteAccess(patience_s=30)
STEPS = 6
STRIDE = 7
"""Of the kills: a run of the tests looks at every seventh request."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirrors")
    keys: dict[str, Any] = {
        "train.duration": f"{STEPS} steps",
        "train.checkpoint": {"every_steps": 2, "keep": 1},
        "launch.crash_loop": 1000,
    }
    preprocess(load(tiny.write_run(folder, keys)))
    return folder


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    """A run without a mirror."""
    return train(root, "straight")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found


@pytest.fixture
def proxy(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """A proxy before the server; this process talks to the server itself."""
    for name, value in environment(server.endpoint).items():
        monkeypatch.setenv(name, value)
    with faults(server.port) as found:
        found.methods = ("PUT", "POST", "GET", "DELETE")
        yield found
    stores._Stores.opened.clear()


def started(root: Path, run: str, url: str, endpoint: str, *more: str) -> subprocess.Popen[str]:
    """A training in a process of its own, which begins its logs in `run.log`."""
    keys = (f"run.dir={root / run}", f"train.checkpoint.mirror={{to: '{url}', keep: 1, patience_seconds: 120}}")
    options = [each for each in more if each.startswith("--")]
    given = [each for each in more if not each.startswith("--")]
    with open(root / f"{run}.log", "a") as log:
        return subprocess.Popen(
            tiny.command("train", root / "run.yaml", *keys, *given, *options),
            env={**os.environ, **environment(endpoint)},
            stdout=log,
            stderr=log,
            text=True,
        )


def finished(root: Path, run: str, url: str, endpoint: str, *more: str) -> Path:
    """A training that ends well; returns its folder."""
    code = started(root, run, url, endpoint, *more).wait(300)
    assert code == 0, (root / f"{run}.log").read_text()
    return root / run


def commits(url: str) -> list[MirrorCommit]:
    """The checkpoints in a mirror, each with all of its files."""
    mirror = Mirror.of(url, ACCESS)
    found = mirror.commits()
    for each in found:
        for name, (size, _) in each.files.items():
            key = mirror.files_url(each.step, each.upload).below(name)
            assert stores.open_store(key, ACCESS).head(key.key)["size"] == size
    return found


def killed_at(proxy: Faults, process: subprocess.Popen[str], request: int) -> int:
    """Kill a training when its n-th request comes to the proxy; returns its exit code."""
    proxy.mode, proxy.after, proxy.replace = "replace", len(proxy.requests) + request, process.kill
    code = process.wait(300)
    proxy.mode = "none"
    return code


@pytest.mark.slow
def test_a_run_that_is_killed_at_a_request_resumes_from_the_bucket(root: Path, straight: Path, proxy: Faults) -> None:
    at, code = 1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        url, run = f"s3://{BUCKET}/kills/{at}", f"kill-{at}"
        code = killed_at(proxy, started(root, run, url, proxy.endpoint), at)
        assert code in (0, -signal.SIGKILL), (root / f"{run}.log").read_text()
        before = [each.step for each in commits(url)]
        assert len(before) <= 2  # one more than is kept, while it is removed
        # The machine is gone, and with it the checkpoints; the folder's id alone tells whose mirror it is.
        folder = root / run
        kept = (folder / "folder-id").read_bytes()
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "folder-id").write_bytes(kept)
        again = finished(root, run, url, proxy.endpoint)
        since = max(before, default=0)
        assert exact(again)[since - STEPS if since else 0 :] == exact(straight)[since:] or since == STEPS
        assert weights_hash(again) == weights_hash(straight)
        assert [each.step for each in commits(url)] == [STEPS]
        at += STRIDE
    assert at > 3 * STRIDE


@pytest.mark.slow
def test_a_new_folder_continues_with_the_option(root: Path, straight: Path, proxy: Faults) -> None:
    url = f"s3://{BUCKET}/moved"
    run = finished(root, "moved", url, proxy.endpoint)
    mirror = Mirror.of(url, ACCESS)
    assert [each.step for each in commits(url)] == [STEPS] and exact(run) == exact(straight)
    shutil.rmtree(run)
    other = finished(root, "moved-to", url, proxy.endpoint, f"--from-mirror={url}")
    assert weights_hash(other) == weights_hash(straight) and exact(other) == exact(straight)
    assert mirror.commits()[0].step == STEPS


@pytest.mark.slow
def test_a_server_that_is_down_changes_neither_losses_nor_exit_code(root: Path, straight: Path) -> None:
    keys = ("train.checkpoint.mirror.patience_seconds=1",)
    run = finished(root, "down", f"s3://{BUCKET}/down", "http://127.0.0.1:1", *keys)
    assert exact(run) == exact(straight) and weights_hash(run) == weights_hash(straight)
    state = read_mirror_state(run)
    assert state is not None and state.waiting == STEPS and "no answer" in state.reason and state.since
    assert "is not in the mirror" in (root / "down.log").read_text()


@pytest.mark.slow
def test_credentials_that_expire_for_a_while(root: Path, straight: Path, proxy: Faults) -> None:
    url = f"s3://{BUCKET}/expired"
    proxy.mode, proxy.rate = "expired", 1.0
    process = started(root, "expired", url, proxy.endpoint)
    until(lambda: (state := read_mirror_state(root / "expired")) is not None and "expired" in state.reason)
    until(lambda: proxy.faults > 5)
    proxy.mode = "none"
    assert process.wait(300) == 0, (root / "expired.log").read_text()
    assert [each.step for each in commits(url)] == [STEPS]
    assert weights_hash(root / "expired") == weights_hash(straight)


@pytest.mark.guard
def test_a_zombie_and_a_new_run_leave_one_commit_a_step(root: Path, straight: Path, proxy: Faults) -> None:
    url, mirror = f"s3://{BUCKET}/zombie", Mirror.of(f"s3://{BUCKET}/zombie", ACCESS)
    process = started(root, "zombie", url, proxy.endpoint)
    stopped = threading.Event()

    def stop() -> None:
        process.send_signal(signal.SIGSTOP)
        stopped.set()

    # When the second commit is on its way.
    until(lambda: len(commits(url)) > 0)
    proxy.mode, proxy.after, proxy.replace = "replace", len(proxy.requests) + 3, stop
    until(stopped.is_set)
    proxy.mode = "none"
    stores.open_store(mirror.owner, ACCESS).delete(mirror.owner.key)  # as the message says
    new = finished(root, "new", url, proxy.endpoint, f"--from-mirror={url}")
    found = commits(url)
    process.send_signal(signal.SIGCONT)
    assert process.wait(300) == 0, (root / "zombie.log").read_text()
    assert [each.step for each in found] == [STEPS] and commits(url) == found
    assert weights_hash(new) == weights_hash(straight) and weights_hash(root / "zombie") == weights_hash(straight)
    state = read_mirror_state(root / "zombie")
    assert state is not None and state.is_lost


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_nothing_secret_is_left(root: Path, proxy: Faults, processes: int) -> None:
    url, name = f"s3://{BUCKET}/secrets-{processes}", f"secrets-{processes}"
    more = () if processes == 1 else ("launch.processes=2",)
    proxy.mode, proxy.rate = "503", 0.1
    run = finished(root, name, url, proxy.endpoint, *more)
    assert [each.step for each in commits(url)] == [STEPS] and proxy.faults
    files = [root / f"{name}.log", *(path for path in run.rglob("*") if path.is_file())]
    for path in files:
        data = path.read_bytes()
        assert SECRET_KEY.encode() not in data and ACCESS_KEY.encode() not in data, path
    # Each rank has uploaded its own, and fetches a share.
    assert len([each for each in commits(url)[0].files if each.endswith(".distcp")]) == processes
    before = weights_hash(run)
    shutil.rmtree(run / "checkpoints")
    assert weights_hash(finished(root, name, url, proxy.endpoint, *more)) == before
