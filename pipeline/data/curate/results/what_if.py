"""Other bounds: which documents they would keep, beside the active decisions. Nothing is changed."""

from __future__ import annotations

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config.root import Config
from pipeline.data.curate.curation_plan import curate_config, plan_sources
from pipeline.data.curate.passes.excerpts import ReadTexts
from pipeline.data.curate.results.differences import find_differences, list_changed, show_differences, show_examples
from pipeline.data.curate.stage import CurationStage
from pipeline.data.curate.verdicts import read_curation
from pipeline.data.work.units import find_source_files


def what_if(
    config: Config, changed: Config, console: Console, read_texts: ReadTexts | None = None, *, listed: bool
) -> None:
    """Decide under other bounds, and print what differs from the active decisions.

    Args:
        config: the run.
        changed: the same with other bounds.
        console: where to.
        read_texts: reads the beginnings of documents.
        listed: list all documents that change, as JSON Lines.

    Raises:
        UserError: what was changed decides measures, or there are no active decisions.
    """
    curate_config(config)
    sources = find_source_files(changed, held_out=False)
    plans = plan_sources(changed, sources)
    active = {plan.name: read_curation(plan.folder) for plan in plans}
    for plan in plans:
        if differences := plan.differences(plan.folder):
            raise UserError(
                f"--what-if decides again by what was measured, but this would measure {plan.name} in another way:\n"
                + "\n".join(f"  {difference}" for difference in differences)
                + "\nTo try it, run `pipeline curate` with another data.dir"
            )
    stage = CurationStage(changed, Console(quiet=True) if listed else console, plans, read_texts)
    try:
        results = stage.decide(activate=False)
    finally:
        stage.remove_stale()
    for result in results:
        first, second = active[result.name], result.curation
        if listed:
            list_changed(first, second)
            continue
        found = find_differences(first, second, curate_config(changed).seed)
        show_differences(console, first, second, found, ("active", "what if"))
        show_examples(console, first, found, read_texts)
