"""Training data in a bucket: the same batches as from a disk, checked block by block, and copied to the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore
from rich.console import Console

from pipeline.cli.arguments import on_a_disk
from pipeline.common.errors import UserError
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.retries import COUNTS
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.urls import parse_folder, parse_url
from pipeline.data.datasets.open import open_datasets
from pipeline.data.datasets.remote.push import push
from pipeline.data.datasets.validate import check_datasets
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.loader import Loader, open_loader
from pipeline.data.loading.local_copy import copy_locally
from pipeline.data.loading.node_readers import NodeReader, live_readers
from pipeline.data.order.phases import plan_journal
from pipeline.data.plan.build import make_data_plan
from tests.data.loading.remote import config_of, write_dataset_of_parts
from tests.waiting import until

URL = "s3://bucket/data"
PHASES = {"phases": [{"until": "15 steps", "weights": {"a": 1}}, {"weights": {"b": 1}}]}


@pytest.fixture(scope="module", autouse=True)
def closed_stores() -> Iterator[None]:
    """Connections end with the tests."""
    yield
    stores._Stores.opened.clear()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: two sources of parts of some blocks."""
    folder = tmp_path_factory.mktemp("disk")
    write_dataset_of_parts(folder / "a" / "train", 4, 120_000, 1, pack=64)
    write_dataset_of_parts(folder / "b" / "train", 3, 50_001, 2, pack=64)
    return folder


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    for access in (RemoteAccess(), RemoteAccess(request_bytes=2**24)):
        use_store(parse_url(f"{URL}/x"), access, store)
    return store


@pytest.fixture
def bucket(disk: Path, memory: MemoryStore) -> MemoryStore:
    push(disk, parse_folder(URL), RemoteAccess(), Console(quiet=True))
    return memory


def loaders(config: Any, ranks: int = 1) -> list[Loader]:
    datasets = open_datasets(config, "train")
    check_datasets(datasets)
    return [open_loader(config, datasets, dp_rank=rank, dp_size=ranks) for rank in range(ranks)]


