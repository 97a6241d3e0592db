"""Pages of HTML that would keep the extraction busy: each shape is rejected by its counts, or done in bounded work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.data import WarcConfig
from pipeline.data.sources.foreign_parser import SKIPPED
from pipeline.data.sources.records import UnusableRecord
from pipeline.data.sources.web.budget import DEFAULT_LIMITS, TOO_MUCH_MARKUP, MarkupLimits
from pipeline.data.sources.web.pages import main_text
from pipeline.data.sources.web.warc import WarcReader
from tests.data.reading import read
from tests.data.sources.web.test_warc import WARC, Writer, html

PROSE = "Some words of ordinary prose that say a little, and then a little more. "


def _article(inner: str) -> str:
    return f"<html><head><title>t</title></head><body><article>{inner}</article></body></html>"


def _names(count: int) -> str:
    return " ".join(f"a{number}" for number in range(count))


SHAPES: dict[str, Callable[[int], str]] = {
    "bold words of one paragraph": lambda n: _article("<p>" + "<b>x</b> <i>y</i>" * n + "</p>"),
    "links of one paragraph": lambda n: _article("<p>" + "<a href='/x'>y</a> " * n + "</p>"),
    "spans of one div": lambda n: _article("<div>" + "<span>x</span> w " * n + "</div>"),
    "words in words": lambda n: _article("<p>" + ("<span>" + "<b>x</b> w " * 99 + "</span>") * (n // 99 + 1) + "</p>"),
    "images of one paragraph": lambda n: _article("<p>" + "w <img src='a' alt='x'> " * n + "</p>"),
    "unknown elements": lambda n: _article("<p><x-y>" + "<b>x</b> w " * n + "</x-y></p>"),
    "attributes": lambda n: f"<html><body><p {_names(n)}>{PROSE}</p></body></html>",
    "attributes with ends": lambda n: '<html><p a=">" ' + "".join(f"a{k}='>' " for k in range(n)) + f">{PROSE}</html>",
    "attributes behind a control": lambda n: f"<html><body><\x01p {_names(n)}>{PROSE}</p></body></html>",
    "attributes of a tag without an end": lambda n: f"<html><body><p>{PROSE}</p><p {_names(n)}",
    "tags in tags": lambda n: "<html><body><p>" + "<a<a" * n,
    "quotes in quotes": lambda n: "<html><body>" + "<p a='" * n,
    "siblings": lambda n: "<html><body>" + "<div class='post-content'>x</div>" * n + "</body></html>",
    "nested": lambda n: "<html><body>" + "<div class='post-content'>" * n + PROSE + "</div>" * n + "</body></html>",
    "nested inline": lambda n: _article("<span>" * n + PROSE + "</span>" * n),
    "unclosed": lambda n: _article("<p>word word" * n),
    "cells": lambda n: _article("<table><tr>" + "<td>ab</td>" * n + "</tr></table>"),
    "rows": lambda n: _article("<table>" + "<tr><td>ab</td></tr>" * n + "</table>"),
    "nested tables": lambda n: _article("<table><tr><td>x" * n),
    "items": lambda n: _article("<ul>" + "<li>item of text</li>" * n + "</ul>"),
    "nested items": lambda n: _article("<ul><li>x" * n),
    "line ends": lambda n: _article("<p>" + "x<br>" * n + "</p>"),
    "comments": lambda n: _article("<!-- c -->" * n + PROSE),
    "entities": lambda n: _article("<p>" + "&amp;&lt;&eacute;" * n + "</p>"),
    "one word": lambda n: _article("<p>" + "x" * 20 * n + "</p>"),
    "spaces": lambda n: _article("<p>a" + " " * 20 * n + "b</p>"),
    "data": lambda n: _article('<script type="application/ld+json">' + "[" * n + "</script><p>" + PROSE),
    "paragraphs": lambda n: _article(f"<p>{PROSE}</p>" * n),
}
"""Pages by a count, of 10 to 40 bytes each."""
_BY_THE_SQUARE = {name for name in SHAPES if "of one" in name or "attributes" in name or name.startswith(("w", "unk"))}
_SMALL, _LARGE = 200, 60_000


def _refused(html: str, limits: MarkupLimits = DEFAULT_LIMITS) -> str:
    """The detail of the rejection of a page; empty if it is read."""
    try:
        main_text(html, limits)
    except UnusableRecord as unusable:
        assert unusable.reason == TOO_MUCH_MARKUP
        return unusable.detail
    return ""


def _python_calls(html: str) -> int:
    """Calls of functions while the text is taken out: work that no load of the machine changes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        main_text(html)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_refused_or_its_work_is_linear(shape: str) -> None:
    make = SHAPES[shape]
    assert _refused(make(_SMALL)) == ""
    refused = _refused(make(_LARGE))
    if refused:
        assert shape not in _BY_THE_SQUARE or "max_" in refused
        return
    # What is read at that size is cheap: its elements are few, or the parser stops at a depth.
    assert _python_calls(make(_LARGE)) < 20 * _python_calls(make(_SMALL)) + 10_000


