"""Plain values of run files, before they are a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config.parsing.schema import KeyPath


def merged(below: Any, above: Any) -> Any:
    """Sections key by key; any other value of `above` replaces the one of `below`."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is not a mapping: lists, then their entries, scalars."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from leaves(below, (*path, key))
        return
    yield path, value
    if isinstance(value, list):
        for index, below in enumerate(value):
            yield from leaves(below, (*path, index))


def stand_in(plain: Any) -> None:
    """Fill in sections that stages of data do not read, where a run file leaves them out.

    Packs have the length of the training's windows, so `train` is needed with `packing: best_fit`.
    """
    if not isinstance(plain, dict):
        return
    plain.setdefault("model", {"layers": 1, "dim": 2, "heads": 1})
    keys = [key for section in ("data", "blend") for key, value in leaves(plain.get(section)) if value == "best_fit"]
    if not any(key[-1] == "packing" for key in keys):
        plain.setdefault("train", {"duration": "1_000_000_000 steps"})
