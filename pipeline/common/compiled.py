"""Functions that numba compiles, where it is installed. Without it, plain Python and NumPy do the same work."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from pipeline.common.paths import cache_folder


def has_numba() -> bool:
    """Tell whether numba is installed."""
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
