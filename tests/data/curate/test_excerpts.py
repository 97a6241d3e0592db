"""Beginnings of documents for reports: which there are, and that no other text is read for another bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.measures.counters import COUNTERS
from pipeline.data.curate.passes.excerpts import excerpt_rows
from pipeline.data.curate.rules.presets import preset_rules
from pipeline.data.curate.scope import Chunk
from pipeline.data.curate.stage import curate
from pipeline.data.provenance.excerpts import ExcerptReader
from tests.data.curate.runs import curate_config, everything, write_corpus

ROWS = 30_000


def _table() -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    table = np.zeros(ROWS, [("state", "u1"), *((name, "<u4") for name in COUNTERS)])
    for name in COUNTERS:
        table[name] = rng.integers(0, 40, ROWS)
    for name in ("words", "text_words", "lines", "characters", "line_characters", "paragraphs"):
        table[name] = rng.integers(40, 400, ROWS)
    table["lorem_ipsum"] = rng.random(ROWS) < 0.0002
    table["state"][::10] = 1
    return table


def test_a_long_chunk_has_some_on_either_side_of_every_bound() -> None:
    table, chunk = _table(), Chunk(Path(), 0, 5, 2, 77, ROWS, {})
    hits = np.arange(1, ROWS, 2)
    rows = excerpt_rows(table, hits, 7, chunk)
    assert rows == sorted(set(rows)) and 2048 < len(rows) < ROWS / 3
    assert not table["state"][rows].any()
    assert excerpt_rows(table, hits, 7, chunk) == rows != excerpt_rows(table, hits, 8, chunk)
    rules = preset_rules(RulesConfig(gopher_quality={}, gopher_repetition={}, c4={}, fineweb={}), "")  # type: ignore[arg-type]
    documents = table["state"] == 0
    for rule in rules:
        for bound in (rule.bound, *np.quantile(rule.values(table[documents]), [0.01, 0.3, 0.99])):
            away = rule.values(table) - bound
            for side in (away < 0, away > 0):
                both = np.flatnonzero(side & documents)
                if len(both):
                    shown = np.intersect1d(both, rows)
                    assert len(shown) >= min(len(both), 4), (rule.name, bound)


def test_a_short_chunk_has_all() -> None:
    table, chunk = _table()[:4000], Chunk(Path(), 0, 0, 0, 0, 4000, {})
    assert excerpt_rows(table, np.zeros(0), 7, chunk) == np.flatnonzero(table["state"] == 0).tolist()


def _refuse(folder: Path, keys: Sequence[Any]) -> dict[Any, Any]:
    raise AssertionError("a text was asked for")


@pytest.mark.guard
def test_another_bound_reads_no_text(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    corpus = write_corpus(tmp_path / "corpus", 100)
    settings = everything(corpus)
    config = curate_config(tmp_path, corpus, settings)
    curate(config, read_texts=ExcerptReader(config.data.curate))
    settings["rules"]["gopher_quality"] = {"min_words": 9}
    changed = curate_config(tmp_path, corpus, settings)
    assert changed.data_dir == config.data_dir
    curate(changed, read_texts=_refuse)
    for page in changed.data_dir.glob("*/curate/decisions/*/report.json"):
        report = orjson.loads(page.read_bytes())
        shown = [each for examples in report["examples"] for found in examples.values() for each in found]
        assert shown and all("text" in each for each in shown)
    path = min(changed.data_dir.glob("a/curate/excerpts/*/*.excerpts"))
    before = path.read_bytes()
    # A damaged file is made again.
    path.write_bytes(before[:-1] + b" ")
    settings["rules"]["gopher_quality"] = {"min_words": 10}
    again = curate_config(tmp_path, corpus, settings)
    curate(again, read_texts=ExcerptReader(again.data.curate))
    assert path.read_bytes() == before
