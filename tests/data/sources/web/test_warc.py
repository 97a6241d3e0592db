"""WARC and WET files against warcio, which writes them and reads them back."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from warcio.archiveiterator import ArchiveIterator
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from pipeline.common.errors import UserError
from pipeline.config.data import SourceConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.source_location import Origins
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import EMPTY, NO_PAGE, NOT_UTF8
from pipeline.data.sources.web import pages
from pipeline.data.sources.web.pages import WebPage, characters
from pipeline.data.sources.web.warc import WarcReader
from tests.data.reading import check_chain, check_resume, damage, files, read, units
from tests.data.runs import make_config, text, tree

KEPT = ("url", "date", "record_id", "WARC-Identified-Content-Language")
WARC = WarcReader("text", "id", KEPT, html="trafilatura")
TEXTS = WarcReader("text", "id", KEPT)


class Writer:
    """A file that warcio writes."""

    def __init__(self, gzip: bool = True, version: str = "1.0") -> None:
        self.out = io.BytesIO()
        self._writer = WARCWriter(self.out, gzip=gzip, warc_version=version)

    def add(self, kind: str, number: int, body: bytes, **options: Any) -> None:
        """A record. `http`: its header; `fields`: of the record besides those that it needs."""
        http = options.pop("http", None)
        record = self._writer.create_warc_record(
            f"http://a.example/{number}",
            kind,
            payload=io.BytesIO(body),
            http_headers=http and StatusAndHeaders(http[0], http[1], protocol="HTTP/1.1"),
            warc_headers_dict={"WARC-Date": f"2024-01-01T00:00:{number % 60:02d}Z", **options.pop("fields", {})},
            **options,
        )
        self._writer.write_record(record)

    def page(
        self, number: int, body: bytes, content: str = "text/html", *more: tuple[str, str], status: str = "200 OK"
    ):
        """A response."""
        self.add("response", number, body, http=(status, [("Content-Type", content), *more]))

    def save(self, path: Path) -> Path:
        """Write it."""
        path.write_bytes(self.out.getvalue())
        return path


def _wet(count: int = 40, seed: int = 1, **options: Any) -> Writer:
    """A file as WET files are: first what the file is, then texts."""
    chance, writer = random.Random(seed), Writer(**options)
    writer.add("warcinfo", 0, b"software: x\r\n", warc_content_type="application/warc-fields")
    for number in range(count):
        language = {"WARC-Identified-Content-Language": "eng"} if number % 2 else {}
        body = f"{number} {text(chance, chance.randint(1, 40))}\r\n\r\n".encode()
        writer.add("conversion", number, body, warc_content_type="text/plain", fields=language)
    return writer


def _by_warcio(path: Path) -> list[dict[str, Any]]:
    found = []
    with path.open("rb") as file:
        for record in ArchiveIterator(file):
            if record.rec_type in ("response", "conversion"):
                names = ["WARC-Target-URI", "WARC-Date", "WARC-Record-ID", "WARC-Identified-Content-Language"]
                values = dict(zip(KEPT, map(record.rec_headers.get_header, names), strict=True))
                body = record.content_stream().read().decode()
                found.append({"text": body, "id": values["record_id"], **{k: v for k, v in values.items() if v}})
    return found


def _given(documents: Any) -> list[dict[str, Any]]:
    return [{"text": d.text, "id": d.id, **json.loads(d.metadata)} for d in documents]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("packed", [True, False])
def test_texts_are_those_that_warcio_reads(tmp_path: Path, packed: bool, version: str) -> None:
    path = _wet(gzip=packed, version=version).save(tmp_path / ("a.wet.gz" if packed else "a.wet"))
    documents = read(path, TEXTS)
    assert _given(documents) == _by_warcio(path) and len(documents) == 40
    assert [d.byte for d in documents] == list(range(40))
    (unit,) = units(files(path, type="warc"), TEXTS, 100)
    check_resume(unit, TEXTS)
    check_chain(unit, TEXTS, 7)


def _chunked(body: bytes) -> bytes:
    parts = [body[start : start + 100] for start in range(0, len(body), 100)]
    return b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def _bare_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


ENCODED = {
    "plain": (lambda body: body, []),
    "chunked": (_chunked, [("Transfer-Encoding", "chunked")]),
    "stored without chunks": (lambda body: body, [("Transfer-Encoding", "chunked")]),
    "gzip": (gzip.compress, [("Content-Encoding", "gzip")]),
    "members": (lambda body: gzip.compress(body[:99]) + gzip.compress(body[99:]), [("Content-Encoding", "gzip")]),
    "stored unpacked": (lambda body: body, [("Content-Encoding", "gzip")]),
    "deflate": (zlib.compress, [("Content-Encoding", "deflate")]),
    "bare": (_bare_deflate, [("Content-Encoding", "deflate")]),
    "both": (
        lambda body: _chunked(gzip.compress(body)),
        [("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")],
    ),
}


def test_bodies_are_decoded_as_warcio_decodes_them(tmp_path: Path) -> None:
    body, writer = ("ünï " * 200).encode(), Writer()
    for number, (encode, headers) in enumerate(ENCODED.values()):
        writer.page(number, encode(body), "text/plain; charset=UTF-8", *headers)
    path = writer.save(tmp_path / "a.warc.gz")
    assert [d.text for d in read(path, TEXTS)] == [body.decode()] * len(ENCODED)
    theirs = {name: found["text"] for name, found in zip(ENCODED, _by_warcio(path), strict=True)}
    assert theirs.pop("members") == body[:99].decode()  # of several it takes the first
    assert set(theirs.values()) == {body.decode()}


def html(words: str) -> bytes:
    paragraphs = "".join(
        f"<p>{words} is what paragraph {n} of this page is about, at some length.</p>" for n in range(9)
    )
    head = "<head><title>t</title><script>var x = 1;</script></head>"
    return f"<html>{head}<body><nav><a href='/'>home</a></nav><article>{paragraphs}</article></body></html>".encode()


def test_main_text_of_html_pages(tmp_path: Path) -> None:
    writer = Writer()
    writer.add("request", 0, b"", http=("GET / HTTP/1.1", []))
    writer.page(0, html("Größe"), "text/html; charset=utf-8")
    writer.page(1, html("Größe").decode().encode("latin-1"), "text/html; charset=ISO-8859-1", status="200")
    writer.page(2, b"\x89PNG", "image/png")
    writer.page(3, html("Gone"), status="404 Not Found")
    writer.page(4, b"<html></html>")
    path = writer.save(tmp_path / "a.warc.gz")
    documents = read(path, WARC)
    first = documents[0].text
    assert "Größe is what paragraph 8 of this page is about, at some length." in first
    assert "var x" not in first and "home" not in first
    assert documents[1].text == first
    assert [d.reason for d in documents] == [None, None, NO_PAGE, NO_PAGE, EMPTY]
    skipping = WarcReader("text", "id", KEPT, html="skip")
    assert {d.reason for d in read(path, skipping)} == {NO_PAGE}
    (unit,) = units(files(path, type="warc"), WARC)
    check_resume(unit, WARC)
    with pytest.raises(UserError, match=r"row 0 is an HTML page: set warc\.html"):
        TEXTS.check_columns(files(path, type="warc"))


def test_the_library_is_pinned_and_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _wet(2).save(tmp_path / "a.wet.gz")
    found, _ = WARC.find([str(path)], [], "k", dict)
    assert (
        found.pins()["warc.html"].startswith("trafilatura ") and TEXTS.find([str(path)], [], "k", dict)[0].pins() == {}
    )

    def missing(name: str) -> str:
        raise pages.PackageNotFoundError(name)

    monkeypatch.setattr(pages, "version", missing)
    with pytest.raises(UserError, match=r"pip install 'pretraining-pipeline\[html\]'"):
        WARC.find([str(path)], [], "k", dict)


@pytest.mark.parametrize(
    ("body", "charset", "expected"),
    [
        ("é".encode(), None, "é"),
        (b"\xe9\x80", None, "é€"),
        (b"\xe9\x80", "latin1", "é€"),
        ("é".encode("utf-16"), "latin1", "é"),
        ("漢".encode("gbk"), "gb2312", "漢"),
        ("漢".encode("cp932"), "Shift_JIS", "漢"),
        (
            b'<meta http-equiv=x content="text/html; charset=koi8-r">\xc1',
            None,
            'x content="text/html; charset=koi8-r">а',
        ),
        (b"<meta charset='windows-1251'>\xe0", "no-such", "а"),
        (b"<meta charset=utf-16>\xc3\xa9", None, "é"),
        (b"a\xff", "utf-8", "a\ufffd"),
        (b"\xe9", "zlib_codec", "é"),
        (b"\xe9", "rot13", "é"),
    ],
)
def test_character_sets(body: bytes, charset: str | None, expected: str) -> None:
    assert characters(WebPage("text/html", charset, body)).endswith(expected)


BAD = {
    "not an HTTP response": (b"hello", "text/plain"),
    "damaged HTTP body": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        "",
    ),
    "unknown content encoding": (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: rot\r\n\r\nab", ""),
    NO_PAGE: (b"HTTP/1.1 200 OK\r\n\r\nab", ""),
    "longer than data.preprocess.max_record_bytes (4096)": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"a" * 9999),
        "",
    ),
}


def _record(kind: str, block: bytes, content: str = "application/http; msgtype=response", **fields: str) -> bytes:
    head = {"WARC-Type": kind, "Content-Type": content, "Content-Length": str(len(block)), **fields}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in head.items())
    return f"WARC/1.0\r\n{lines}\r\n".encode() + block + b"\r\n\r\n"


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_page_is_rejected_alone(tmp_path: Path, reason: str) -> None:
    good = _record("conversion", b"good", "text/plain", WARC_Record_ID="<urn:uuid:1>")
    path = tmp_path / "a.warc"
    path.write_bytes(good + _record("response", BAD[reason][0]) + good)
    reader = WarcReader("text", "id", html="skip", max_record_bytes=4096)
    documents = read(path, reader)
    assert [d.reason for d in documents] == [None, reason, None]
    assert [d.id for d in documents] == ["<urn:uuid:1>", "", "<urn:uuid:1>"]


def test_other_bad_records(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    records = [
        _record("conversion", b"\xff", "text/plain"),
        _record("conversion", b"a" * 5000, "text/plain"),
        _record("conversion", b"{}", "application/json"),
        _record("conversion", b"a", "text/plain", WARC_Segment_Number="2"),
        _record("response", b"x", "text/dns"),
        _record("revisit", b"x"),
        _record("conversion", b"", "text/plain"),
        _record("conversion", b"a", "text/plain", X="1\r\n folded", WARC_Target_URI="<http://a.example/>"),
    ]
    path.write_bytes(b"".join(records))
    reader = WarcReader("text", "id", ("url", "x"), max_record_bytes=4096)
    documents = read(path, reader)
    too_long = "longer than data.preprocess.max_record_bytes (4096)"
    reasons = [NOT_UTF8, too_long, NO_PAGE, "segmented record", NO_PAGE, EMPTY, None]
    assert [d.reason for d in documents] == reasons
    assert json.loads(documents[-1].metadata or b"") == {"url": "http://a.example/", "x": "1 folded"}
    assert documents[-1].id == "a.warc#6"
    (unit,) = units(files(path, type="warc"), reader)
    check_resume(unit, reader)


@pytest.mark.parametrize("packed", [True, False])
def test_whatever_happens_to_a_file_is_seen(tmp_path: Path, packed: bool) -> None:
    """Cut or flipped anywhere: compressed, what is given are pages of it, and what is missing is said to be."""
    path = tmp_path / ("a.wet.gz" if packed else "a.wet")
    sound = _wet(12, gzip=packed).out.getvalue()
    path.write_bytes(sound)
    whole = _by_warcio(path)
    start = sound.index(b"\x1f\x8b", 20) if packed else 0
    chance = random.Random(2)
    for trial in range(120):
        at = chance.randrange(start, len(sound))
        flip = trial % 2 == 0 and packed  # nothing but its length tells that plain text was changed
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :] if flip else sound[:at])
        (unit,) = units(files(path, type="warc"), TEXTS)
        found = UnitReader(unit, TEXTS)
        given = _given(found)
        assert given == whole[: len(given)], trial
        if len(given) < 12 and not found.damage:  # it ends where a record does
            assert not flip and (path.read_bytes().endswith(b"\r\n\r\n") or gzip.decompress(sound[:at])), trial


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello world\n", "damaged WARC file"),
        (b"WARC/0.17\r\n\r\n", "damaged WARC file"),
        (b"WARC/1.0\r\nContent-Length: -1\r\n\r\n", "damaged WARC file"),
        (b"WARC/1.0\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n", "damaged WARC file"),
        (b"WARC/1.0\r\nWARC-Type: response\r\n\r\n", "damaged WARC file"),
        (b"WARC/1.0\r\n" + b"a: b\r\n" * 200_000, "damaged WARC file"),
        (b"WARC/1.0\r\n" + b"a" * 2_000_000, "damaged WARC file"),
        (b"WARC/1.0\r\nContent-Length: 999999999999\r\n\r\nabc", "truncated WARC file"),
        (b"WARC/1", "truncated WARC file"),
    ],
)
def test_what_is_no_record_ends_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(_record("conversion", b"good", "text/plain") + content)
    assert [d.text for d in read(path, TEXTS)] == ["good"]
    (lost,) = damage(path, TEXTS)
    assert lost.reason == reason and 0 < lost.lost <= len(content) + 4


@pytest.mark.parametrize("wrong", [-3, 2 + 7])
@pytest.mark.parametrize("packed", [True, False])
def test_a_page_of_another_length_than_its_header_says_is_not_given(tmp_path: Path, packed: bool, wrong: int) -> None:
    writer = Writer(gzip=False)
    for number in range(9):
        writer.add("conversion", number, b"text number %d" % number, warc_content_type="text/plain")
    records = [b"WARC/1.0" + each for each in writer.out.getvalue().split(b"WARC/1.0")[1:]]
    records[5] = records[5].replace(b"Content-Length: 13", b"Content-Length: %d" % (13 + wrong))
    path = tmp_path / ("a.wet.gz" if packed else "a.wet")
    path.write_bytes(b"".join(map(gzip.compress, records) if packed else records))
    documents = read(path, TEXTS)
    assert [d.text for d in documents] == [f"text number {number}" for number in range(5)]
    (found,) = damage(path, TEXTS)
    assert found.reason == "damaged WARC file" and f"a Content-Length of {13 + wrong}" in found.detail
    if not packed:
        assert found.lost == sum(map(len, records[5:])) + len("\r\n\r\n")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_template": "{text}"}, "text_template needs records with keys"),
        ({"warc": {"html": "boilerpipe"}}, "trafilatura"),
        ({"type": "jsonl", "warc": {"html": "skip"}}, "warc needs type: warc"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SourceConfig.model_validate({"name": "s", "type": "warc", "paths": ["a"], **changes})


@pytest.mark.guard
def test_through_the_stage_and_back_to_the_file(tmp_path: Path) -> None:
    """Pages that are none are not bad; resumed in the middle of a file it makes the same; places lead back."""
    writer = _wet(80)
    for number in range(20):
        writer.page(100 + number, b"x", "image/png")
    path = writer.save(tmp_path / "a.warc.gz")
    source = {"name": "s", "type": "warc", "paths": [str(path)], "metadata": ["url"], "warc": {"html": "trafilatura"}}
    config = make_config(tmp_path, [source], heldout=0)
    preprocess(config)
    folder = config.data_dir / "s"
    assert json.loads((folder / "report.json").read_bytes())["rejected"] == {NO_PAGE: 20}
    made = tree(folder)
    later = [
        name
        for name in made
        if "receipts/" in name and name.endswith(".json") and json.loads(made[name]).get("link", 0) > 0
    ]
    assert later
    for name in later:
        (folder / name).unlink()
    preprocess(config)
    assert tree(folder) == made
    documents, origins = {d.row: d for d in read(path, TEXTS)}, Origins(folder)
    places = origins.places([(0, row) for row in documents], read=True)
    for row, document in documents.items():
        place = places[0, row]
        assert (place.file, place.number, place.id) == (str(path), document.byte, document.id)
        assert origins.find(str(path), document.byte) == (0, row)
