"""The page on rules shows the rules that there are."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.curate.rules.doc_table import SOURCES
from pipeline.data.curate.rules.presets import MEASURES
from pipeline.train.doc_tables import page

PAGE = Path(__file__).parents[4] / "docs" / "curation-rules.md"


def test_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page("curation-rules.md", text) == text, "run `make docs`"
    assert SOURCES.keys() == MEASURES.keys()
