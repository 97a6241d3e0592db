"""`pipeline curate --dry-run`: files, units, passes and rules, and what would be refused. Writes nothing."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console
from rich.table import Table

from pipeline.common.console import print_table, say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.config.curation.curate import CurateConfig
from pipeline.data.curate.checks import CurateScope
from pipeline.data.curate.curation_plan import HUB_TWICE, CurationPlan, curate_config
from pipeline.data.curate.duplicates.kinds import kinds_of
from pipeline.data.curate.passes.across import compared_alone
from pipeline.data.curate.passes.scope_passes import make_scopes
from pipeline.data.curate.results.status import read_progress
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.work.frozen_plan import has_units

_ROW_BYTES = 4 * 40
"""Of a document in the table of measures, about."""
_BAND_BYTES = 16
"""Of a band of a document."""
_DOCUMENT_BYTES = 3000
"""Of a document, where nobody knows better."""


def print_dry_run(console: Console, scope: CurateScope) -> None:
    """Print what the stage would do with the sources whose files were found and whose plans can be made."""
    config, curate = scope.config, curate_config(scope.config)
    table = Table("source", "files", "bytes", "text", "units", "state", title="curate")
    plans = {plan.name: plan for plan in scope.plans}
    for found in scope.sources:
        plan = plans.get(found.source.name)
        units, state = ("", "") if plan is None else (f"{len(plan.units):,}", _state(plan))
        table.add_row(
            found.source.name, f"{len(found.files):,}", size(found.bytes), size(found.text_bytes), units, state
        )
        if found.source.hub is not None:
            say(console, HUB_TWICE.format(found.source.name))
    print_table(console, table)
    text = sum(found.text_bytes for found in scope.sources)
    written = text // _DOCUMENT_BYTES * _bytes_per_document(curate)
    say(console, f"about {size(written)} would be written, if a document has {size(_DOCUMENT_BYTES)}")
    if len(plans) == len(scope.sources):
        scopes = make_scopes(config, scope.plans)
        if len(scopes) > 1 and any(each.compared for each in scopes):
            say(console, compared_alone([each.name for each in scopes], [each.preference for each in scopes]))
        for each in scopes:
            compared = ", ".join(rule.name for rule in each.compared) or "nothing is compared"
            say(console, f"scope {each.name} ({', '.join(each.preference)}): {compared}")
            for plan, rules in zip(each.plans, each.rules, strict=True):
                listed = ", ".join(f"{rule.name} {rule.bound:g}" for rule in rules[1:]) or "none"
                say(console, f"{plan.name}: rules of documents: {listed}")
    if curate.mode == "observe":
        say(console, "data.curate.mode is observe: preprocess would keep all documents")


def _state(plan: CurationPlan) -> str:
    """State of what is there."""
    if not (plan.folder / PLAN_FILE).exists():
        return "new"
    with suppress(UserError):  # it is told with the problems
        if differences := plan.differences(plan.folder):
            again = f"would be planned again: {'; '.join(differences)}"
            return "begun with other settings" if has_units(plan.folder) else again
    progress = read_progress(plan.folder, plan.name)
    return f"{progress.done:,} of {counted(progress.units, 'unit')} measured"


def _bytes_per_document(curate: CurateConfig) -> int:
    near = curate.duplicates.near
    signature = near.bands * (near.rows * 4 + _BAND_BYTES) if near is not None else 0
    hashes = 24 * len([kind for kind in kinds_of(curate.duplicates) if kind != "bands"])
    return _ROW_BYTES + signature + hashes
