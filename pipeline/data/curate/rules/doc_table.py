"""Tables of the page on rules, written from the presets and the counters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.common.storage import put
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
_END = "<!-- end -->"


def rules() -> str:
    """A table of the rules of all presets with their default bounds."""
    presets = RulesConfig.model_validate({name: {} for name in MEASURES})
    rows = []
    for rule in preset_rules(presets, ""):
        preset, name = rule.name.split(".")
        sign = "at least" if rule.keeps == "min" else "at most"
        formula = f"`{MEASURES[preset][name].formula}`"
        rows.append((f"`{rule.name}`", rule.about, formula, f"{sign} {rule.bound:,g}", SOURCES[preset]))
    return _table(("rule", "value", "of the columns", "keeps", "source"), rows)


def counters() -> str:
    """A table of the columns of counters."""
    return _table(("column", "counts"), ((f"`{name}`", about) for name, about in COUNTERS.items()))


def page(text: str) -> str:
    """The page with its tables replaced."""
    for name, table in {"rules": rules(), "counters": counters()}.items():
        begin = f"<!-- {name}: written by `make docs` -->"
        before, marker, rest = text.partition(begin)
        _, end, after = rest.partition(_END)
        assert marker and end, f"the page has no lines {begin} and {_END}"
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    for target in map(Path, sys.argv[1:]):
        put(target, page(target.read_text(encoding="utf-8")).encode())
