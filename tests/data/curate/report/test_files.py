"""The report of a curation that was run: its counts, and damage to what it is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from pipeline.data.curate.files import REJECTED, VERDICT
from pipeline.data.curate.stage import curate
from pipeline.data.provenance.excerpts import ExcerptReader
from tests.data.provenance.curated import curated_config


@pytest.mark.guard
def test_counts_texts_and_damage(tmp_path: Path) -> None:
    config = curated_config(tmp_path)
    assert config.data.curate is not None
    reader = ExcerptReader(config.data.curate)
    curate(config, read_texts=reader)
    (page,) = Path(config.data_dir).glob("web/curate/decisions/*/report.html")
    before = page.read_bytes()
    report = orjson.loads(page.with_suffix(".json").read_bytes())

    verdicts = np.concatenate([np.fromfile(path, VERDICT) for path in sorted(page.parent.rglob("*.verdicts"))])
    assert report["funnel"]["rows"] == len(verdicts)
    assert report["funnel"]["rejected"] == (verdicts["flags"] & REJECTED != 0).sum()
    assert [rule["first"] for rule in report["rules"]] == [
        (verdicts["rule"] == number).sum() for number in range(1, len(report["rules"]) + 1)
    ]
    assert {name: count for name, count, *_ in report["domains"]["largest"]}.keys() == {
        "0.example",
        "1.example",
        "2.example",
    }
    assert sum(count for _, count, *_ in report["domains"]["largest"]) == report["funnel"]["documents"]

    shown = [each for examples in report["examples"] for found in examples.values() for each in found]
    assert shown and all("text" in each and ".jsonl:" in each["place"] for each in shown)
    assert "someone@mail.example.org" not in page.read_text()

    # What the report is made of is checked, and made again at once.
    (statistics,) = page.parent.rglob("*.statistics")
    content = bytearray(statistics.read_bytes())
    content[len(content) // 2] ^= 1
    statistics.write_bytes(content)
    page.unlink()
    curate(config, read_texts=reader)
    assert page.read_bytes() == before
