"""Type of paths that public functions take."""

from __future__ import annotations

import os

StrPath = str | os.PathLike[str]
"""A path, or its text."""
