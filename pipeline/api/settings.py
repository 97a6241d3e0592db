"""Settings as Python has them: overrides of a run file by key."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.config.parsing.document import render

Settings = Mapping[str, Any]
"""Values by key of the run file, such as `{"train.micro_batch_size": 4}`, as `KEY=VALUE` on the command line."""


def overrides(settings: Settings | None) -> list[str]:
    """Settings as the command line has them.

    Raises:
        UserError: They are not a mapping, or a value is not one that a run file can have.
    """
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        raise UserError(f'settings={settings!r}: give values by key, such as {{"train.micro_batch_size": 4}}')
    return [f"{key}={_yaml(key, value)}" for key, value in settings.items()]


def invalid(section: str, error: ValidationError) -> UserError:
    """The error about values that a section of the run file cannot have."""
    return UserError(
        "; ".join(f"{section}.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    )


def _yaml(key: str, value: Any) -> str:
    try:
        # By way of JSON, of which only plain values come back.
        return render(json.loads(json.dumps(value, default=_plain)))
    except (TypeError, ValueError):
        raise UserError(
            f"settings: {key}: {value!r} is not a value of a run file; give a text, number, path, list or mapping"
        ) from None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else os.fspath(value)
