"""Exact duplicates in sources that are not compared with each other: counted, and said."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config import Config
from pipeline.data.curate.passes import across
from pipeline.data.curate.stage import curate
from tests.data.curate.runs import curate_config, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a and c have the same texts; b has some of both beside its own."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"), 60)
    with (folder / "b.jsonl").open("ab") as file:
        for line in (folder / "c.jsonl").read_bytes().splitlines()[:20]:
            file.write(line + b"\n")
    return folder


def texts(corpus: Path) -> dict[str, set[str]]:
    """Texts by the sources that have them."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in "abc":
        for line in (corpus / f"{name}.jsonl").read_bytes().splitlines():
            if line.startswith(b'{"id"') and (text := orjson.loads(line)["text"]):
                found[text].add(name)
    return found


def curated(tmp_path: Path, corpus: Path, **settings: Any) -> Config:
    return curate_config(tmp_path, corpus, {"bucket_bytes": 2**16, **settings})


def lines(config: Config, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    curate(config)
    return [line for line in capsys.readouterr().out.replace("\n", " ").split("duplicates are looked for") if line]


@pytest.mark.parametrize("bucket_bytes", [2**16, 2**30])
def test_texts_of_several_sources_are_counted(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], bucket_bytes: int
) -> None:
    config = curated(tmp_path, corpus, duplicates={"exact": "text"}, bucket_bytes=bucket_bytes)
    shared = [names for names in texts(corpus).values() if len(names) > 1]
    pairs = {pair: sum({*pair} <= names for names in shared) for pair in combinations("abc", 2)}
    assert len(shared) > 20 and min(pairs.values()) > 5
    _, said = lines(config, capsys)
    assert "in each of these alone: a, b, c" in said
    assert f"{len(shared)} texts are in several of them" in said
    assert f": {sum(len(names) - 1 for names in shared)} more than" in said
    for (one, other), count in pairs.items():
        assert f"{one} and {other} {count}" in said
    assert "{all: [a, b, c]}" in said
    receipts = {file: file.read_bytes() for file in across.across_folder(config).rglob("*.json")}
    assert lines(config, capsys)[1].split() == said.split()  # and nothing is done again
    assert receipts == {file: file.read_bytes() for file in across.across_folder(config).rglob("*.json")}


def test_sources_that_are_compared_are_not_counted(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = curated(tmp_path / "two", corpus, duplicates={"exact": "text"}, scopes={"web": ["c", "a"]})
    shared = [names for names in texts(corpus).values() if "b" in names and len(names) > 1]
    _, said = lines(config, capsys)
    assert "alone: web (c, a), b" in said and f"{len(shared)} texts are in several of them" in said
    config = curated(tmp_path / "one", corpus, duplicates={"exact": "text"}, scopes={"web": ["c", "a", "b"]})
    assert len(lines(config, capsys)) == 1


def test_what_is_not_counted_is_said(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = lines(curated(tmp_path / "near", corpus, duplicates={"near": {}}), capsys)
    assert "not counted without data.curate.duplicates.exact" in said
    assert len(lines(curated(tmp_path / "none", corpus, rules={"gopher_quality": {}}), capsys)) == 1
