"""Domains as they are stored and counted."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import orjson
import pytest

from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.report.domains import DOMAINS, DomainMeasurer, address_key, domain_groups, domain_of


@pytest.mark.parametrize(
    ("address", "domain"),
    [
        ("https://www.Example.org:8080/a?b#c", "example.org"),
        ("example.org/path", "example.org"),
        ("http://user:secret@host.example./", "host.example"),
        ("http://münchen.example/", "münchen.example"),
        ("http://[::1]/", "::1"),
        ("http://[", ""),
        ("", ""),
        (None, ""),
        (7, ""),
        ("http://" + "a" * 300, ""),
        ("http://a\u202eb.example/", ""),
    ],
)
def test_domain_of(address: Any, domain: str) -> None:
    assert domain_of(address) == domain


class _Output:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = defaultdict(bytes)

    def append(self, name: str, records: Any) -> None:
        self.files[name] += records.tobytes()

    def add_run(self, name: str, records: Any) -> None:
        raise AssertionError

    def count(self, name: str, counts: Any) -> None:
        raise AssertionError


def test_stored_and_read() -> None:
    measurer, output = DomainMeasurer("url"), _Output()
    given = ["http://a.example/1", None, "http://ü.example", "http://a.example/2", "nothing here"]
    metadata = [None if url is None else orjson.dumps({"url": url}) for url in given]
    table = np.zeros(len(given) + 1, measurer.columns)
    batch = TextBatch(np.zeros(0, np.uint8), np.zeros(0, np.int64), [], np.zeros(0, np.uint32), [], metadata)
    measurer.measure(batch, table[:5], output)
    codes, names = domain_groups(table, output.files[DOMAINS])
    assert [names[code] if code >= 0 else "" for code in codes] == ["a.example", "", "ü.example", "a.example", "", ""]


def test_key_of_the_address() -> None:
    assert address_key(["url", "date"], None) == "url"
    assert address_key(["link", "url"], "link") == "link"
    assert address_key(["date"], None) is None
