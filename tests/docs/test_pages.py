"""The index names every page, a page has one heading of the first rank, and one program makes all pictures."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

from benchmarks.pictures import DOCS, MOST_BYTES, PICTURES
from tests.docs.test_links import PAGES, ROOT, prose

INDEX = DOCS / "README.md"


def test_the_index_names_every_page_once() -> None:
    pages_below = INDEX.read_text().partition("\n## ")[2]  # the paths above them name some of the pages again
    first_columns = (line.split(" | ")[0] for line in pages_below.splitlines() if line.startswith("| ["))
    links = [link for column in first_columns for link in re.findall(r"\]\(([^)#]+)\)", column)]
    pages = [*PAGES, *DOCS.glob("*.ipynb")]
    assert Counter((DOCS / link).resolve() for link in links) == Counter(set(pages) - {INDEX, ROOT / "README.md"})


def test_a_page_has_one_heading_of_the_first_rank_and_begins_with_it() -> None:
    for page in PAGES:
        ranks = [len(marks) for marks in re.findall(r"^(#+) ", prose(page), flags=re.MULTILINE)]
        assert ranks[0] == 1 and ranks.count(1) == 1, page
        assert all(rank <= before + 1 for before, rank in pairwise(ranks)), page


def test_a_page_leads_to_another_one() -> None:
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+\.md)", prose(page))
        assert any((page.parent / link).resolve() != page for link in links), page


def test_every_picture_has_a_maker_a_page_and_few_bytes() -> None:
    files = {file.name for kind in ("png", "svg", "jpg", "gif") for file in DOCS.rglob(f"*.{kind}")}
    used = {Path(link).name for page in PAGES for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())}
    assert files == set(PICTURES) == used
    for name in files:
        content = (DOCS / name).read_bytes()
        assert len(content) <= MOST_BYTES, name
        # Nothing is asked of another server.
        assert not re.search(rb"(?:href|src)=\"http|url\([\"']?http|@import", content), name
