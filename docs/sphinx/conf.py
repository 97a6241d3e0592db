"""The documentation site: the Markdown files of this repository as they are, in the order of docs/README.md.

`make site` builds it into site/. Sphinx reads this file; every warning is an error there, so that a link, a heading or
a page that is missing, or a page that docs/README.md does not list, ends the build.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
INDEX = "docs/README"

project = "pretraining-pipeline"
author = "The pretraining-pipeline authors"
version = release = re.search(r'__version__ = "(.+)"', (ROOT / "pipeline/__init__.py").read_text())[1]  # type: ignore[index]
html_title = f"{project} {release}"

# The root of the repository is the source, so that links mean the same here and on GitHub.
root_doc = "README"
include_patterns = ["*.md", "containers/README.md", "docs/**"]
exclude_patterns = [
    each.name for each in ROOT.iterdir() if each.is_dir() and each.name not in ("containers", "docs")
] + ["docs/sphinx"]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
# GitHub's Markdown and nothing else, with its anchors. (`myst_gfm_only` would leave links as they are.)
myst_enable_extensions = ["alert", "gfm_autolink", "strikethrough", "tasklist"]
myst_disable_syntax = ["blockbreak", "front_matter", "myst_line_comment", "myst_role", "myst_target"]
myst_heading_anchors = 6

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "github-dark"

# `make site-links` asks other servers. Addresses of this machine and examples have nobody who answers.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1|[^/]*example\.(org|com))"]
linkcheck_timeout = 20

# Of the repository, for files that are not pages: `https://github.com/OWNER/NAME/blob/COMMIT`. Without it, copies.
FILES_URL = os.environ.get("SITE_FILES_URL", "").rstrip("/")


def sections(index: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections of the navigation: heading, and titles with files, from the first columns of the tables of an index.

    A link to a part of a page is for readers of the index alone.
    """
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for line in index.splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif line.startswith("| [") and found:  # the paths above name some of the pages again
            column = line.split(" | ")[0]
            found[-1][1].extend(
                (title, file) for title, file in re.findall(r"\[(.+?)\]\(([^)]+)\)", column) if "#" not in file
            )
    return [(heading, pages) for heading, pages in found if pages]


def _toctree(caption: str | None, entries: list[tuple[str, str]]) -> nodes.Element:
    tree = addnodes.toctree(
        parent=root_doc,
        entries=entries,
        includefiles=[docname for _, docname in entries],
        maxdepth=1,
        caption=caption,
        rawcaption=caption,
        rawentries=[title for title, _ in entries],
        glob=False,
        hidden=True,
        includehidden=False,
        numbered=0,
        titlesonly=True,
    )
    return nodes.compound("", tree, classes=["toctree-wrapper"])


def add_navigation(app: Sphinx, document: nodes.document) -> None:
    """Put the navigation into the first page, which is read before any other page is looked for."""
    if app.env.docname != root_doc:
        return
    app.env.note_dependency(str(ROOT / f"{INDEX}.md"))
    document += _toctree(None, [("All pages", INDEX)])
    for heading, pages in sections((ROOT / f"{INDEX}.md").read_text()):
        names = ((title, os.path.normpath(Path(INDEX).parent / file)) for title, file in pages)
        document += _toctree(heading, [(title, name.rpartition(".")[0]) for title, name in names])


def link_files(app: Sphinx, document: nodes.document) -> None:
    """Links to files and folders that are not pages lead to the repository, or to copies of the files."""
    for node in [*document.findall(addnodes.download_reference), *document.findall(addnodes.pending_xref)]:
        path = Path(app.env.relfn2path(node["reftarget"], app.env.docname)[1])
        is_folder = path.is_dir() and not node["refdomain"]
        if FILES_URL and (is_folder or isinstance(node, addnodes.download_reference)):
            address = FILES_URL.replace("/blob/", "/tree/") if is_folder else FILES_URL
            node.replace_self(nodes.reference("", "", *node.children, refuri=f"{address}/{path.relative_to(ROOT)}"))
        elif is_folder:
            node.replace_self(node.children)


def write_first_page(app: Sphinx, error: Exception | None) -> None:
    """The address of the folder leads to the first page."""
    if error is None and app.builder.name == "html":
        head = f'<title>{project}</title><meta http-equiv="refresh" content="0; url={root_doc}.html">'
        Path(app.outdir, "index.html").write_text(f'<!doctype html><meta charset="utf-8">{head}')


class NotebookParser(MystParser):
    """A Jupyter notebook as its texts and code; the outputs are made by who runs it."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(inputstring)["cells"])
        super().parse(
            "\n\n".join(text if kind == "markdown" else f"```ipython\n{text}\n```" for kind, text in cells), document
        )


def setup(app: Sphinx) -> None:
    app.add_source_parser(NotebookParser)
    # Before Sphinx collects trees of pages and files to copy.
    app.connect("doctree-read", add_navigation, priority=100)
    app.connect("doctree-read", link_files, priority=100)
    app.connect("build-finished", write_first_page)
