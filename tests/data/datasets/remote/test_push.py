"""Datasets in buckets: what was pushed and pulled is the dataset, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from obstore.store import MemoryStore

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash, put_sealed, sealed_bytes
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.urls import parse_folder
from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.remote import push as push_module
from pipeline.data.datasets.remote.pull import pull
from pipeline.data.datasets.remote.push import push
from pipeline.data.datasets.remote.sums import BLOCK_BYTES, BlockSums, SumWriter, sums_size
from pipeline.data.datasets.verify import verify
from pipeline.data.packing.command import pack
from tests.common.objects.faults import faults
from tests.common.objects.seaweed import BUCKET, SECRET_KEY, environment, seaweed

ACCESS = RemoteAccess(patience_s=60, read_timeout_s=1)
TO = parse_folder(f"s3://{BUCKET}/sets/web")
CONSOLE = Console(quiet=True)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    use_store(TO, ACCESS, store)
    larger = replace(ACCESS, request_bytes=push_module._PIECE_BYTES)
    use_store(TO, larger, store)
    yield store
    stores._Stores.opened.clear()


@pytest.fixture
def data(config: Config) -> Path:
    return config.data_dir


def objects(store: MemoryStore) -> dict[str, bytes]:
    return {each["path"]: bytes(store.get(each["path"]).bytes()) for page in store.list() for each in page}


def datasets(folder: Path) -> dict[str, bytes]:
    """Files of the datasets in a folder, without the receipts of their packs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for manifest in folder.rglob("manifest.json")
        for path in manifest.parent.rglob("*")
        if path.is_file() and "receipts" not in path.parts
    }


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
def test_hashes_of_blocks(size: int) -> None:
    data, writer = random.Random(size).randbytes(size), SumWriter()
    for at in range(0, size, 10_007):
        writer.update(data[at : at + 10_007])
    sums = writer.sums()
    assert len(sums) == sums_size(size) and writer.hexdigest() == xxhash.xxh3_64_hexdigest(data)
    blocks = BlockSums(sums, size)
    assert blocks.first_wrong(0, data) is None
    for number in range(len(sums) // 8 - 1):
        wrong = bytearray(data[number * BLOCK_BYTES :])
        assert blocks.first_wrong(number, wrong) is None
        wrong[-1] ^= 1
        assert blocks.first_wrong(number, wrong) == len(sums) // 8 - 2
    for bad, of in ((sums[:-1], size), (sums, size + BLOCK_BYTES), (bytes([sums[0] ^ 1]) + sums[1:], size)):
        with pytest.raises(ValueError):
            BlockSums(bad, of)


def test_a_dataset_comes_back_as_it_went(data: Path, memory: MemoryStore, tmp_path: Path) -> None:
    pack(data / "t" / "train", [256], workers=1)
    push(data, TO, ACCESS, CONSOLE, dry_run=True)
    assert not objects(memory)
    push(data, TO, ACCESS, CONSOLE)
    before = objects(memory)
    manifests = sorted(key for key in before if key.endswith("manifest.json"))
    assert manifests == [
        f"sets/web/{source}/{split}/manifest.json" for source in "jt" for split in ("heldout", "train")
    ]
    push(data, TO, ACCESS, CONSOLE)  # nothing is there to do
    assert objects(memory) == before
    pull(TO, tmp_path / "back", ACCESS, CONSOLE)
    assert datasets(tmp_path / "back") == datasets(data)
    assert not verify(tmp_path / "back").problems
    pull(TO.below("t/train"), tmp_path / "one", ACCESS, CONSOLE)
    assert Dataset.open(tmp_path / "one").fingerprint == Dataset.open(data / "t" / "train").fingerprint


def test_what_is_wrong_is_named(data: Path, memory: MemoryStore, tmp_path: Path) -> None:
    train = data / "t" / "train"
    push(train, TO, ACCESS, CONSOLE)
    with pytest.raises(UserError, match="has another dataset"):
        push(data / "t" / "heldout", TO, ACCESS, CONSOLE)
    with pytest.raises(UserError, match="has no dataset"):
        pull(TO.below("nothing"), tmp_path / "x", ACCESS, CONSOLE)
    shutil.copytree(data / "t" / "heldout", tmp_path / "other")
    with pytest.raises(UserError, match="another dataset than"):
        pull(TO, tmp_path / "other", ACCESS, CONSOLE)

    key = next(key for key in objects(memory) if key.endswith(".bin") and "/parts/" in key)
    whole = bytes(memory.get(key).bytes())
    memory.put(key, bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(UserError, match=r"\.bin is damaged: its bytes differ"):
        pull(TO, tmp_path / "back", ACCESS, CONSOLE)
    assert not (tmp_path / "back" / "manifest.json").exists()
    assert not [path for path in (tmp_path / "back").rglob("*") if path.name.startswith(".")]
    memory.delete(key)
    with pytest.raises(UserError, match="lacks 1 object"):
        pull(TO, tmp_path / "back", ACCESS, CONSOLE)
    push(train, TO, ACCESS, CONSOLE)  # it sends what is missing
    pull(TO, tmp_path / "back", ACCESS, CONSOLE)
    assert datasets(tmp_path / "back") == datasets(train)

    part = next(train.glob("parts/*/*.bin"))
    damaged = bytearray(part.read_bytes())
    damaged[0] ^= 1
    part.write_bytes(damaged)
    memory.delete([each["path"] for page in memory.list() for each in page])
    with pytest.raises(UserError, match="data verify"):
        push(train, TO, ACCESS, CONSOLE)
    assert not [key for key in objects(memory) if key.endswith("manifest.json")]


def test_the_same_dataset_with_other_files_is_left_alone(data: Path, memory: MemoryStore, tmp_path: Path) -> None:
    """Another version of the library writes the same tokenizer in other bytes."""
    train = data / "t" / "train"
    push(train, TO, ACCESS, CONSOLE)
    before = objects(memory)
    value = json.loads((train / "manifest.json").read_text())
    (train / "tokenizer.json").write_text(json.dumps(json.loads((train / "tokenizer.json").read_text())))
    value["files"]["tokenizer.json"] = f"{file_hash(train / 'tokenizer.json'):016x}"
    put_sealed(train / "manifest.json", value)
    with pytest.raises(UserError, match="in files of other bytes"):
        push(train, TO, ACCESS, CONSOLE)
    assert objects(memory) == before
    pull(TO, tmp_path / "back", ACCESS, CONSOLE)


def test_manifests_of_strangers(data: Path, memory: MemoryStore, tmp_path: Path) -> None:
    train = data / "t" / "train"
    (train / "packs" / "512").mkdir(parents=True)  # without an index: left out
    push(train, TO, ACCESS, CONSOLE)
    whole = bytes(memory.get("sets/web/manifest.json").bytes())
    value = json.loads(whole)
    memory.put("sets/web/manifest.json", json.dumps(value | {"text_bytes": 1}).encode())
    with pytest.raises(UserError, match=r"manifest\.json"):
        pull(TO, tmp_path / "back", ACCESS, CONSOLE)
    for name in ("manifest.json", "parts.bin", "x.sum", "../x"):
        memory.put("sets/web/manifest.json", sealed_bytes(value | {"files": {name: "0" * 16}}))
        with pytest.raises(UserError, match=re.escape(name)):
            pull(TO, tmp_path / "back", ACCESS, CONSOLE)
        assert not (tmp_path / "back").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found.port


def pushing(data: Path, endpoint: str, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline", "data", "push", str(data), f"s3://{BUCKET}/{name}"]
    with_keys = os.environ | environment(endpoint)
    return subprocess.Popen(command, env=with_keys, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_many_pushers_make_one_dataset(server: int, data: Path, tmp_path: Path) -> None:
    """Answers of a fifth of all writes are lost."""
    with faults(server, "reset", 0.2) as proxy:
        proxy.methods = ("PUT", "POST", "GET", "DELETE")
        running = [pushing(data, proxy.endpoint, "many") for _ in range(8)]
        said = [each.communicate(timeout=500)[0] for each in running]
        assert [each.returncode for each in running] == [0] * 8, said
        assert proxy.faults > 50 and SECRET_KEY not in "".join(said)
    check(server, "many", data, tmp_path)


@pytest.mark.slow
def test_a_push_that_was_killed_at_any_request_continues(server: int, config: Config, tmp_path: Path) -> None:
    """The manifest is there only if all else is, after each kill; and at the end the objects are those of one push."""
    data = config.data_dir / "t"
    running: list[subprocess.Popen[str]] = []
    kills = 0
    with faults(server, "replace") as proxy:
        proxy.replace = lambda: os.kill(running[-1].pid, signal.SIGKILL)
        for after in range(1, 400, 9):
            proxy.requests.clear()
            proxy.after = after
            running.append(pushing(data, proxy.endpoint, "killed"))
            said = running[-1].communicate(timeout=500)[0]
            if not running[-1].returncode:
                break
            assert running[-1].returncode == -signal.SIGKILL, said
            kills += 1
            keys = list_keys(server, "killed")
            for split in ("train", "heldout"):
                if f"killed/{split}/manifest.json" in keys:
                    shutil.rmtree(tmp_path / split, ignore_errors=True)
                    fetch(server, f"killed/{split}", tmp_path / split)
                    assert datasets(tmp_path / split) == datasets(data / split)
        else:
            raise AssertionError("it never ended")
    assert kills > 5
    check(server, "killed", data, tmp_path)


def list_keys(server: int, name: str) -> set[str]:
    from tests.common.objects.seaweed import Seaweed

    return {each["path"] for page in Seaweed(server).store().list(name) for each in page}


def fetch(server: int, name: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "data", "pull", f"s3://{BUCKET}/{name}", str(folder)]
    subprocess.run(
        command, env=os.environ | environment(f"http://127.0.0.1:{server}"), check=True, stdout=subprocess.DEVNULL
    )


def check(server: int, name: str, data: Path, tmp_path: Path) -> None:
    """What is in the bucket is the datasets, and nothing else."""
    fetch(server, name, tmp_path / "back")
    assert datasets(tmp_path / "back") == datasets(data) and not verify(tmp_path / "back").problems
    files = {key for key in list_keys(server, name) if not key.endswith(".sum") and "/.probe-" not in key}
    assert len(files) == len(datasets(data))
