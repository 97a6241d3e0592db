"""The checks of all stages of a run, in one function that submissions, `pipeline run` and their previews share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.common.problems import Problems
from pipeline.config import Config
from pipeline.data.curate.checks import CURATE_CHECKS, CurateScope
from pipeline.data.preprocess.checks import PREPROCESS_CHECKS, PreprocessScope
from pipeline.data.work.units import find_source_files
from pipeline.eval.checks import EVAL_CHECKS, EvalScope
from pipeline.train.start.checks import TRAIN_CHECKS, TrainScope


@dataclass
class Scopes:
    """Scopes of the stages that make data, for previews; None for a stage that cannot be shown."""

    curate: CurateScope | None = None
    preprocess: PreprocessScope | None = None


def look_at_stages(
    config: Config,
    stages: Collection[str],
    found: Problems,
    *,
    train: int = 1,
    evaluate: int = 1,
    step: int | None = None,
) -> Scopes:
    """Look for everything that would end a stage at its start, and that can be told now. Writes nothing.

    Args:
        config: the run.
        stages: of `curate`, `preprocess`, `train` and `eval`.
        found: gets problems, warnings, and what waits for an earlier stage.
        train: processes that train.
        evaluate: processes that evaluate.
        step: of the checkpoint to evaluate; None for the latest one.

    Returns:
        The sources that were found, and the plans of curation.
    """
    scopes = Scopes()
    makes_data = "curate" in stages or "preprocess" in stages
    sources = find_source_files(config, found, held_out="preprocess" in stages) if makes_data else []
    if "curate" in stages:
        from pipeline.eval.curation_items import task_problems

        curated = [source for source in sources if not source.held_out]
        scopes.curate = CurateScope(config, curated, task_problems)
        found.look(CURATE_CHECKS, scopes.curate)
    if "preprocess" in stages:
        scope = PreprocessScope(config, sources, curation_comes="curate" in stages)
        scopes.preprocess = scope if found.look(PREPROCESS_CHECKS, scope) else None
    if "train" in stages:
        found.look(TRAIN_CHECKS, TrainScope(config, train, makes_data))
    if "eval" in stages:
        found.look(EVAL_CHECKS, EvalScope(config, evaluate, step, makes_data, finds_checkpoint="train" not in stages))
    return scopes
