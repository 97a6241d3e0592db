"""Objects: URLs, listings, ranges of one version, and failures, in memory and from a small server."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from pipeline.common.errors import UserError
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.failures import ObjectChanged, ObjectMissing, StoreError, failure, kind_of
from pipeline.common.objects.listing import find_objects, matches
from pipeline.common.objects.partial_copy import PartialCopy
from pipeline.common.objects.retries import Abandoned
from pipeline.common.objects.stored import StoredObject, find_object
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.stream import ObjectStream
from pipeline.common.objects.urls import check_endpoint, is_url, parse_url
from pipeline.data.sources.compression import Decompressed, StreamError
from tests.common.objects.faults import MODES, Mode, faults
from tests.common.objects.hub import COMMIT, hub
from tests.common.objects.web import Web, web

ACCESS = RemoteAccess(request_bytes=2**17, patience_s=20, read_timeout_s=0.5)
DATA = random.Random(0).randbytes(3_000_001)


@pytest.fixture(scope="module", autouse=True)
def closed_stores() -> Iterator[None]:
    """Connections end with the tests."""
    yield
    stores._Stores.opened.clear()


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    use_store(parse_url("s3://bucket/x"), ACCESS, store)
    return store


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as served:
        yield served


def stored(memory: MemoryStore, key: str = "a.bin", data: bytes = DATA) -> StoredObject:
    memory.put(key, data)
    return find_object(parse_url(f"s3://bucket/{key}"), ACCESS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://bucket/a b%20c/[x]#y?.txt", ("s3", "bucket", "a b%20c/[x]#y?.txt")),
        ("gs://bucket/x", ("gs", "bucket", "x")),
        ("https://host:81/a%20b/x.txt", ("https", "host:81", "a b/x.txt")),
        ("http://localhost/x", ("http", "localhost", "x")),
        ("hf://datasets/org/set@refs%2Fx/a b/%.txt", ("hf", "datasets/org/set@refs%2Fx", "a b/%.txt")),
        ("hf://datasets/set@main/*.txt", ("hf", "datasets/set@main", "*.txt")),
    ],
)
def test_urls(text: str, parts: tuple[str, str, str]) -> None:
    found = parse_url(text)
    assert (found.scheme, found.place, found.key) == parts and is_url(text)
    assert str(found) == text and parse_url(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        *("hf://datasets/org/set/x", "hf://org/set@main/x", "hf://datasets/org/set@main"),
        *("s3://bucket", "s3://bucket/", "s3:///x", "s3://bucket//x", "s3://bucket/../x", "ftp://host/x"),
        *("http://host/x", "s3://me:hunter2hunter2@bucket/x", "https://host/x?X-Amz-Signature=hunter2hunter2"),
    ],
)
def test_urls_that_are_refused(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_url(text)
    assert "hunter2" not in str(refused.value)


def test_endpoints() -> None:
    assert check_endpoint("https://objects.example.org/") == "https://objects.example.org"
    for text in ("objects.example.org", "s3://x", "https://a:hunter2hunter2@x", "https://x/?hunter2=hunter2hunter2"):
        with pytest.raises(UserError) as refused:
            check_endpoint(text)
        assert "hunter2hunter2" not in str(refused.value)


def test_globs_mean_what_they_mean_on_a_disk(tmp_path: Path, memory: MemoryStore) -> None:
    from pipeline.data.sources.globs import find_files

    keys = ["a.txt", "b/a.txt", "b/c/a.txt", "b/.h/a.txt", ".a.txt", "b/x y%20.txt", "bc/a.jsonl", "b/[1].txt"]
    for key in keys:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text(key)
        memory.put(f"root/{key}", key.encode())
    globs = "* ** **/*.txt b/** b/* ?/*.txt b*/a* **/c/* b/[1].txt b/.h/* */**/a.txt".split()
    for glob in globs:
        on_disk = find_files([f"{tmp_path}/{glob}"], [], "data.sources.0")
        found = find_files([f"s3://bucket/root/{glob}"], [], "data.sources.0", remote=ACCESS)
        assert [(each.name, each.size) for each in found] == [(each.name, each.size) for each in on_disk], glob
        assert all(each.version and each.path.startswith("s3://bucket/root/") for each in found)
    with pytest.raises(UserError, match="no object"):
        find_files(["s3://bucket/root/*.zst"], [], "data.sources.0", remote=ACCESS)


def test_parts_of_globs() -> None:
    assert matches(["**", "x"], ["a", "b", "x"]) and matches(["**", "x"], ["x"])
    assert not matches(["**", "x"], [".a", "x"]) and not matches(["*"], [".x"]) and matches([".*"], [".x"])


def test_a_marker_of_a_folder_is_no_object(memory: MemoryStore) -> None:
    memory.put("f/dir", b"")
    memory.put("f/dir/x.txt", b"1")
    memory.put("f/empty.txt", b"")
    found = find_objects(parse_url("s3://bucket/f/**/*"), ACCESS)
    assert [name for name, _ in found] == ["dir/x.txt", "empty.txt"]


def test_a_stream_is_the_object_wherever_it_begins_and_is_kept(memory: MemoryStore) -> None:
    found, choose = stored(memory), random.Random(1)
    assert io.BufferedReader(ObjectStream(found), 2**16).read() == DATA
    stream = ObjectStream(found, keeps=True)
    at = kept = 0
    for step in range(300):
        got = stream.read(choose.randrange(1, 60_000)) or b""
        assert got == DATA[at : at + len(got)] and (got or at == len(DATA))
        at += len(got)
        if step % 7 == 0:
            kept = max(kept, at - 1000)
            stream.keep_from(kept)
        if step % 7 == 6:
            at = stream.seek(kept)
    assert stream.fetch_again(kept) and stream.read(10) == DATA[kept : kept + 10]


def test_ranges_end_about_where_reading_does(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = stored(memory), list[tuple[int, int]]()
    read = StoredObject.read

    def counting(self: StoredObject, start: int, end: int, abandoned: Any = None) -> bytes:
        asked.append((start, end))
        return read(self, start, end, abandoned)

    monkeypatch.setattr(StoredObject, "read", counting)
    with ObjectStream(found, stop=2_000_000) as stream:
        stream.seek(1_000_000)
        assert io.BufferedReader(stream, 2**14).read(1_000_050) == DATA[1_000_000:2_000_050]
    asked.sort()
    assert asked[0][0] == 1_000_000 and all(a[1] == b[0] for a, b in itertools.pairwise(asked))
    assert 2_000_050 <= asked[-1][1] <= 2_000_050 + 2**17
    asked.clear()
    with ObjectStream(found, small=100) as stream:
        assert stream.read(1000) == DATA[:100]
    assert asked == [(0, 100)]


def test_a_partial_copy_fetches_each_byte_once(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    found, choose, fetched = stored(memory), random.Random(2), bytearray(len(DATA))
    read = StoredObject.read

    def counting(self: StoredObject, start: int, end: int, abandoned: Any = None) -> bytes:
        fetched[start:end] = bytes(each + 1 for each in fetched[start:end])
        return read(self, start, end, abandoned)

    monkeypatch.setattr(StoredObject, "read", counting)
    with PartialCopy(found) as copy:
        for _ in range(200):
            at, size = choose.randrange(len(DATA)), choose.randrange(1, 50_000)
            copy.seek(at)
            assert copy.read(size) == DATA[at : at + size]
        copy.need([(0, len(DATA))])
        assert set(fetched) == {1} and copy.whole()[:] == DATA
        copy.forget()
        copy.seek(5)
        assert copy.read(3) == DATA[5:8]


@pytest.mark.parametrize("size", [len(DATA), 17])
def test_a_changed_object_is_refused_by_name(memory: MemoryStore, size: int) -> None:
    """Also if another version of the same size took its place."""
    found = stored(memory)
    stream = ObjectStream(found)
    assert stream.read(10) == DATA[:10]
    memory.put("a.bin", b"x" * size)
    with pytest.raises(ObjectChanged, match=r"s3://bucket/a.bin changed: it had 3,000,001 bytes"):
        while stream.read(2**20):
            pass
    with pytest.raises(ObjectChanged):
        found.check()
    with pytest.raises(ObjectMissing, match="no such object"):
        find_object(parse_url("s3://bucket/none"), ACCESS)


@pytest.mark.parametrize("times", [0, 1, 5])
def test_bits_that_change_on_the_way_are_fetched_again(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Where a checksum finds them; bits of the object itself are the same each time."""
    members = [gzip.compress(DATA[:500_000], 1), gzip.compress(DATA[500_000:], 1)]
    found, answers = stored(memory, "a.gz", b"".join(members)), itertools.count()
    read = StoredObject.read

    def damaging(self: StoredObject, start: int, end: int, abandoned: Any = None) -> bytes:
        data = bytearray(read(self, start, end, abandoned))
        if start <= len(members[0]) + 1000 < end and (number := next(answers)) < times:
            data[len(members[0]) + 1000 - start + number] ^= 1
        return bytes(data)

    monkeypatch.setattr(StoredObject, "read", damaging)
    assert Decompressed(ObjectStream(found, keeps=True), "gzip").read() == DATA
    assert next(answers) == times + 1
    broken = bytearray(b"".join(members))
    broken[len(members[0]) + 1000] ^= 1
    stream = Decompressed(ObjectStream(stored(memory, "b.gz", bytes(broken)), keeps=True), "gzip")
    with pytest.raises(StreamError, match="damaged gzip file"):
        while stream.read(2**20):
            pass


