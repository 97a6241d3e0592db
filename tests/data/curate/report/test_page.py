"""The page: what it says is what `report.json` says, and no document can break out of it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.data.curate.report.build import CHARACTERS, Excerpt
from pipeline.data.curate.report.clusters import VerdictFile
from pipeline.data.curate.report.page import share
from pipeline.data.curate.report.statistics import chunk_statistics
from pipeline.data.curate.report.write import write_report
from pipeline.data.curate.scope import document
from tests.browser import Chromium, browser  # noqa: F401
from tests.data.curate.report.chunks import curation, judged

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</blockquote></details><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "\u202eevil\x00\x07\x1b[31m\ud800",
    "שלום " * 50,
    "x" * 10_000_000,
    *("".join(map(chr, range(first, first + 128))) for first in range(0, 0x3000, 128)),
]
_ITEM = {"task": "<b>x", "item": "<i>7", "text": "<b>" * 99, "documents": 3, "ngrams": 9, "found": 8, "share": 8 / 9}
ITEMS = {
    "tasks": {"<b>x": {"items": 1500, "checked": 1400, "touched": 4, "documents": 3}},
    "items": [{**_ITEM, "examples": [document(1, 2, 7)]}] * 60,
    "common": {"ngrams": 2, "listed": [{"text": "<i>licence", "documents": 2000}]},
    "too_short": {"items": 100, "examples": ["x <b>"]},
}


class _Page(HTMLParser):
    """Tables by the heading above them, and all tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: dict[str, int] = {}
        self.text = ""
        self._heading = ""
        self._in: list[str] = []
        self._new = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._in.append(tag)
        if tag == "h3":
            self._heading = ""
        elif tag == "table":
            self._new = self._heading not in self.tables
            self.tables.setdefault(self._heading, [])
        elif tag == "tr" and self._new:
            self.tables[self._heading].append([])
        elif tag in ("td", "th") and self._new:
            self.tables[self._heading][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data
        if "h3" in self._in:
            self._heading += data
        elif self._new and ("td" in self._in or "th" in self._in) and "table" in self._in:
            self.tables[self._heading][-1][-1] += data


def write(folder: Path, texts: list[str], mode: str = "apply", order: int = 1) -> dict[str, Any]:
    """A report of a few chunks."""
    chunks = [judged(seed, 400, unit=seed) for seed in range(4)]
    files = []
    for chunk in chunks:
        path = folder / f"{chunk.unit}.verdicts"
        chunk.verdicts.tofile(path)
        files.append(VerdictFile(path, chunk.unit, chunk.first))
    return write_report(
        folder,
        curation(mode),
        [chunk_statistics(chunk, 7) for chunk in chunks][::order],
        files,
        contamination=ITEMS,
        excerpts=lambda keys: {
            key: Excerpt(f"/<b>/{key[0]}.jsonl:{key[1]}", texts[number % len(texts)], f"<i>{key[1]}")
            for number, key in enumerate(keys)
        },
    )


def test_equal_for_any_order_of_chunks(tmp_path: Path) -> None:
    files = []
    for name, order in (("a", 1), ("b", -1)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, HOSTILE, order=order)
        files.append([(tmp_path / name / f"report.{ending}").read_bytes() for ending in ("json", "html")])
    assert files[0] == files[1]


def test_numbers_are_those_of_the_json(tmp_path: Path) -> None:
    report = write(tmp_path, ["plain"])
    assert orjson.loads((tmp_path / "report.json").read_bytes()) == report
    page = _Page((tmp_path / "report.html").read_text())
    funnel = report["funnel"]
    rules = page.tables["Rules"][1:]
    assert [[row[0], row[2], row[4], row[5]] for row in rules] == [
        [rule["name"], f"{rule['fires']:,}", f"{rule['first']:,}", f"{rule['alone']:,}"] for rule in report["rules"]
    ]
    steps = {row[0]: row for row in page.tables["Funnel"][1:]}
    assert steps["documents"][4] == f"{funnel['documents']:,}"
    for step in funnel["steps"]:
        if step["documents"]:
            assert (steps[step["rule"]][2], steps[step["rule"]][4]) == (f"{step['documents']:,}", f"{step['left']:,}")
    assert funnel["steps"][-1]["left"] == funnel["kept"] and funnel["steps"][-1]["left_bytes"] == funnel["kept_bytes"]
    for rule in report["rules"]:
        if rule["scale"]:
            shown = page.tables[rule["name"]][1:]
            assert [row[1] for row in shown] == [f"{row['kept']:,}" for row in rule["what_if"]]
    together = page.tables["Rules that fire together"]
    fired = [place for place, rule in enumerate(report["rules"]) if rule["fires"]]
    assert [row[-1] for row in together[1:]] == [f"{report['together'][place][place]:,}" for place in fired]
    for name, key in (("Languages", "languages"), ("Domains", "domains")):
        groups = report[key] if key == "languages" else report[key]["largest"]
        assert [row[:3] for row in page.tables[name][1:]] == [[g[0], f"{g[1]:,}", f"{g[3]:,}"] for g in groups]
    assert page.tables["Contamination by task"][1:] == [["<b>x", "1,500", "1,400", "4", "3"]]
    assert page.tables["Items found in documents"][1][:3] == ["<b>x", "<i>7", "web 2:7"]
    clusters = [[f"{one['removed']:,}"] for one in report["clusters"]["largest"]]
    assert [row[1:2] for row in page.tables["Largest clusters"][1:]] == clusters


def test_documents_cannot_break_out(tmp_path: Path) -> None:
    report = write(tmp_path, HOSTILE)
    text = (tmp_path / "report.html").read_bytes().decode()
    page = _Page(text)
    assert not page.tags.keys() & {"script", "img", "iframe", "object"}
    assert not any(sign in text for sign in ("\u202e", "\x00", "\x07", "\x1b"))
    assert "<script>alert(1)</script>" in page.text
    assert all(
        len(one.get("text", "")) <= CHARACTERS for of in report["examples"] for each in of.values() for one in each
    )
    assert len(text) < 2_000_000


def test_observe_says_would_be(tmp_path: Path) -> None:
    write(tmp_path, ["plain"], "observe")
    page = _Page((tmp_path / "report.html").read_text())
    assert "would be kept" in page.text and "nothing is removed" in page.text


def test_shares_never_hide_a_document() -> None:
    assert [share(*each) for each in ((0, 0), (0, 9), (1, 10**6), (10**6 - 1, 10**6), (9, 9), (1, 3))] == [
        "–",
        "0.0 %",
        "< 0.1 %",
        "> 99.9 %",
        "100.0 %",
        "33.3 %",
    ]


@pytest.mark.guard
@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(browser: Chromium, tmp_path: Path, dark: bool, phone: bool) -> None:  # noqa: F811
    write(tmp_path, HOSTILE)
    with browser.open(tmp_path / "report.html", dark=dark, phone=phone) as opened:
        opened.check_quiet()
        opened.check_readable()
        opened.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        opened.check_readable()