@pytest.mark.parametrize("shape", sorted(_BY_THE_SQUARE))
def test_what_takes_the_square_is_refused_long_before_the_number_of_tags(shape: str) -> None:
    assert "max_paragraph_work" in (detail := _refused(SHAPES[shape](6000))) or "max_attributes" in detail


def test_limits_are_inclusive_and_each_has_a_key(tmp_path: Path) -> None:
    assert _refused(SHAPES["attributes"](1000)) == ""
    assert _refused(SHAPES["attributes"](1001)) == "1001 attributes of one tag, warc.max_attributes is 1000"
    assert _refused("<html><body>" + "<p>x" * 8, MarkupLimits(max_tags=10)) == ""
    assert _refused("<html><body>" + "<p>x" * 9, MarkupLimits(max_tags=10)) == "11 start tags, warc.max_tags is 10"
    assert WarcConfig().model_dump(exclude={"html"}) == vars(DEFAULT_LIMITS)


def test_one_paragraph_of_a_page_counts_as_its_elements_and_characters() -> None:
    page = _article("<p>" + "<b>x</b>yz" * 400 + "</p>")
    work = 400 * (20 * 400 + 3 * 400)
    assert _refused(page, MarkupLimits(max_paragraph_work=work)) == ""
    assert _refused(page, MarkupLimits(max_paragraph_work=work - 1)).startswith(f"{work} elements")


def test_a_page_that_was_counted_gives_the_same_text() -> None:
    page = html("Größe").decode() + "<p>" + "word <b>bold</b> " * 50 + "</p>"
    assert main_text(page, MarkupLimits(max_paragraph_work=10**6)) == main_text(page, MarkupLimits()) != ""


def test_a_page_above_a_limit_is_rejected_with_its_place_and_address(tmp_path: Path) -> None:
    writer = Writer()
    writer.page(0, html("good"))
    writer.page(1, SHAPES["attributes"](5000).encode())
    writer.page(2, html("good"))
    documents = read(writer.save(tmp_path / "a.warc.gz"), WARC)
    assert [d.reason for d in documents] == [None, TOO_MUCH_MARKUP, None]
    assert documents[1].byte == 1 and documents[1].detail.endswith("is 1000 (http://a.example/1)")


def test_a_listed_record_is_left_out_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    for number in range(3):
        writer.page(number, html(f"page{number}"))
    path = writer.save(tmp_path / "a.warc.gz")
    parsed: list[str] = []
    monkeypatch.setattr("pipeline.data.sources.web.pages.main_text", lambda html, _: parsed.append(html) or "text")
    documents = read(path, WarcReader("text", "id", html="trafilatura", skip_records=frozenset({"a.warc.gz#1"})))
    assert [(d.name, d.reason) for d in documents] == [
        ("a.warc.gz#0", None),
        ("a.warc.gz#1", SKIPPED),
        ("a.warc.gz#2", None),
    ]
    assert len(parsed) == 2


def test_plans_name_the_limits_that_are_not_the_default() -> None:
    reader = WarcReader("text", "id", html="trafilatura")
    assert reader.plan_settings() == {"warc": {"html": "trafilatura"}}
    other = WarcReader(
        "text", "id", html="trafilatura", limits=MarkupLimits(max_tags=9), skip_records=frozenset({"b#1", "a"})
    )
    assert other.plan_settings() == {"warc": {"html": "trafilatura", "max_tags": 9}, "skip_records": ["a", "b#1"]}
    again = WarcReader.from_plan(other.plan_settings() | {"metadata": []})
    assert (again.limits, again.skip_records) == (other.limits, other.skip_records)
