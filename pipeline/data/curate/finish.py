"""The pass `finish`: the verdicts of a source are summed up, reported and made the active ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.curate.files import CURATION_FILE
from pipeline.data.curate.passes import DECIDE, ScopePasses
from pipeline.data.curate.rules.base import Rule
from pipeline.data.curate.verdicts import Curation
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
    lines: int = 0
    """Removed lines of kept documents."""
    removed: dict[str, int] = field(default_factory=dict)
    """Documents by the rule that removed them."""
    is_new: bool = False
    """These decisions were not active before."""


def finish_source(passes: ScopePasses, number: int, mode: str, *, activate: bool = True) -> SourceCuration:
    """Write `curation.json` of the decisions about a source, and make them the active ones.

    Args:
        passes: of the scope, all done.
        number: of the source.
        mode: `data.curate.mode`.
        activate: whether they are to hold from now on.

    Raises:
        UserError: a job of `decide` has no receipt.
    """
    plan = passes.plan.plans[number]
    decisions = passes.plan.decisions(number)
    rules = (*passes.plan.rules[number], *passes.plan.compared)
    receipts = _receipts(passes, number)
    counts: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    verdicts: dict[str, str] = {}
    for receipt in receipts:
        counts.update({name: receipt["counts"][name] for name in ("rows", "documents", "rejected", "kept", "lines")})
        removed.update(receipt["counts"]["removed"])
        verdicts |= {name: about["xxh3"] for name, about in receipt["files"].items()}
    about = {
        "source": plan.name,
        "scope": passes.plan.name,
        "sources": source_names(passes),
        "measure_hash": plan.config_hash,
        "decide_hash": passes.plan.decide_hash(number),
        "mode": mode,
        "settings": passes.plan.decide_settings(number),
        "rules": [rule_json(rule) for rule in rules],
        **{name: counts[name] for name in ("rows", "documents", "rejected", "kept", "lines")},
        "removed": {rule.name: removed[rule.name] for rule in rules},
        "verdicts": verdicts,
    }
    content = storage.json_bytes(about)
    put_changed(decisions / CURATION_FILE, content)
    is_new = activate and put_changed(plan.folder / CURATION_FILE, content)
    return SourceCuration(
        plan.name,
        Curation(plan.folder, about),
        **{name: counts[name] for name in ("rows", "documents", "rejected", "kept", "lines")},
        removed={rule.name: removed[rule.name] for rule in rules},
        is_new=is_new,
    )


def source_names(passes: ScopePasses) -> list[str]:
    """Names of sources by their numbers in documents that verdicts name."""
    if passes.comparison is None:
        return [plan.name for plan in passes.plan.plans]
    return list(passes.comparison.source_names)


def rule_json(rule: Rule) -> dict[str, Any]:
    """A rule as `curation.json` has it."""
    return {"name": rule.name, "key": rule.key, "bound": rule.bound, "keeps": rule.keeps, "about": rule.about}


def _receipts(passes: ScopePasses, number: int) -> Sequence[dict[str, Any]]:
    decisions = passes.plan.decisions(number)
    found = []
    for job in passes.jobs(DECIDE):
        if job.folder == decisions:
            receipt = job.find()
            if receipt is None:
                raise UserError(f"{job} has no receipt any more; run the same command again")
            found.append(receipt)
    return found
