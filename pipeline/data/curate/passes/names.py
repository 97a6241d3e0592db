"""Names of the passes of a curation, in their order."""

from __future__ import annotations

from pipeline.config.curation.curate import CurateConfig
from pipeline.data.curate.duplicates.kinds import pass_names as compared_passes

MEASURE, CONTAMINATION_PASS, EXCERPTS_PASS, DECIDE = "measure", "contamination", "excerpts", "decide"
ONE_JOB = frozenset({CONTAMINATION_PASS, "join"})
"""Passes of one job for each scope."""


def pass_names(curate: CurateConfig) -> tuple[str, ...]:
    """Passes that a curation needs."""
    contamination = () if curate.decontaminate is None else (CONTAMINATION_PASS,)
    return (MEASURE, *contamination, *compared_passes(curate.duplicates), EXCERPTS_PASS, DECIDE)
