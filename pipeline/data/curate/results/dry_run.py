"""`pipeline curate --dry-run`: files, units, passes and rules, and what would be refused. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.format import counted, size
from pipeline.config.curation.curate import CurateConfig
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import HUB_TWICE, CurationPlan, curate_config, make_curation_plan
from pipeline.data.curate.decontamination.index import INDEX_FILE
from pipeline.data.curate.decontamination.items import all_items
from pipeline.data.curate.duplicates.kinds import kinds_of
from pipeline.data.curate.files import curate_folder
from pipeline.data.curate.measurers import items_folder, measure_settings
from pipeline.data.curate.passes.of_scope import make_scopes
from pipeline.data.curate.results.status import read_progress
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.work.frozen_plan import is_begun
from pipeline.data.work.units import SourceFiles

_REFUSED = "would be refused: "
_ROW_BYTES = 4 * 40
"""Of a document in the table of measures, about."""
_BAND_BYTES = 16
"""Of a band of a document."""
_DOCUMENT_BYTES = 3000
"""Of a document, where nobody knows better."""


def print_dry_run(console: Console, config: Config, sources: list[SourceFiles], problems: Sequence[str] = ()) -> None:
    """Print what the stage would do.

    Args:
        console: where to.
        config: the run.
        sources: that have files.
        problems: more that the command would be refused for.

    Raises:
        UserError: the command would be refused.
    """
    curate = curate_config(config)
    table = Table("source", "files", "bytes", "text", "units", "state", title="curate")
    plans: list[CurationPlan] = []
    refused = [*problems, *_file_problems(config)]
    for found in sources:
        plan, state = _plan(config, found)
        if state.startswith(_REFUSED):
            refused.append(f"source {found.source.name!r}: {state.removeprefix(_REFUSED)}")
        if plan is not None:
            plans.append(plan)
        units = "" if plan is None else f"{len(plan.units):,}"
        table.add_row(
            found.source.name, f"{len(found.files):,}", size(found.bytes), size(found.text_bytes), units, state
        )
        if found.source.hub is not None:
            say(console, HUB_TWICE.format(found.source.name))
    console.print(table)
    text = sum(found.text_bytes for found in sources)
    written = text // _DOCUMENT_BYTES * _bytes_per_document(curate)
    say(console, f"about {size(written)} would be written, if a document has {size(_DOCUMENT_BYTES)}")
    if len(plans) == len(sources):
        for scope in make_scopes(config, plans):
            compared = ", ".join(rule.name for rule in scope.compared) or "nothing is compared"
            say(console, f"scope {scope.name} ({', '.join(scope.preference)}): {compared}")
            for plan, rules in zip(scope.plans, scope.rules, strict=True):
                listed = ", ".join(f"{rule.name} {rule.bound:g}" for rule in rules[1:]) or "none"
                say(console, f"{plan.name}: rules of documents: {listed}")
    if curate.mode == "observe":
        say(console, "data.curate.mode is observe: preprocess would keep all documents")
    if refused:
        raise UserError("the command would be refused:\n" + "\n".join(f"  {reason}" for reason in refused))


def _file_problems(config: Config) -> list[str]:
    """Reason why the files of items of evaluations could not be read."""
    contamination = curate_config(config).decontaminate
    if contamination is None:
        return []
    try:
        for _ in all_items(contamination.model_copy(update={"tasks": []}), items_folder(config)):
            pass
    except UserError as error:
        return [str(error)]
    return []


def _plan(config: Config, found: SourceFiles) -> tuple[CurationPlan | None, str]:
    """The plan of a source, if it can be made, and the state of what is there."""
    folder = curate_folder(config.data_dir / found.source.name)
    has_items = (items_folder(config) / INDEX_FILE).is_file()
    try:
        plan = make_curation_plan(found, config, measure_settings(config, found.source, has_items=has_items))
    except UserError as error:
        return None, f"{_REFUSED}{error}"
    except FileNotFoundError as error:
        return None, f"{_REFUSED}{error.filename} is missing"
    if not (folder / PLAN_FILE).exists():
        return plan, "new"
    try:
        if differences := plan.differences(folder):
            verdict = _REFUSED if is_begun(folder) else "would be planned again: "
            return plan, f"{verdict}{'; '.join(differences)}"
    except UserError as error:
        return plan, f"{_REFUSED}{error}"
    progress = read_progress(folder, plan.name)
    return plan, f"{progress.done:,} of {counted(progress.units, 'unit')} measured"


def _bytes_per_document(curate: CurateConfig) -> int:
    near = curate.duplicates.near
    signature = near.bands * (near.rows * 4 + _BAND_BYTES) if near is not None else 0
    hashes = 24 * len([kind for kind in kinds_of(curate.duplicates) if kind != "bands"])
    return _ROW_BYTES + signature + hashes