def test_an_empty_object(memory: MemoryStore) -> None:
    found = stored(memory, "empty", b"")
    assert found.size == 0 and ObjectStream(found).read(10) == b""
    found.check()


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", "denied", "s3:GetObject"),
        (403, "SignatureDoesNotMatch", "unauthenticated", "does not accept the credentials"),
        (403, "RequestTimeTooSkewed", "clock", "clock of this machine"),
        (400, "ExpiredToken", "expired", "have expired"),
        (404, "NoSuchBucket", "missing", "no such bucket"),
        (412, "PreconditionFailed", "changed", "changed since it was listed"),
        (416, "InvalidRange", "no range", "copy it"),
        (301, "PermanentRedirect", "refused", "refuses the request"),
        (503, "SlowDown", "passing", "no answer"),
        (429, "", "passing", "no answer"),
        (500, "InternalError", "passing", "no answer"),
    ],
)
def test_what_failures_mean(status: int, code: str, kind: str, words: str) -> None:
    error = obstore.exceptions.GenericError(
        f"Generic S3 error: Error performing GET http://h/b/k?X-Amz-Signature=hunter2 in 1ms - Server returned non-2xx "
        f"status code: {status} X: <Error><Code>{code}</Code></Error>\n\nDebug source:\n status code: 418"
    )
    assert kind_of(error)[0] == kind
    message = str(failure(error, parse_url("s3://bucket/key"), "read"))
    assert words in message and "s3://bucket/key" in message and "hunter2" not in message


