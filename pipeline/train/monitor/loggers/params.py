"""The resolved run file for trackers: without secrets, and flat where they take no nested values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pipeline.common.redaction import is_secret_key, masked


def without_secrets(value: Any, key: str = "") -> Any:
    """A JSON value without what may be secret in it.

    Args:
        value: nested.
        key: its name; the value of a key that is named like a secret becomes `***`.
    """
    if is_secret_key(key) and value is not None:
        return "***"
    if isinstance(value, Mapping):
        return {str(name): without_secrets(below, str(name)) for name, below in value.items()}
    if isinstance(value, list):
        return [without_secrets(below) for below in value]
    return masked(value) if isinstance(value, str) else value


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values of a nested config as texts by dotted keys, entries of lists by their number: `data.sources.0.name`.

    A text is itself, everything else is JSON. Lists of plain values are one value; keys without a value are left out.
    """
    params: dict[str, str] = {}
    for name, value in config.items():
        key = prefix + name
        if isinstance(value, Mapping):
            params |= flat_params(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(each, (Mapping, list)) for each in value):
            params |= flat_params({str(number): each for number, each in enumerate(value)}, f"{key}.")
        elif value is not None:
            params[key] = value if isinstance(value, str) else orjson.dumps(value).decode()
    return params


def cut(text: str, most: int) -> str:
    """A text of at most so many characters; a longer one ends with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"
