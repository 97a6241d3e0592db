"""Tables of the page on rules, written from the presets and the counters."""

from __future__ import annotations

from pipeline.common.format import table
from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.measures.counters import COUNTERS
from pipeline.data.curate.rules.presets import MEASURES, preset_rules

SOURCES = {
    "gopher_quality": "Rae et al. 2021, A1.1",
    "gopher_repetition": "Rae et al. 2021, table A1",
    "c4": "Raffel et al. 2020, 2.2",
    "fineweb": "Penedo et al. 2024, 3.6",
}
"""Where the definition and the bounds of a preset were published."""


def rules() -> str:
    """A table of the rules of all presets with their default bounds."""
    presets = RulesConfig.model_validate({name: {} for name in MEASURES})
    rows = []
    for rule in preset_rules(presets, ""):
        preset, name = rule.name.split(".")
        sign = "at least" if rule.keeps == "min" else "at most"
        formula = f"`{MEASURES[preset][name].formula}`"
        rows.append((f"`{rule.name}`", rule.about, formula, f"{sign} {rule.bound:,g}", SOURCES[preset]))
    return table(("rule", "value", "of the columns", "keeps", "source"), rows)


def counters() -> str:
    """A table of the columns of counters."""
    return table(("column", "counts"), ((f"`{name}`", about) for name, about in COUNTERS.items()))


def tables() -> dict[str, str]:
    """Tables of the page, by the name of their place."""
    return {"rules": rules(), "counters": counters()}
