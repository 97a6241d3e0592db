"""Report of a curation: all that its page shows, as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.curate.report.bins import dense, edges, kept_at, scale_of
from pipeline.data.curate.report.examples import MOST
from pipeline.data.curate.scope import place

BYTES_PER_TOKEN = 4
"""Estimate; no tokenizer is needed to curate."""
DOMAINS_SHOWN = 50
CHARACTERS = 300
"""Beginning of a document that is shown."""
FACTORS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
STEPS = (-0.2, -0.1, -0.05, -0.02, -0.01, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Other bounds of the what-if table: multiples of a count, distances from a share."""
Key = tuple[int, int]
"""(unit, row in the unit)."""


class Excerpt(NamedTuple):
    """The beginning of a document, read for the report."""

    place: str
    """File, and line or row."""
    text: str
    id: str = ""


def build(
    curation: Mapping[str, Any],
    statistics: Mapping[str, Any],
    clusters: Mapping[str, Any],
    *,
    contamination: Any = None,
    excerpts: Mapping[Key, Excerpt] | None = None,
) -> dict[str, Any]:
    """The report.

    Args:
        curation: `curation.json` of the decisions.
        statistics: the sum of `chunk_statistics` over all chunks.
        clusters: as `clusters.clusters` returns them.
        contamination: items of evaluations that were found, if they were looked for.
        excerpts: beginnings of documents, as far as they could be read.

    Returns:
        what `docs/curation.md` describes under "report.json".
    """
    rules = [_rule(about, of, statistics) for about, of in zip(curation["rules"], statistics["rules"], strict=True)]
    texts = excerpts or {}
    return {
        "source": curation["source"],
        "scope": curation["scope"],
        "sources": list(curation["sources"]),
        "mode": curation["mode"],
        "measure_hash": curation["measure_hash"],
        "decide_hash": curation["decide_hash"],
        "settings": curation["settings"],
        "funnel": _funnel(rules, statistics),
        "rules": rules,
        "together": statistics["together"],
        "similarity": statistics["similarity"],
        "clusters": {"sizes": clusters["sizes"], "largest": [_cluster(each, curation) for each in clusters["largest"]]},
        "languages": _ordered(statistics["languages"]),
        "domains": _domains(statistics["domains"]),
        "contamination": contamination,
        "examples": [
            {kind: [_example(each, texts) for each in examples[kind]] for kind in MOST}
            for examples in statistics["examples"]
        ],
    }


def wanted_texts(statistics: Mapping[str, Any]) -> list[Key]:
    """Documents whose beginnings the report shows, by the sum of the statistics over all chunks."""
    return sorted({(each[3], each[4]) for of in statistics["examples"] for kind in MOST for each in of[kind]})


def tokens(size: int) -> int:
    """Estimate of the tokens of a text of some bytes."""
    return size // BYTES_PER_TOKEN


def _funnel(rules: Sequence[Mapping[str, Any]], statistics: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rows", "rejected", "documents", "bytes", "kept", "kept_bytes", "edited", "duplicates")
    left, left_bytes, steps = statistics["documents"], statistics["bytes"], []
    for rule in rules:
        left, left_bytes = left - rule["first"], left_bytes - rule["first_bytes"]
        removed = {"documents": rule["first"], "bytes": rule["first_bytes"], "tokens": tokens(rule["first_bytes"])}
        steps.append({"rule": rule["name"], **removed, "left": left, "left_bytes": left_bytes})
    return {
        **{name: statistics[name] for name in names},
        "tokens": tokens(statistics["bytes"]),
        "kept_tokens": tokens(statistics["kept_bytes"]),
        "steps": steps,
    }


def _rule(about: Mapping[str, Any], counts: Mapping[str, Any], statistics: Mapping[str, Any]) -> dict[str, Any]:
    measured = bool(counts["all"][0])
    return {
        **about,
        **counts,
        "scale": scale_of(about["about"]) if measured else None,
        "what_if": _what_if(about, counts, statistics) if measured else [],
    }


def _what_if(
    about: Mapping[str, Any], counts: Mapping[str, Any], statistics: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Documents that other bounds keep: `kept` of all rules, `passes` of this rule alone. Exact, by edges of bins."""
    bound, keeps, scale = about["bound"], about["keeps"], scale_of(about["about"])
    others = [bound + step for step in STEPS] if scale == "linear" else [bound * factor for factor in FACTORS]
    if scale != "linear" and bound == 0:
        others = [1, 2, 3, 5, 10, 20, 50, 100]
    all_edges = edges(scale)
    last = 1.0 if scale == "linear" and bound <= 1 else np.inf
    near = {int(np.abs(all_edges - other).argmin()) for other in others if 0 <= round(other, 9) <= last}
    kept, passes = kept_at(dense(counts["free"]), keeps), kept_at(dense(counts["all"]), keeps)
    measured = sum(counts["all"][1])
    rows = [
        {"bound": float(all_edges[at]), "kept": int(kept[at]), "passes": int(passes[at])}
        for at in near
        if all_edges[at] != bound
    ]
    beyond = counts["fires"] - counts["otherwise"]  # those removed otherwise are in no histogram
    now = {"bound": bound, "kept": statistics["kept"], "passes": measured - beyond}
    off = {"bound": None, "kept": sum(counts["free"][1]), "passes": measured}
    return [*sorted([*rows, now], key=lambda row: row["bound"]), off]


def _ordered(groups: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    return [[name, *groups[name]] for name in sorted(groups, key=lambda name: (-groups[name][0], name))]


def _domains(groups: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    ordered = _ordered(groups)
    rest = np.array([counts for _, *counts in ordered[DOMAINS_SHOWN:]], np.int64).reshape(-1, 4).sum(axis=0).tolist()
    return {"number": len(ordered), "largest": ordered[:DOMAINS_SHOWN], "rest": rest}


def _cluster(cluster: Sequence[Any], curation: Mapping[str, Any]) -> dict[str, Any]:
    keeper, removed, members = cluster
    source, unit, row = place(keeper)
    names = [rule["name"] for rule in curation["rules"]]
    sources = curation["sources"]
    return {
        "source": sources[source] if source < len(sources) else None,
        "unit": unit,
        "row": row,
        "removed": removed,
        "members": [
            {"unit": unit, "row": row, "value": value, "rule": names[rule - 1]} for unit, row, value, rule in members
        ],
    }


def _example(example: Sequence[Any], texts: Mapping[Key, Excerpt]) -> dict[str, Any]:
    _, _, _, unit, row, value = example
    found = texts.get((unit, row))
    about: dict[str, Any] = {"unit": unit, "row": row, "value": value}
    if found is not None:
        about |= {"place": found.place, "id": found.id, "text": found.text[:CHARACTERS]}
    return {name: as_utf8(each) if isinstance(each, str) else each for name, each in about.items()}


def as_utf8(text: str) -> str:
    """Text as UTF-8 can have it: names of files may have other bytes."""
    return text.encode("utf-8", "replace").decode()
