"""The site builds without a warning, asks no other server for anything, and leads from page to page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_links import PAGES, ROOT

FILES_URL = "https://example.org/files/blob/main"
# What a browser fetches with a page; a link is only followed by its reader.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["'](?:https?:)?//[^>]*|<link[^>]*\shref=["'](?:https?:)?//[^>]*"""
)


@pytest.mark.guard
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    folders = ["-c", str(ROOT / "docs/sphinx"), "-d", str(tmp_path / "doctrees"), str(ROOT), str(tmp_path / "site")]
    environment = os.environ | {"SITE_FILES_URL": FILES_URL}
    done = subprocess.run([*sphinx, *folders], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {file.relative_to(tmp_path / "site"): file.read_text() for file in (tmp_path / "site").rglob("*.html")}
    last = []
    for page in PAGES:
        html = built[page.relative_to(ROOT).with_suffix(".html")]
        assert html.count("<h1>") == 1, page
        assert not FETCHED.findall(html), page
        # Links to files are links to the repository, and those to pages have become links to pages.
        assert not re.findall(r'href="(?!https?:)[^"]*\.(?:md|py|yaml)["#]', html), page
        if 'rel="next"' not in html:
            last.append(page.name)
    assert last == ["CHANGELOG.md"]
    assert f'href="{FILES_URL}/configs/corpora/c4.yaml"' in built[Path("docs", "corpora.html")]
    assert f'href="{FILES_URL.replace("blob", "tree")}/configs/models"' in built[Path("docs", "encoders.html")]
    for sheet in (tmp_path / "site/_static").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text()), sheet
