"""Chunks with verdicts, made up: tables of small numbers, so that values often lie on bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.data.curate.files import EDITED, FIRES_ALONE, NOBODY, REJECTED, VERDICT
from pipeline.data.curate.report.statistics import Groups, JudgedChunk
from pipeline.data.curate.rules.base import DocumentRule, Ratio
from pipeline.data.curate.scope import document

LOCAL: tuple[DocumentRule, ...] = (
    Ratio("clean.empty", "data.curate.clean", 1, "min", "bytes", numerator="bytes"),
    Ratio("gopher_quality.min_words", "data.curate.rules.gopher_quality.min_words", 50, "min", "words", "words"),
    Ratio("gopher_quality.max_words", "data.curate.rules.gopher_quality.max_words", 400, "max", "words", "words"),
    Ratio("c4.max_curly_brackets", "data.curate.rules.c4.max_curly_brackets", 0, "max", "curly brackets", "curly"),
    Ratio("gopher_quality.max_hashes", "data.curate.x", 0.1, "max", "`#` per word", "hashes", "words"),
    Ratio("fineweb.max_short_lines", "data.curate.y", 0.67, "max", "share of short lines", "short", "lines"),
    Ratio("fineweb.min_punctuated_lines", "data.curate.z", 0.12, "min", "share of punctuated lines", "ends", "lines"),
)
DUPLICATES = ("duplicates.exact", "duplicates.near")
NAMES = (*(rule.name for rule in LOCAL), *DUPLICATES)
TABLE = np.dtype(
    [("state", "u1"), ("edited", "u1"), ("bytes", "<u4")]
    + [(name, "<u4") for name in ("words", "curly", "hashes", "short", "ends", "lines")]
)
LANGUAGES = ("de", "en", "fr")
DOMAINS = ("example.org", "a.example", "<script>.example", "b.example")


def curation(mode: str = "apply") -> dict[str, Any]:
    """What `curation.json` says of these rules."""
    rules = [
        {"name": rule.name, "key": rule.key, "bound": rule.bound, "keeps": rule.keeps, "about": rule.about}
        for rule in LOCAL
    ]
    rules += [
        {"name": name, "key": f"data.curate.{name}", "bound": bound, "keeps": "max", "about": "similarity"}
        for name, bound in zip(DUPLICATES, (None, 0.7), strict=True)
    ]
    return {
        "source": "web",
        "scope": "web",
        "sources": ["books", "web"],
        "mode": mode,
        "measure_hash": "0" * 32,
        "decide_hash": "1" * 32,
        "settings": {},
        "rules": rules,
    }


def judged(seed: int, rows: int, unit: int = 0, first: int = 0) -> JudgedChunk:
    """A chunk with documents of all kinds."""
    chance = np.random.default_rng(seed)
    table: Any = np.zeros(rows, TABLE)
    table["state"] = chance.choice([0, 0, 0, 0, 0, 0, 0, 0, 1, 2], rows)
    text = table["state"] == 0
    table["bytes"] = np.where(text, chance.integers(1, 5000, rows), 0)
    table["edited"] = text & (chance.random(rows) < 0.2)
    spread = np.exp(chance.normal(4.8, 0.9, rows)).astype(np.int64)
    table["words"] = np.where(text, spread, 0)
    table["curly"] = np.where(text, chance.integers(0, 40, rows) * (chance.random(rows) < 0.1), 0)
    table["hashes"] = np.where(text, table["words"] * chance.random(rows) ** 6 // 2, 0)
    table["lines"] = np.where(text, chance.integers(1, 60, rows), 0)
    table["short"] = table["lines"] * chance.random(rows) ** 2
    table["ends"] = table["lines"] * np.sqrt(chance.random(rows))
    fires = np.zeros((len(NAMES), rows), bool)
    for place, rule in enumerate(LOCAL):
        fires[place] = rule.fires(table) & ((table["state"] == 2) if place == 0 else text)
    fires[-2] = text & (chance.random(rows) < 0.05)
    fires[-1] = text & (chance.random(rows) < 0.1)
    keepers = np.array([document(1, 0, int(chance.integers(0, 8))) for _ in range(rows)], np.uint64)
    similarity = chance.integers(70, 113, rows) / 112
    codes = {"languages": chance.integers(-1, len(LANGUAGES), rows), "domains": chance.integers(0, len(DOMAINS), rows)}
    names = {"languages": LANGUAGES, "domains": DOMAINS}
    groups = {name: Groups(codes[name], names[name]) for name in names}
    chunk = JudgedChunk(unit, first, NAMES, LOCAL, table, fires, np.zeros(rows, VERDICT), groups)
    return replace(chunk, verdicts=verdicts(chunk, keepers, similarity))


def verdicts(chunk: JudgedChunk, keepers: Any, similarity: Any) -> Any:
    """Verdicts by a plain loop: the first rule that fires."""
    found = np.zeros(len(chunk.table), VERDICT)
    for row, (state, edited) in enumerate(zip(chunk.table["state"], chunk.table["edited"], strict=True)):
        fired = [place for place in range(len(NAMES)) if chunk.fires[place, row]] if state != 1 else []
        flags = REJECTED * (state == 1) + EDITED * (not fired and edited) + FIRES_ALONE * (len(fired) == 1)
        value, kept = 0.0, NOBODY
        if fired and fired[0] >= len(LOCAL):
            value = 1.0 if fired[0] == len(LOCAL) else similarity[row]
            kept = int(keepers[row])
        elif fired:
            value = LOCAL[fired[0]].values(chunk.table[row : row + 1])[0]
        found[row] = (fired[0] + 1 if fired else 0, flags, value, kept)
    return found
