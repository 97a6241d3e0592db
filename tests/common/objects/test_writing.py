"""Objects that are written: whole files, one winner of many writers, and answers that are lost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from obstore.store import MemoryStore

from pipeline.common.errors import UserError
from pipeline.common.objects import stores, writing
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectMissing, StoreError
from pipeline.common.objects.retries import Abandoned
from pipeline.common.objects.stored import find_object
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.urls import ObjectUrl, parse_folder
from pipeline.common.objects.writing import (
    FileChanged,
    check_writing,
    create_object,
    delete_objects,
    put_file,
    read_small,
    replace_object,
)
from tests.common.objects.faults import Mode, faults
from tests.common.objects.seaweed import BUCKET, READER_KEY, READER_SECRET, environment, seaweed

ACCESS = RemoteAccess(request_bytes=2**20, patience_s=60, read_timeout_s=1)
FOLDER = parse_folder(f"s3://{BUCKET}/made/")
DATA = random.Random(0).randbytes(7 * 2**20 + 3)


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """Connections end with the tests."""
    yield
    stores._Stores.opened.clear()


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    use_store(FOLDER, ACCESS, store)
    return store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found.port


def content(url: ObjectUrl) -> bytes:
    found = find_object(url, ACCESS)
    return found.read(0, found.size)


@pytest.mark.parametrize("size", [0, 1, 2**20, len(DATA)])
def test_a_file_is_an_object(tmp_path: Path, memory: MemoryStore, size: int) -> None:
    path, url, came = tmp_path / "x", FOLDER.below("x"), []
    path.write_bytes(DATA[:size])
    expected = xxhash.xxh3_128_hexdigest(DATA[:size])
    stored, digest = put_file(path, url, ACCESS, expected=expected, advance=came.append)
    assert content(url) == DATA[:size] and stored == find_object(url, ACCESS)
    assert digest == expected and sum(came) == size


def test_a_file_with_other_bytes_is_not_written(tmp_path: Path, memory: MemoryStore) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with pytest.raises(FileChanged, match="x is not the file that it should be"):
        put_file(tmp_path / "x", FOLDER.below("x"), ACCESS, expected="0" * 32)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(FileChanged, match="it has 0 bytes"):
        put_file(tmp_path / "empty", FOLDER.below("x"), ACCESS, expected="0" * 32)
    with pytest.raises(FileNotFoundError):
        put_file(tmp_path / "y", FOLDER.below("x"), ACCESS)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(Abandoned):
        put_file(tmp_path / "x", FOLDER.below("x"), ACCESS, abandoned=given_up)
    assert read_small(FOLDER.below("x"), ACCESS) is None


def test_one_of_many_creates_an_object(memory: MemoryStore) -> None:
    url = FOLDER.below("manifest.json")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: create_object(url, str(number).encode(), ACCESS), range(8)))
    assert len(set(found)) == 1 and content(url) == found[0]


def test_a_version_is_replaced_once(memory: MemoryStore) -> None:
    url = FOLDER.below("latest")
    create_object(url, b"1", ACCESS)
    first = find_object(url, ACCESS)
    second = replace_object(url, b"2", ACCESS, first.version)
    assert second == find_object(url, ACCESS) and content(url) == b"2"
    assert replace_object(url, b"3", ACCESS, first.version) is None and content(url) == b"2"
    assert replace_object(url, b"2", ACCESS, first.version) == second  # as after an answer that was lost


def test_objects_are_removed(memory: MemoryStore) -> None:
    urls = [FOLDER.below(str(number)) for number in range(3)]
    for url in urls[1:]:
        create_object(url, b"x", ACCESS)
    delete_objects(urls, ACCESS)
    with pytest.raises(ObjectMissing):
        find_object(urls[1], ACCESS)


def test_a_store_that_lets_two_writers_create_an_object_is_refused(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writing(FOLDER, ACCESS)
    assert not [each for page in memory.list() for each in page]

    def overwrite(url: ObjectUrl, data: bytes, access: RemoteAccess) -> bytes:
        memory.put(url.key, data)
        return data

    monkeypatch.setattr(writing, "create_object", overwrite)
    with pytest.raises(StoreError, match="cannot refuse a second writer"):
        check_writing(FOLDER, ACCESS)
    assert not [each for page in memory.list() for each in page]


def test_folders_are_named() -> None:
    assert parse_folder("gs://b/x/y/") == parse_folder("gs://b/x/y")
    for text in ("https://host/x", "hf://datasets/x@main/y", "s3://b/"):
        with pytest.raises(UserError):
            parse_folder(text)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["500", "503", "reset", "truncation"])
def test_writes_arrive_once_whatever_happens_to_answers(
    server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    with faults(server, mode, 0.2) as proxy:
        proxy.methods = ("PUT", "POST", "GET", "DELETE")
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        folder = FOLDER.below(mode)
        winners = Counter[bytes]()
        for number in range(20):
            url = folder.below(f"commit-{number}")
            with ThreadPoolExecutor(8) as pool:
                found = set(pool.map(lambda who, url=url: create_object(url, b"%d" % who, ACCESS), range(8)))
            assert len(found) == 1 and content(url) in found
            winners.update(found)
        path = tmp_path / "x"
        path.write_bytes(DATA * 3)
        expected = xxhash.xxh3_128_hexdigest(DATA * 3)
        for number in range(5):
            stored, _ = put_file(path, folder.below(f"x-{number}"), ACCESS, expected=expected)
            assert stored == find_object(stored.url, ACCESS)
            assert xxhash.xxh3_128_hexdigest(stored.read(0, stored.size)) == expected
        version = find_object(url, ACCESS)
        for number in range(20):
            version = replace_object(url, b"r%d" % number, ACCESS, version.version) or version
            assert content(url) == b"r%d" % number
        delete_objects([folder.below(f"commit-{number}") for number in range(20)], ACCESS)
        assert read_small(url, ACCESS) is None and proxy.faults > 10


@pytest.mark.slow
def test_what_a_user_may_not_write(server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(f"http://127.0.0.1:{server}", READER_KEY, READER_SECRET).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "x").write_bytes(b"x")
    for attempt in (
        lambda: create_object(FOLDER.below("x"), b"x", ACCESS),
        lambda: put_file(tmp_path / "x", FOLDER.below("x"), ACCESS),
        lambda: check_writing(FOLDER, ACCESS),
    ):
        with pytest.raises(StoreError, match=r"cannot be written: access is denied .*s3:PutObject"):
            attempt()
