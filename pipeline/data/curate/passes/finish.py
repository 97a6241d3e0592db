"""The pass `finish`: the verdicts of a source are summed up, reported and made the active ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.common import storage
from pipeline.data.curate.duplicates.files import finished
from pipeline.data.curate.files import CURATION_FILE, verdicts_file
from pipeline.data.curate.passes.names import DECIDE
from pipeline.data.curate.passes.scope_passes import ScopePasses
from pipeline.data.curate.report.clusters import VerdictFile
from pipeline.data.curate.report.write import REPORT_HTML, REPORT_JSON, write_report
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.table import check_result
from pipeline.data.curate.verdicts import STATISTICS_SUFFIX, Curation
from pipeline.data.work.bad_input import put_changed


@dataclass
class SourceCuration:
    """Result of one source."""

    name: str
    curation: Curation
    rows: int = 0
    documents: int = 0
    rejected: int = 0
    kept: int = 0
    bytes: int = 0
    """Bytes of text of all documents."""
    kept_bytes: int = 0
    lines: int = 0
    """Removed lines of kept documents."""
    paragraphs: int = 0
    """Repeated paragraphs of kept documents; their lines are among `lines` if they are removed."""
    removed: dict[str, int] = field(default_factory=dict)
    """Documents by the rule that removed them."""
    is_new: bool = False
    """These decisions were not active before."""
    estimated: tuple[Path, int] | None = None
    """Folder of the decisions before, if those were by estimated similarity, and documents that only one of both
    keeps."""


_TOTALS = ("rows", "documents", "rejected", "kept", "lines")


def finish_source(passes: ScopePasses, number: int, mode: str, *, activate: bool = True) -> SourceCuration:
    """Write `curation.json` and the report of the decisions about a source, and make them the active ones.

    Args:
        passes: of the scope, all done.
        number: of the source.
        mode: `data.curate.mode`.
        activate: whether they are to hold from now on.

    Raises:
        UserError: a job of `decide` has no receipt.
        DamagedResult: a file of it is not as it was written.
    """
    plan, decisions = passes.plan.plans[number], passes.plan.decisions(number)
    jobs = passes.decide_jobs(number)
    receipts = finished(list(jobs), DECIDE)
    totals: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    verdicts: dict[str, str] = {}
    statistics: dict[str, str] = {}
    for receipt in receipts:
        totals.update({name: receipt["counts"][name] for name in _TOTALS})
        totals["paragraphs"] += receipt["counts"].get("paragraphs", 0)
        removed.update(receipt["counts"]["removed"])
        hashes = {name: about["xxh3"] for name, about in receipt["files"].items()}
        verdicts |= {name: each for name, each in hashes.items() if not name.endswith(STATISTICS_SUFFIX)}
        statistics |= {name: each for name, each in hashes.items() if name.endswith(STATISTICS_SUFFIX)}
    for name, xxh3 in verdicts.items():
        check_result(decisions / name, xxh3, DECIDE)  # receipts are found by the sizes of their files alone
    rules = (*passes.plan.rules[number], *passes.plan.compared)
    about: dict[str, Any] = {
        "source": plan.name,
        "scope": passes.plan.name,
        "sources": source_names(passes),
        "measure_hash": plan.config_hash,
        "decide_hash": passes.plan.decide_hash(number),
        "mode": mode,
        "settings": passes.plan.decide_settings(number),
        "rules": [rule_json(rule) for rule in rules],
        **{name: totals[name] for name in _TOTALS},
        "removed": {rule.name: removed[rule.name] for rule in rules},
        "verdicts": verdicts,
    }
    if passes.plan.curate.duplicates.paragraphs is not None:
        about["paragraphs"] = totals["paragraphs"]
    if passes.contamination is not None:
        about["contamination"] = passes.contamination.counts.name  # `data why` tells common n-grams by it
    content = storage.json_bytes(about)
    report: dict[str, Any] | None = None
    if put_changed(decisions / CURATION_FILE, content) or not all(
        (decisions / name).is_file() for name in (REPORT_JSON, REPORT_HTML)
    ):
        chunks = [job.chunk for job in jobs]
        contamination, excerpts = passes.contamination, passes.excerpts(number)
        report = write_report(
            decisions,
            about,
            (_statistics(decisions / name, xxh3) for name, xxh3 in statistics.items()),
            [VerdictFile(verdicts_file(decisions, c.unit, c.chunk), c.unit, c.first) for c in chunks],
            contamination=None if contamination is None else storage.get_json(contamination.touched),
            excerpts=(lambda _: {}) if excerpts is None else excerpts.of,
        )
    is_new = activate and put_changed(plan.folder / CURATION_FILE, content)
    counts: dict[str, Any] = {name: totals[name] for name in (*_TOTALS, "paragraphs")}
    funnel = (report or storage.read_object(decisions / REPORT_JSON))["funnel"]
    counts |= {name: funnel[name] for name in ("bytes", "kept_bytes")}
    return SourceCuration(plan.name, Curation(plan.folder, about), **counts, removed=about["removed"], is_new=is_new)


def _statistics(path: Path, xxh3: str) -> dict[str, Any]:
    """Statistics of a chunk.

    Raises:
        DamagedResult: they are not those that were written.
    """
    check_result(path, xxh3, DECIDE)
    found: dict[str, Any] = storage.get_json(path)
    return found


def source_names(passes: ScopePasses) -> list[str]:
    """Names of sources by their numbers in documents that verdicts name."""
    if passes.comparison is None:
        return [plan.name for plan in passes.plan.plans]
    return list(passes.comparison.source_names)


def rule_json(rule: DocumentRule) -> dict[str, Any]:
    """A rule as `curation.json` has it."""
    return {"name": rule.name, "key": rule.key, "bound": rule.bound, "keeps": rule.keeps, "about": rule.about}
