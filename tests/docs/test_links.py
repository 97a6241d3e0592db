"""Links between the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "containers/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def _anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each).replace("`", "").strip().lower() for each in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in plain)


def _broken(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in _anchors(target))):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_links_lead_somewhere() -> None:
    broken = [link for page in PAGES for link in _broken(page)]
    assert not broken, "\n".join(broken)
