"""Files of one HTML page each give the texts that the same pages have in a WARC file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pipeline.config.data import SourceConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.foreign_parser import SKIPPED
from pipeline.data.sources.records import EMPTY
from pipeline.data.sources.web.budget import TOO_MUCH_MARKUP, MarkupLimits
from pipeline.data.sources.web.html import HtmlReader
from pipeline.data.sources.web.warc import WarcReader
from tests.data.reading import check_resume, files, read, units
from tests.data.runs import make_config, tree
from tests.data.sources.web.test_warc import Writer, html

KOI8 = html("Слова").replace(b"<head>", b"<head><meta charset=koi8-r>").decode().encode("koi8-r")
PAGES = (html("Größe"), KOI8, "\ufeff".encode() + html("Mark"), b"<html></html>", html("lone &#xD800; one"))
HTML = HtmlReader("text", "id")


def _written(folder: Path) -> list[Path]:
    for number, page in enumerate(PAGES):
        (folder / f"{number}.html").write_bytes(page)
    (folder / "2.html").unlink()
    (folder / "2.html.gz").write_bytes(gzip.compress(PAGES[2]))
    return [*sorted(folder.glob("*.html*"))]


def test_texts_are_those_of_the_same_pages_in_a_crawl(tmp_path: Path) -> None:
    found = read(_written(tmp_path), HTML)
    writer = Writer()
    for number, page in enumerate(PAGES):
        writer.page(number, page)
    (tmp_path / "a.warc.gz").write_bytes(writer.out.getvalue())
    crawl = read(tmp_path / "a.warc.gz", WarcReader("text", "id", html="trafilatura"))
    assert [(each.text, each.reason) for each in found] == [(each.text, each.reason) for each in crawl]
    assert [each.reason for each in found] == [None, None, None, EMPTY, None]
    assert "Größe" in found[0].text and "Слова" in found[1].text and "<" not in found[0].text
    for unit in units(files(f"{tmp_path}/*.html*", type="html"), HTML):
        check_resume(unit, HTML)


def test_pages_that_are_left_out(tmp_path: Path) -> None:
    (path := tmp_path / "a.html").write_bytes(html("words"))
    strict = HtmlReader("text", "id", limits=MarkupLimits(max_tags=3))
    assert [each.reason for each in read(path, strict)] == [TOO_MUCH_MARKUP]
    skipping = HtmlReader("text", "id", skip_records=frozenset({"a.html"}))
    assert [each.reason for each in read(path, skipping)] == [SKIPPED]


def test_a_dataset_of_pages(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    _written(tmp_path / "in")
    source = {"name": "s", "type": "html", "paths": [f"{tmp_path}/in/*"], "warc": {"max_tags": 999}}
    config = make_config(tmp_path, [source], heldout=0)
    preprocess(config)
    before = tree(config.data_dir)
    assert json.loads(before["s/report.json"])["rejected"] == {EMPTY: 1}
    preprocess(config)
    assert tree(config.data_dir) == before


def test_the_library_for_pages_of_crawls_is_not_a_choice_here() -> None:
    with pytest.raises(ValueError, match="warc.html is for type: warc"):
        SourceConfig.model_validate({"name": "s", "type": "html", "paths": ["a"], "warc": {"html": "skip"}})