def test_a_machine_without_credentials_is_told_so() -> None:
    error = obstore.exceptions.GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 5s")
    assert "no credentials were found" in str(failure(error, parse_url("s3://bucket/key"), "list"))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("corruption", "slow")])
def test_faults_of_a_network_change_nothing(server: Web, mode: Mode) -> None:
    """Each answer in three fails. What came before a fault is not asked for again."""
    server.objects["a b%.bin"] = DATA
    with faults(server.port, mode, rate=0.3) as proxy:
        url = parse_url(f"http://127.0.0.1:{proxy.port}/a%20b%25.bin")
        with ObjectStream(find_object(url, ACCESS)) as stream:
            assert io.BufferedReader(stream, 2**16).read() == DATA
        assert proxy.faults > 3
        if mode != "reset":  # whose bytes the proxy has, and nobody else
            assert proxy.bytes <= 1.02 * len(DATA) + proxy.faults * 2**16


def test_patience_ends(server: Web) -> None:
    server.objects["x"] = DATA
    hasty = RemoteAccess(patience_s=0.2)
    found = find_object(parse_url(server.url("x")), hasty)
    server.refusals = [(503, "")] * 1000
    with pytest.raises(StoreError, match=r"no answer \(503\) in \d+ attempts"):
        found.read(0, 10)
    server.refusals = [(403, "<Code>AccessDenied</Code>")]  # credentials may have been renewed in between
    assert found.read(0, 10) == DATA[:10]
    server.refusals = [(403, "<Code>AccessDenied</Code>")] * 5
    with pytest.raises(StoreError, match="access is denied"):
        found.read(0, 10)
    assert len(server.refusals) == 3
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(Abandoned):
        found.read(0, 10, abandoned)


def test_credentials_in_a_profile_need_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install boto3"):
        find_object(parse_url("s3://bucket-of-a-profile/x"), ACCESS)


def test_nothing_of_credentials_is_sent_anonymously(server: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects["bucket/x"] = DATA
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAFAKEFAKEFAKEFAKE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "planted")
    for anonymous in (True, False):
        server.requests.clear()
        find_object(parse_url("s3://bucket/x"), RemoteAccess(endpoint=server.url().rstrip("/"), anonymous=anonymous))
        headers = server.requests[0][2]
        assert ({"authorization", "x-amz-security-token"} <= set(headers)) is not anonymous


def test_a_key_with_an_empty_folder_is_named_as_the_reason(server: Web) -> None:
    server.pages["/bucket"] = (
        "<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount><MaxKeys>9</MaxKeys><IsTruncated>false</IsTruncated>"
        "<Contents><Key>a//b.txt</Key><LastModified>2026-11-30T09:00:00.000Z</LastModified><ETag>1</ETag><Size>1</Size>"
        "</Contents></ListBucketResult>"
    )
    access = RemoteAccess(endpoint=server.url().rstrip("/"), anonymous=True)
    with pytest.raises(StoreError, match="empty folder name"):
        find_objects(parse_url("s3://bucket/a/*"), access)
    server.pages["/bucket"] = server.pages["/bucket"].replace("a//b", "a/b")
    ((name, found),) = find_objects(parse_url("s3://bucket/a/*"), access)
    assert (name, found.version) == ("b.txt", '"1"')


