"""Everything that may end curation at its start, for the stage itself and for previews. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.problems import Problems, StartCheck
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import CurationPlan, curate_config, make_curation_plan
from pipeline.data.curate.decontamination.index import INDEX_FILE, open_index
from pipeline.data.curate.decontamination.items import all_items
from pipeline.data.curate.files import curate_folder
from pipeline.data.curate.measurers import items_folder, measure_settings
from pipeline.data.curate.passes.scope_passes import check_against
from pipeline.data.datasets.files import PLAN_FILE
from pipeline.data.work.frozen_plan import has_units
from pipeline.data.work.units import SourceFiles, check_files


def no_tasks(config: Config) -> list[str]:
    """No problems of tasks."""
    return []


@dataclass(frozen=True)
class CurateScope:
    """A curation that is about to start.

    Attributes:
        config: the run.
        sources: those whose files were found.
        task_problems: reasons why the items of tasks could not be read: data knows of no tasks.
        plans: gets the plan of each source that can be made.
    """

    config: Config
    sources: Sequence[SourceFiles]
    task_problems: Callable[[Config], list[str]] = no_tasks
    plans: list[CurationPlan] = field(default_factory=list)


def _new(scope: CurateScope) -> Iterator[tuple[SourceFiles, bool]]:
    for source in scope.sources:
        yield source, not (curate_folder(scope.config.data_dir / source.source.name) / PLAN_FILE).exists()


def _items(scope: CurateScope, found: Problems) -> None:
    """Files and tasks of evaluations whose texts are looked for."""
    for problem in scope.task_problems(scope.config):
        found.problem(problem)
    contamination = curate_config(scope.config).decontaminate
    if contamination is not None:
        for _ in all_items(contamination.model_copy(update={"tasks": []}), items_folder(scope.config)):
            pass


def _plans(scope: CurateScope, found: Problems) -> None:
    """Models and settings of the measures, and measures that were begun with others."""
    config = scope.config
    contamination = curate_config(config).decontaminate
    has_items = contamination is not None and _has_index(items_folder(config) / INDEX_FILE)
    # Without an index, which the stage writes anew, a plan that has one cannot be compared yet.
    compares = contamination is None or has_items
    for source in scope.sources:
        with found.collecting():
            try:
                plan = make_curation_plan(source, config, measure_settings(config, source.source, has_items=has_items))
            except FileNotFoundError as error:
                raise UserError(f"source {source.source.name!r}: {error.filename} is missing") from None
            scope.plans.append(plan)
            is_planned = compares and (plan.folder / PLAN_FILE).exists()
            if is_planned and (differences := plan.differences(plan.folder)) and has_units(plan.folder):
                raise plan.refusal(plan.folder, differences)


def _has_index(path: Path) -> bool:
    """Tell whether there is an index of evaluations; a damaged one is written anew by the stage."""
    try:
        open_index(path)
    except UserError:
        return False
    return True


CURATE_CHECKS: tuple[StartCheck[CurateScope], ...] = (
    StartCheck("files of sources", lambda scope, found: check_files(scope.config, _new(scope), found)),
    StartCheck("items of evaluations", _items),
    StartCheck("earlier curations", lambda scope, found: check_against(curate_config(scope.config))),
    StartCheck("models and plans", _plans),
)
