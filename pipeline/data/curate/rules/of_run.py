"""Rules of a run file, in the order in which they name the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.curation.curate import CurateConfig, DuplicatesConfig
from pipeline.data.curate.decontamination.rule import contamination_rules
from pipeline.data.curate.models.rules import classifier_rules, language_rules
from pipeline.data.curate.rules.base import DocumentRule
from pipeline.data.curate.rules.presets import empty_rule, preset_rules
from pipeline.data.curate.url_lists import KEY as URL_LISTS_KEY
from pipeline.data.curate.url_lists import url_list_rules

LINES_RULE = "duplicates.lines"
PARAGRAPHS_RULE = "duplicates.paragraphs"
_KEY = "data.curate.duplicates"


@dataclass(frozen=True)
class ComparedRule(DocumentRule):
    """A rule of duplicates: its values come from comparing documents, not from the table."""

    def values(self, table: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """None.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self.name} has no values in the table of measures")


def compared_rules(duplicates: DuplicatesConfig) -> tuple[DocumentRule, ...]:
    """Rules of duplicates."""
    rules: list[DocumentRule] = []
    if duplicates.exact is not None:
        rules.append(ComparedRule("duplicates.exact", f"{_KEY}.exact", 0, "max", "equal to a kept document"))
    if duplicates.url is not None:
        rules.append(ComparedRule("duplicates.url", f"{_KEY}.url", 0, "max", "address of a kept document"))
    if duplicates.near is not None:
        bound = duplicates.near.min_similarity
        about = "similarity to a kept document"
        rules.append(ComparedRule("duplicates.near", f"{_KEY}.near.min_similarity", bound, "max", about))
    if duplicates.lines is not None:
        about = "share of lines that occur in other documents; all of them"
        rules.append(ComparedRule(LINES_RULE, f"{_KEY}.lines", 0, "max", about))
    if duplicates.paragraphs is not None:
        about = "share of bytes in paragraphs that stay in other documents"
        most = duplicates.paragraphs.max_share
        key = f"{_KEY}.paragraphs{'' if most is None else '.max_share'}"
        rules.append(ComparedRule(PARAGRAPHS_RULE, key, 1 if most is None else most, "max", about))
    return tuple(rules)


def local_rules(config: CurateConfig, source: str, settings: Mapping[str, Any]) -> tuple[DocumentRule, ...]:
    """Rules over the measures of a document alone.

    Args:
        config: of the run file.
        source: name.
        settings: of its plan.
    """
    own = config.by_source.get(source)
    key = "data.curate.rules" if own is None else f"data.curate.by_source.{source}"
    labels = settings.get("data.curate.language", {}).get("labels", [])
    return (
        empty_rule("data.curate.clean"),
        *url_list_rules(settings.get(URL_LISTS_KEY)),
        *language_rules(config.language, labels),
        *preset_rules(config.rules if own is None else own, key),
        *classifier_rules(config.classifiers),
        *contamination_rules(config.decontaminate),
    )
