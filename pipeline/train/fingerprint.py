"""What a resumed run depends on, and how a difference is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline import __version__
from pipeline.config import Config
from pipeline.errors import UserError

Fingerprints = dict[str, Any]
"""Aspect -> JSON value. Aspects but `order` are the names that resume.allow takes."""


def fingerprints(config: Config, datasets: dict[str, str], tokenizer: str, order: str) -> Fingerprints:
    """The aspects of a run that decide what its steps compute.

    Args:
        config: resolved config.
        datasets: source name -> fingerprint of its training split.
        tokenizer: fingerprint of the tokenizer.
        order: fingerprint of the journal.
    """
    return {
        "data": datasets,
        "tokenizer": tokenizer,
        "model": model_fingerprint(config),
        "order": order,
        "code": __version__,
    }


def model_fingerprint(config: Config) -> dict[str, Any]:
    """What decides the function that the weights compute: every key of `model:`."""
    return config.model.model_dump(mode="json")


def compare(saved: Fingerprints, now: Fingerprints, allow: Iterable[str]) -> list[str]:
    """Differences that were allowed, as lines to show.

    Raises:
        UserError: an aspect differs that `resume.allow` does not name; the message shows each difference.
    """
    allowed = set(allow)
    shown: list[str] = []
    refused: list[str] = []
    for aspect in sorted(now):
        if saved.get(aspect) != now[aspect]:
            lines = [
                f"{name}: {old!r} -> {new!r}" for name, old, new in _differences(aspect, saved.get(aspect), now[aspect])
            ]
            (shown if aspect in allowed else refused).extend(lines)
            if aspect not in allowed:
                refused.append(f"  ({_remedy(aspect)})")
    if refused:
        raise UserError(
            "this run differs from its checkpoint (checkpoint -> now):\n  "
            + "\n  ".join(refused)
            + "\nset the values back, or use another run.dir"
        )
    return shown


def _remedy(aspect: str) -> str:
    if aspect == "order":
        return "seed, sequence length, batch size, sources or weights changed: the order of the data would be another"
    fits = ", if the weights still fit" if aspect == "model" else ""
    return f"resume.allow=[{aspect}] accepts this{fits}"


def _differences(name: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        rows: list[tuple[str, Any, Any]] = []
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                rows += _differences(f"{name}.{key}", old.get(key), new.get(key))
        return rows
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [row for i, pair in enumerate(zip(old, new, strict=True)) for row in _differences(f"{name}.{i}", *pair)]
    return [] if old == new else [(name, old, new)]
