"""What the lines of `train_gpu.py` say together: equal losses, goals, a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

GOAL, AIM = 0.6, 0.75
"""Share of what a large matrix product reaches on the same device."""
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-3}
"""Of the losses of the first steps, relative to those of the first line with the same data; else `_FP8_TOLERANCE`."""
_FP8_TOLERANCE = 2e-2
FIRST = 5
"""Steps whose losses are compared."""

Line = dict[str, Any]


def compare_losses(line: Line, before: Iterable[Line]) -> Line:
    """Add the largest relative difference from the losses of the first line with the same data, and what it allows.

    Windows of another length, or with other attention, have other losses.
    """
    same = ("sequence", "documents", "layers", "parameters", "processes", "step_tokens")
    first = next((row for row in before if "losses" in row and all(row[key] == line.get(key) for key in same)), None)
    if first is None or "losses" not in line:
        return line
    pairs = list(zip(line["losses"][:FIRST], first["losses"][:FIRST], strict=True))
    difference = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
    allowed = max(TOLERANCE.get(row["precision"], _FP8_TOLERANCE) for row in (line, first))
    return {
        **line,
        "compared_with": first["variant"],
        "loss_difference": round(difference, 6),
        "losses_equal": difference <= allowed,
    }


def summary(lines: Sequence[Line]) -> Line:
    """The figures that goals are set for, of the base, which is the first line, and the fastest of this package."""
    ours = [line for line in lines if line["peer"] is None and "tokens_per_second" in line]
    base = next((line for line in ours if line["variant"] == lines[0]["variant"]), None)
    fastest = max(ours, key=lambda line: line["product_share"], default=None)
    found: Line = {"summary": "base and fastest", "goal_product_share": GOAL, "aim_product_share": AIM}
    for name, line in (("base", base), ("fastest", fastest)):
        if line is not None:
            found[name] = {key: line[key] for key in ("variant", "tokens_per_second", *_SHARES)}
    found["to_peer"] = {
        line["variant"]: round(base["tokens_per_second"] / line["tokens_per_second"], 3)
        for line in lines
        if base is not None and line["peer"] and line.get("tokens_per_second") and line["sequence"] == base["sequence"]
    }
    found["losses_equal"] = {line["variant"]: line["losses_equal"] for line in lines if "losses_equal" in line}
    found["failed"] = {line["variant"]: line["error"] for line in lines if "error" in line}
    return found


_SHARES = ("mfu", "mfu_causal", "product_share", "product_share_causal")
_COLUMNS = (
    *("sequence", "precision", "compile", "attention", "documents", "recompute"),
    *("tokens/s a GPU", "MFU", "causal", "of a product", "causal", "peak GB", "losses"),
)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows))


def table(lines: Sequence[Line]) -> str:
    """Markdown: a row a variant, medians of its rounds; below it what all have in common, and what failed."""
    by_name: dict[str, list[Line]] = {}
    for line in lines:
        by_name.setdefault(line["variant"], []).append(line)
    rows = []
    failed = []
    for name, rounds in by_name.items():
        measured = [line for line in rounds if "error" not in line]
        if measured:
            rows.append(_row(measured))
        else:
            failed.append(f"- {name}: {rounds[0]['error']}")
    text = [markdown(_COLUMNS, rows)]
    done = next((line for line in lines if "error" not in line), None)
    if done is not None:
        product = statistics.median(rate for line in lines if "error" not in line for rate in line["product_tflops"])
        text += [
            "",
            f"{done['device']}, {done['processes']} of them; {done['layers']} layers, {done['parameters'] / 1e9:.2f}B "
            f"parameters; {done['micro_batch_tokens']} tokens a micro-batch, {done['step_tokens']} a step; torch "
            f"{done['versions']['torch']}; {done['date'][:10]}. A large matrix product: {product:.4g} TFLOP/s.",
        ]
    return "\n".join([*text, *(["", "Not measured:", "", *failed] if failed else [])])


def _row(rounds: Sequence[Line]) -> tuple[str, ...]:
    first = rounds[0]

    def median(key: str, form: str) -> str:
        values = [line[key] for line in rounds if line[key] is not None]
        return form.format(statistics.median(values)) if values else "–"

    if "losses_equal" in first:
        losses = f"{'equal' if first['losses_equal'] else 'DIFFER'} ({first['loss_difference']:.1e})"
    else:
        losses = "first of their data"
    what = [str(first["sequence"]), first["precision"], "yes" if first["compile"] else "no"]
    peer = first["peer"]
    what += (
        ["transformers, " + peer, "one", "–"]
        if peer
        else [first[key] for key in ("attention", "documents", "recompute")]
    )
    shares = [median(key, "{:.1%}") for key in _SHARES]
    return (*what, median("tokens_per_second", "{:,.0f}"), *shares, median("peak_gb", "{:.1f}"), losses)