def test_servers_that_cannot_tell_versions_or_ranges(server: Web) -> None:
    server.objects["x"] = DATA
    url = parse_url(server.url("x"))
    server.weak = True
    with pytest.raises(StoreError, match="strong ETag"):
        find_object(url, ACCESS)
    server.weak, server.no_ranges = False, True
    with pytest.raises(StoreError, match="copy it"):
        find_object(url, ACCESS)
    with pytest.raises(UserError, match="cannot be listed"):
        find_objects(parse_url(server.url("*.txt")), ACCESS)


def test_a_redirect_to_another_host_gets_no_signature(server: Web) -> None:
    """The header of the signature is dropped. That of the session token is of no use without it."""
    server.objects["bucket/x"] = DATA
    with web() as other:
        other.redirect = server.url().rstrip("/").replace("127.0.0.1", "localhost")
        program = (
            "from pipeline.common.objects.stored import *\n"
            f"print(find_object(parse_url('s3://bucket/x'), RemoteAccess(endpoint='http://127.0.0.1:{other.port}')).size)"
        )
        secret = {"AWS_ACCESS_KEY_ID": "AKIAFAKEFAKEFAKEFAKE", "AWS_SECRET_ACCESS_KEY": "planted"}
        assert run(program, secret).stdout.split() == [str(len(DATA))]
        assert "authorization" in other.requests[0][2] and "authorization" not in server.requests[0][2]


def test_files_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed at a commit, and read where the hub sends requests on to, which does not get the token."""
    content = {"en/a b%.jsonl": DATA, "en/2.jsonl": b"2", "en/.x.jsonl": b"3", "de/1.jsonl": b"4", "README.md": b"5"}
    monkeypatch.setenv("HF_TOKEN", "hf_plantedplantedplantedplantedplanted")
    # Other tests keep the library from the network by a variable, which it reads when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with hub(content) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.site.url().rstrip("/"))
        found = dict(find_objects(parse_url("hf://datasets/org/set@main/*/*.jsonl"), ACCESS))
        assert list(found) == ["de/1.jsonl", "en/2.jsonl", "en/a b%.jsonl"]
        stored = found["en/a b%.jsonl"]
        assert str(stored.url) == f"hf://datasets/org/set@{COMMIT}/en/a b%.jsonl" and stored.size == len(DATA)
        assert io.BufferedReader(ObjectStream(stored)).read() == DATA
        asked = [headers.get("authorization", "") for _, path, headers in served.site.requests if "resolve" in path]
        assert asked and all("hf_planted" in each for each in asked)
        assert not any("authorization" in headers for _, _, headers in served.files.requests)
        assert [name for name, _ in find_objects(parse_url("hf://datasets/org/set@main/de/1.jsonl"), ACCESS)] == [
            "1.jsonl"
        ]
        for url, words in (
            ("hf://datasets/org/set@main/de/none.jsonl", "no such file"),
            ("hf://datasets/org/set@other/de/1.jsonl", "check name and revision"),
            ("hf://datasets/org/none@main/*.jsonl", "check name and revision"),
        ):
            with pytest.raises(ObjectMissing, match=words):
                find_objects(parse_url(url), ACCESS)


def run(program: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    values = {**os.environ, **(environment or {})}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=values, timeout=300)


def test_after_a_fork_there_is_an_error_and_no_hang(server: Web) -> None:
    server.objects["x"] = b"123"
    program = (
        "import os\nfrom pipeline.common.objects.stored import *\n"
        f"found = find_object(parse_url({server.url('x')!r}), RemoteAccess())\n"
        "if os.fork() == 0:\n"
        "    try:\n        found.read(0, 1)\n"
        "    except Exception as error:\n        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\nprint(found.read(0, 3))\n"
    )
    done = run(program)
    assert "which was forked from process" in done.stdout and "b'123'" in done.stdout, done.stderr


def test_without_the_extra_it_is_named() -> None:
    program = (
        "import sys\nsys.modules['obstore'] = None\n"
        "from pipeline.common.objects.stored import *\n"
        "try:\n    find_object(parse_url('s3://bucket/x'), RemoteAccess())\n"
        "except Exception as error:\n    print(error)\n"
    )
    assert "pip install 'pretraining-pipeline[cloud]'" in run(program).stdout
