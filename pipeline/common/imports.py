"""Imports of heavy packages and of numba, which may be missing; and modules that run in a process of their own."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from pipeline.common.paths import cache_folder


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


def has_numba() -> bool:
    """Tell whether numba is installed. Without it, plain Python and NumPy do the same work."""
    return find_spec("numba") is not None


def njit(function: Callable[..., Any]) -> Any:
    """A function compiled at its first call, or out of a cache that lies on the local disk.

    Use it as a decorator, in modules that are imported only where `has_numba()`. Arithmetic keeps the order of the
    source (no fastmath), so all machines agree.
    """
    return load_numba().njit(cache=True, nogil=True, error_model="numpy")(function)


def load_numba() -> Any:
    """The package, set up as it has to be before it is imported."""
    # Caches on disks that machines share are written by several at a time.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
    import numba
    from numba.core import entrypoints

    # Other packages' extensions are not needed here. They import much, and start threads, with which a process cannot
    # fork its workers.
    entrypoints._already_initialized = True
    return numba
