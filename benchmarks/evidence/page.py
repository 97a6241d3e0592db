"""`docs/gpu-results.md` from the lines of `gpu_evidence.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evidence.imported import ROOT

PAGE = ROOT / "docs" / "gpu-results.md"


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The page."""
    raise NotImplementedError
