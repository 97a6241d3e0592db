"""The page of a curation that links those of its sources, with their counts and rules side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.common.page.html import Table, anchor, document, section
from pipeline.data.curate.files import CURATE
from pipeline.data.curate.report.page import page_css, share
from pipeline.data.curate.report.write import REPORT_HTML, REPORT_JSON
from pipeline.data.work.bad_input import put_changed


def write_index(data: Path, decisions: Sequence[Path]) -> Path:
    """Write `curate/report.html` in the folder of the datasets, from the reports of the sources; returns its path.

    Args:
        data: that folder.
        decisions: folders of the decisions about the sources, with their reports.
    """
    path = data / CURATE / REPORT_HTML
    reports = [storage.read_object(folder / REPORT_JSON) for folder in decisions]
    links = [os.path.relpath(folder / REPORT_HTML, path.parent) for folder in decisions]
    storage.make_below(data, path.parent)
    put_changed(path, _page(reports, links))
    return path


def _page(reports: Sequence[dict[str, Any]], links: Sequence[str]) -> bytes:
    rows = tuple(
        (anchor(link, report["source"]), *_cells(report["funnel"])) for report, link in zip(reports, links, strict=True)
    )
    words = "A name leads to the source's own page: values and bounds, examples, duplicates."
    body = [
        "<header><p class='above'>Curation</p><div class='name'><h1>Sources</h1></div></header><main>",
        section("Sources", Table(_HEAD, rows, 1), words),
        section("Documents that a rule removes", _rules(reports), "A document counts at each rule that removes it."),
        "</main>",
    ]
    return document("Curation", body, page_css())


_HEAD = ("source", "records", "documents", "kept", "share kept", "bytes kept", "duplicates", "edited")


def _cells(funnel: dict[str, Any]) -> tuple[str, ...]:
    numbers = [f"{funnel[name]:,}" for name in ("rows", "documents", "kept", "duplicates", "edited")]
    shares = share(funnel["kept"], funnel["documents"]), share(funnel["kept_bytes"], funnel["bytes"])
    return (*numbers[:3], *shares, *numbers[3:])


def _rules(reports: Sequence[dict[str, Any]]) -> Table:
    """A row for each rule that removes something, a column for each source."""
    fires = [{rule["name"]: rule["fires"] for rule in report["rules"]} for report in reports]
    names = dict.fromkeys(name for each in fires for name in each)
    rows = [(name, *(f"{each[name]:,}" if name in each else "" for each in fires)) for name in names]
    some = tuple(row for row in rows if any(cell not in ("", "0") for cell in row[1:]))
    return Table(("rule", *(report["source"] for report in reports)), some, 1)
