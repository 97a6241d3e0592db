"""Sources of CSV, crawls and templates are curated and preprocessed, and `data why` finds their records again."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from pipeline.data.curate.stage import curate
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.why_removed import why
from tests.data.curate.runs import text
from tests.data.runs import make_config
from tests.data.sources.web.test_warc import Writer


@pytest.mark.guard
def test_short_documents_are_removed_and_found_again(tmp_path: Path) -> None:
    chance, writer = random.Random(1), Writer()
    long = [f"{n} {text(chance, 60)}\n{text(chance, 9)}" for n in range(40)]
    documents = ["short text" if n % 8 == 3 else each for n, each in enumerate(long)]
    places = []
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table, line = csv.writer(file), 2
        table.writerow(["title", "text"])
        for n, document in enumerate(documents):
            table.writerow([f"T{n}", document])
            places.append(line)
            line += 1 + document.count("\n")
            writer.page(n, document.encode(), "text/plain")
    writer.page(99, b"x", "image/png")
    writer.save(tmp_path / "a.warc.gz")
    sources = [
        {"name": "table", "type": "csv", "paths": [str(tmp_path / "a.csv")], "text_template": "{title?}: {text}"},
        {"name": "crawl", "type": "warc", "paths": [str(tmp_path / "a.warc.gz")]},
    ]
    rules = {"mode": "apply", "rules": {"gopher_quality": {"min_words": 20, "min_stop_words": None}}}
    config = make_config(tmp_path, sources, heldout=0, curate=rules)
    curate(config)
    preprocess(config)
    removed = {n for n, document in enumerate(documents) if document == "short text"}
    for name, place in (("table", lambda n: f"a.csv:{places[n]}"), ("crawl", lambda n: f"a.warc.gz: row {n}")):
        assert Dataset.open(config.data_dir / name / "train").documents == 40 - len(removed)
        for n in (3, 11, 12, 39):
            found = why(config, name, place(n), say=lambda _: None)
            assert found.state == ("removed" if n in removed else "kept"), (name, n)
            assert found.checks and all(check.agrees for check in found.checks), (name, n)
    assert "not a page of text" in str(why(config, "crawl", "a.warc.gz: row 40", say=lambda _: None).rejected)
