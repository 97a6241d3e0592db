"""Versions of packages and of this code that a run was computed with."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import pipeline
from pipeline import __version__
from pipeline.common.hashing import value_hash
from pipeline.common.imports import source_files

_PATIENCE_S = 10.0
"""For git, on a file system that may be slow."""


def versions() -> dict[str, Any]:
    """By package. With CUDA or ROCm (`hip`) where torch was built for it, and the revision of a checkout."""
    found: dict[str, Any] = {
        "pipeline": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version is not None:
            found[name] = version
    revision, changed = _git()
    if revision is not None:
        found["git"] = {"revision": revision, "changed": changed}
    return found


@cache
def code_hash() -> str:
    """Hash of the source files of this package as they are now, whether they are of a commit or not."""
    return value_hash({name: xxhash.xxh3_64_intdigest(data) for name, data in source_files("pipeline")})


@cache
def _git() -> tuple[str | None, bool]:
    """The commit that this code is of, and whether tracked files of it were changed. Asked once in a process."""
    code = Path(pipeline.__file__).resolve().parent
    top = _ask("rev-parse", "--show-toplevel", folder=code)
    # An installed package may lie below the checkout of something else.
    if top is None or Path(top).resolve() != code.parent:
        return None, False
    revision = _ask("rev-parse", "HEAD", folder=code)
    changed = _ask("status", "--porcelain", "--untracked-files=no", "--", "pipeline", "slurm", folder=code.parent)
    return revision, bool(changed)


def _ask(*words: str, folder: Path) -> str | None:
    try:
        # Without a lock: git may be at work in this checkout meanwhile.
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
