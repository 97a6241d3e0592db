"""Training data in a bucket: the same batches as from a disk, checked block by block, and copied to the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore

from pipeline.common.errors import UserError
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.retries import COUNTS
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.urls import parse_url
from pipeline.data.datasets.open import open_datasets
from pipeline.data.datasets.validate import check_datasets
from pipeline.data.loading.batch import StepData
from pipeline.data.loading.loader import Loader, open_loader
from tests.data.loading.remote import config_of, put_datasets, write_dataset_of_parts

URL = "s3://bucket/data"


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
    use_store(parse_url(f"{URL}/x"), RemoteAccess(), store)
    return store


@pytest.fixture
def bucket(disk: Path, memory: MemoryStore) -> MemoryStore:
    put_datasets(disk, "data", memory.put)
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
