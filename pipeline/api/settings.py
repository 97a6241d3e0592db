"""Settings as Python has them: overrides of a run file by key."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]
"""Values by key of the run file, such as `{"train.micro_batch_size": 4}`, as `KEY=VALUE` on the command line."""


def overrides(settings: Settings | None) -> list[str]:
    """Settings as the command line has them: JSON is YAML."""
    return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in (settings or {}).items()]
