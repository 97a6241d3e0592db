"""The report's files: `report.json`, and `report.html` that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.data.curate.report.build import Excerpt, Key, build, wanted_texts
from pipeline.data.curate.report.clusters import VerdictFile, clusters
from pipeline.data.curate.report.page import page
from pipeline.data.curate.report.statistics import merge

REPORT_JSON, REPORT_HTML = "report.json", "report.html"


def write_report(
    decisions: Path,
    curation: Mapping[str, Any],
    statistics: Iterable[dict[str, Any]],
    verdicts: Sequence[VerdictFile],
    *,
    contamination: Any = None,
    excerpts: Callable[[Sequence[Key]], Mapping[Key, Excerpt]] = lambda _: {},
) -> dict[str, Any]:
    """Write both files into the folder of the decisions; the same input gives the same bytes.

    Args:
        decisions: the folder.
        curation: what `curation.json` has there.
        statistics: `chunk_statistics` of every chunk, in any order.
        verdicts: of every chunk, ascending by (unit, row).
        contamination: items of evaluations that were found, if they were looked for.
        excerpts: finds the beginnings of documents, as far as they are stored.

    Returns:
        the report.
    """
    total = merge(statistics)
    found = clusters(verdicts, total["duplicates"])
    texts = excerpts(wanted_texts(total))
    report = build(curation, total, found, contamination=contamination, excerpts=texts)
    storage.put_json(decisions / REPORT_JSON, report)
    storage.put(decisions / REPORT_HTML, page(report))
    return report
