"""Imports of heavy packages."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Generator[None, None, None]:
    """Modules that are imported inside are not searched for garbage, then or later: nothing of them ever is.

    Importing torch and what training needs of it makes more than 400,000 objects. Python would look through them again
    and again, for a quarter of the time that the import takes.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # otherwise what is alive belongs to others
            gc.freeze()
        if was_enabled:
            gc.enable()
