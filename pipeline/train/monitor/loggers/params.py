"""The resolved run file, as trackers take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pipeline.train.monitor.loggers.base import RunInfo


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


def nested_params(run: RunInfo) -> dict[str, Any]:
    """The resolved run file, nested as it is; of a fork also its `parent`."""
    if run.parent is None:
        return run.config
    return {**run.config, "parent": {"run_dir": str(run.parent.folder), "step": run.parent.step, "id": run.parent.id}}
