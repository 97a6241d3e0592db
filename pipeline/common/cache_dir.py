"""Folder of results that take some seconds to compute again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`pretraining-pipeline` in `$XDG_CACHE_HOME`, by default in `~/.cache`. It may be removed at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretraining-pipeline"
