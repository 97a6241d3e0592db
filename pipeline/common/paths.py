"""Type of paths that public functions take, and the folder of results that take some seconds to compute again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from pipeline.common import storage

StrPath = str | os.PathLike[str]
"""A path, or its text."""


def cache_folder() -> Path:
    """`pretraining-pipeline` in `$XDG_CACHE_HOME`, by default in `~/.cache`. It may be removed at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretraining-pipeline"


def check_once(kind: str, about: str, check: Callable[[], None], **facts: str) -> None:
    """Run a check that raises if something is wrong, once: that it passed is kept in the cache folder.

    Args:
        kind: folder of such checks.
        about: name of all that the result depends on, for a file.
        check: run unless it passed before. Failures are not kept: the machine may be to blame.
        facts: for people who look into the folder.
    """
    file = cache_folder() / kind / f"{about}.json"
    if about not in _PASSED and not file.is_file():
        check()
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            storage.put_json(file, facts)
    _PASSED.add(about)


_PASSED: set[str] = set()
"""Checks that passed in this process, or the one that it was forked from."""