def equal(a: StepData, b: StepData) -> bool:
    assert (a.order_hash, a.data_hash, a.valid_targets) == (b.order_hash, b.data_hash, b.valid_targets)
    for one, other in zip(a.micro_batches, b.micro_batches, strict=True):
        for name in ("tokens", "targets", "weight", "starts", "samples"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    return True


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_batches_are_those_of_the_disk(disk: Path, bucket: MemoryStore, tmp_path: Path, packing: str) -> None:
    keys: dict[str, Any] = {"loader": {"packing": packing}}
    stage = {"dir": str(tmp_path / "node"), "ahead": 5}
    on_disk = loaders(config_of(tmp_path, disk, **keys), 2)
    remote = loaders(config_of(tmp_path, URL, stage=stage, **keys), 2)
    for a, b in zip(on_disk, remote, strict=True):
        assert all(equal(x, y) for x, y in zip(a.iterate(0, 30), b.iterate(0, 30), strict=True))
        assert equal(a.batches(17), b.batches(17))  # any step, in any order
    assert not list((tmp_path / "node").rglob("parts/*/*.bin"))


def copies(node: Path) -> list[Path]:
    """Tokens of parts that were copied."""
    return sorted(node.rglob("parts/*/*.bin"))


def slowly(steps: Iterator[StepData], node: Path, count: int) -> Iterator[StepData]:
    """Steps, of which the sixth waits until parts were copied."""
    for number, step in enumerate(steps):
        if number == 5:
            until(lambda: len(copies(node)) >= count)
        yield step


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_parts_are_copied_while_they_are_read(disk: Path, bucket: MemoryStore, tmp_path: Path, read: str) -> None:
    node = tmp_path / "node"
    config = config_of(tmp_path, URL, stage={"data": "local", "dir": str(node)}, loader={"read": read})
    (on_disk,), (remote,) = loaders(config_of(tmp_path, disk)), loaders(config)
    steps = slowly(remote.iterate(0, 30), node, 5)
    assert all(equal(x, y) for x, y in zip(on_disk.iterate(0, 30), steps, strict=True))
    files = {path.read_bytes() for path in disk.rglob("parts/*/*.bin")} - {b""}
    assert {path.read_bytes() for path in copies(node)} == files
    # The next start reads them, and nothing else of the bucket but manifests.
    before = COUNTS.bytes
    (again,) = loaders(config)
    assert all(equal(x, y) for x, y in zip(on_disk.iterate(0, 30), again.iterate(0, 30), strict=True))
    assert COUNTS.bytes - before < 20_000


def test_a_small_cache_stays_within_its_bound(disk: Path, bucket: MemoryStore, tmp_path: Path) -> None:
    node, most = tmp_path / "node", 500_000
    config = config_of(tmp_path, URL, stage={"data": "local", "dir": str(node), "size": most})
    (on_disk,), (remote,) = loaders(config_of(tmp_path, disk)), loaders(config)
    steps = slowly(remote.iterate(0, 30), node, 2)
    for x, y in zip(on_disk.iterate(0, 30), steps, strict=True):
        assert equal(x, y)
        assert sum(path.stat().st_size for path in copies(node)) <= most
    assert copies(node)


def test_what_no_later_step_reads_gives_way(disk: Path, bucket: MemoryStore, tmp_path: Path) -> None:
    """Source a is read in the first phase, b in the second; the cache has room for a part of a, or for all of b."""
    node, blend = tmp_path / "node", PHASES
    stage = {"data": "local", "dir": str(node), "size": 300_000}
    config = config_of(tmp_path, URL, stage=stage, blend=blend)
    (on_disk,), (remote,) = loaders(config_of(tmp_path, disk, blend=blend)), loaders(config)
    of_b = {path.read_bytes() for path in (disk / "b").rglob("parts/*/*.bin")} - {b""}
    for number, (x, y) in enumerate(zip(on_disk.iterate(0, 30), remote.iterate(0, 30), strict=True)):
        assert equal(x, y)
        assert sum(path.stat().st_size for path in copies(node)) <= 300_000
        if number == 10:
            until(lambda: len(copies(node)) == 1)
        if number == 25:
            until(lambda: of_b <= {path.read_bytes() for path in copies(node)})


def test_what_another_run_reads_stays(disk: Path, bucket: MemoryStore, tmp_path: Path) -> None:
    node = tmp_path / "node"
    config = config_of(tmp_path, URL, stage={"data": "local", "dir": str(node), "size": 300_000}, blend=PHASES)
    (remote,) = loaders(config)
    folder = open_datasets(config, "train")["a"].folder
    for number, _ in enumerate(remote.iterate(0, 30)):
        if number == 10:
            (kept,) = until(lambda: copies(node))
            other = NodeReader(folder, tmp_path / "other", 0, 0)
            assert {reader.run for reader in live_readers(folder)} == {str(tmp_path / "other"), str(config.run.dir)}
    assert kept in copies(node)
    other.close()
    assert not list(live_readers(folder))


def test_a_run_from_a_disk_takes_the_copies_over(disk: Path, bucket: MemoryStore, tmp_path: Path) -> None:
    node = tmp_path / "node"
    stage = {"data": "local", "dir": str(node)}
    (remote,) = loaders(config_of(tmp_path, URL, names="a", stage=stage))
    list(slowly(remote.iterate(0, 30), node, 3))
    of_a = {path: path.stat().st_ino for path in copies(node)}
    config = config_of(tmp_path, disk, names="a", stage=stage)
    datasets = open_datasets(config, "train")
    copy_locally(config, datasets, plan_journal(config, datasets))
    # They do not give way any more, nor count as copies of the run from the bucket.
    (remote,) = loaders(config_of(tmp_path, URL, stage=stage | {"size": 300_000}, blend=PHASES))
    list(slowly(remote.iterate(0, 30), node, 5))
    assert of_a.items() <= {path: path.stat().st_ino for path in copies(node)}.items()


@pytest.mark.parametrize("copied", [False, True])
def test_a_replaced_object_is_refused_by_name(disk: Path, bucket: MemoryStore, tmp_path: Path, copied: bool) -> None:
    stage = {"data": "local" if copied else "shared", "dir": str(tmp_path / "node")}
    (remote,) = loaders(config_of(tmp_path, URL, names="a", stage=stage))
    for key in keys_of(bucket, ".bin"):
        data = bytearray(bytes(bucket.get(key).bytes()))
        data[::100] = bytes(len(data[::100]))
        bucket.put(key, bytes(data))
    with pytest.raises(UserError, match=r"s3://bucket/data/a/train/\w+/parts/00000/0000000\d.bin: .* not those"):
        list(remote.iterate(0, 30))
    assert not copies(tmp_path / "node")


def test_the_same_bytes_under_another_etag_are_read(disk: Path, bucket: MemoryStore, tmp_path: Path) -> None:
    (on_disk,) = loaders(config_of(tmp_path, disk))
    (remote,) = loaders(config_of(tmp_path, URL, stage={"dir": str(tmp_path / "node")}))
    for key in keys_of(bucket, ".bin"):
        bucket.put(key, bytes(bucket.get(key).bytes()))
    assert all(equal(x, y) for x, y in zip(on_disk.iterate(0, 5), remote.iterate(0, 5), strict=True))


@pytest.mark.parametrize(
    "suffix", [".idx", "parts/00000/00000000.bin.sum", "parts.bin", "tokenizer.json", "packs.json"]
)
def test_what_readers_need_first_is_compared(disk: Path, bucket: MemoryStore, tmp_path: Path, suffix: str) -> None:
    key = keys_of(bucket, suffix)[0]
    data = bytes(bucket.get(key).bytes())
    bucket.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    keys: dict[str, Any] = {"loader": {"packing": "best_fit"}}
    config = config_of(tmp_path, URL, stage={"dir": str(tmp_path / "node")}, **keys)
    with pytest.raises(UserError, match=key):
        loaders(config)
    bucket.put(key, data)
    loaders(config)


def test_no_dataset(memory: MemoryStore, tmp_path: Path) -> None:
    config = config_of(tmp_path, URL, stage={"dir": str(tmp_path / "node")})
    with pytest.raises(UserError, match="s3://bucket/data/a has no split 'train'"):
        open_datasets(config, "train")


def test_the_plan_counts_requests(disk: Path, bucket: MemoryStore, tmp_path: Path) -> None:
    stage = {"dir": str(tmp_path / "node")}
    keys: dict[str, Any] = {"validation": {"samples": 0}, "loader": {"packing": "best_fit"}}
    config = config_of(tmp_path, URL, names="a", stage=stage, **keys)
    before = COUNTS.sent
    open_datasets(config, "train")
    opened = COUNTS.sent - before
    (row,) = make_data_plan(config).remote
    assert row.open_requests == opened - 2  # a look whether there is the split
    assert (row.parts, row.bytes, row.copy_requests, row.range_requests) == (4, 720_000, 3, 240)


def test_commands_that_need_files_refuse_urls() -> None:
    with pytest.raises(UserError, match="pipeline data pull s3://bucket/a/train FOLDER"):
        on_a_disk(Path("s3://bucket/a/train"))
    assert on_a_disk(Path("s3/a")) == Path("s3/a")


def keys_of(bucket: MemoryStore, suffix: str) -> list[str]:
    return sorted(meta["path"] for page in bucket.list() for meta in page if meta["path"].endswith(suffix))
