"""Imports of heavy packages, and modules that run in a process of their own."""

from __future__ import annotations

import gc
import os
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


def module_command(name: str) -> list[str]:
    """Command that runs a module in another process, found as this process finds it.

    `python -m` alone looks into the working directory first, where a file of the user may have the name of a package.
    """
    try:
        looks_there = any(os.path.realpath(path) == os.getcwd() for path in sys.path)
    except OSError:  # the working directory is gone
        looks_there = False
    return [sys.executable, *(() if looks_there else ("-P",)), "-m", name]
