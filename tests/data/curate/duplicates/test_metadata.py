"""Dates and addresses in metadata."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.curate.duplicates.dates import seconds
from pipeline.data.curate.duplicates.urls import normalize_url


def _expected(*moment: int) -> int:
    return int((datetime(*moment, tzinfo=UTC) - datetime(1, 1, 1, tzinfo=UTC)).total_seconds()) + 1  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        ("2024", (2024, 1, 1)),
        ("2024-02", (2024, 2, 1)),
        (" 2024-02-29 ", (2024, 2, 29)),
        ("20240229", (2024, 2, 29)),
        ("2024/2/9", (2024, 2, 9)),
        ("2024-02-29T12:30:15Z", (2024, 2, 29, 12, 30, 15)),
        ("2024-02-29 12:30", (2024, 2, 29, 12, 30)),
        ("2024-02-29T00:30:15.999+01:00", (2024, 2, 28, 23, 30, 15)),
        ("2024-02-29T00:30:15-0530", (2024, 2, 29, 6, 0, 15)),
        ("Thu, 29 Feb 2024 12:30:15 +0000", (2024, 2, 29, 12, 30, 15)),
        (0, (1970, 1, 1)),
        (1709209815, (2024, 2, 29, 12, 30, 15)),
        (1709209815000, (2024, 2, 29, 12, 30, 15)),
        ("1709209815", (2024, 2, 29, 12, 30, 15)),
        (1709209815.9, (2024, 2, 29, 12, 30, 15)),
        ("0001-01-01", (1, 1, 1)),
    ],
)
def test_dates(value: Any, moment: tuple[int, ...]) -> None:
    assert seconds(value) == _expected(*moment)


@pytest.mark.parametrize(
    "value",
    [
        None, True, [], {}, "", "soon", "2024-13-01", "2023-02-29", "2024-02-29Tx", float("nan"), float("inf"), 10**30,
        -(10**14), "٢٠٢٤", "0000", "0001-01-01T00:00+14:00x",
    ],
)  # fmt: skip
def test_no_dates(value: Any) -> None:
    assert seconds(value) == 0


_LIKE_DATES = st.from_regex(r"\d{1,9}([-/. T:]\d{1,4}){0,5}(Z|[+-]\d+)?")


@given(value=st.one_of(st.text(), st.floats(), st.integers(), _LIKE_DATES))
def test_any_date_is_a_number_of_its_column(value: Any) -> None:
    assert 0 <= seconds(value) < 2**63


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://www.Example.org:443/a/b/?x=1&utm_source=y&fbclid=1#top", "example.org/a/b?x=1"),
        ("http://user:pw@example.org:80", "example.org"),
        ("http://example.org:8080/A%7eb%2f%C3%a9/", "example.org:8080/A~b%2F%C3%A9"),
        ("example.org/a?b=2&a=1", "example.org/a?b=2&a=1"),
        ("//example.org/", "example.org"),
        ("  http://example.org/?utm_medium=x ", "example.org"),
        ("mailto:someone@example.org", "example.org"),
        ("http://", ""),
        ("", ""),
        ("/path", ""),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert normalize_url(url) == expected


@given(url=st.text(st.sampled_from("htp:/w.aA%2eE7?&=#@[]\n é"), max_size=30))
def test_any_url_has_one_form(url: str) -> None:
    once = normalize_url(url)
    assert isinstance(once, str)
    assert normalize_url(f"https://{once}") in (once, normalize_url(once)) or "%" in once or not once
