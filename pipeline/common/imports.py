"""Imports: of heavy packages and of numba, which may be missing; files of our own packages, which may be in an archive.

A job imports the packages from one archive, a zip, whose modules have a `__file__` that no other program can open.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from zipimport import zipimporter

import xxhash

import pipeline
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


def archive() -> Path | None:
    """The archive that the packages are imported from; None where they are files in a folder."""
    spec = find_spec("pipeline")
    loader = spec.loader if spec else None
    return Path(loader.archive) if isinstance(loader, zipimporter) else None


@cache
def packaged_folder(name: str) -> Path:
    """A folder that comes with the packages; out of an archive, a copy that ends with the process.

    Args:
        name: relative to the folder that has the packages, like `slurm/profiles`.
    """
    source = archive()
    if source is None:
        return Path(str(pipeline.__file__)).parents[1] / name
    copy = tempfile.TemporaryDirectory(prefix="pipeline-")
    _COPIES.append(copy)
    with zipfile.ZipFile(source) as found:
        found.extractall(copy.name, [each for each in found.namelist() if each.startswith(f"{name}/")])
    return Path(copy.name) / name


_COPIES: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


def source_files(package: str) -> Iterator[tuple[str, bytes]]:
    """Names, relative to a package, and contents of its Python files."""
    if (source := archive()) is not None:
        with zipfile.ZipFile(source) as found:
            for name in found.namelist():
                if name.startswith(f"{package}/") and name.endswith(".py"):
                    yield name.removeprefix(f"{package}/"), found.read(name)
        return
    folder = Path(str(sys.modules[package].__file__)).resolve().parent
    for file in folder.rglob("*.py"):
        yield str(file.relative_to(folder)), file.read_bytes()


def source_hash(module: ModuleType) -> int:
    """xxh3-64 of the source of a module of ours."""
    spec = module.__spec__
    assert spec is not None
    name = spec.name.rpartition(".")[2] + ".py"
    return xxhash.xxh3_64_intdigest(files(spec.parent or spec.name).joinpath(name).read_bytes())


def has_numba() -> bool:
    """Tell whether numba is installed. Without it, plain Python and NumPy do the same work."""
    return find_spec("numba") is not None


def njit(function: Callable[..., Any]) -> Any:
    """A function compiled at its first call, or out of a cache that lies on the local disk.

    Use it as a decorator, in modules that are imported only where `has_numba()`. Arithmetic keeps the order of the
    source (no fastmath), so all machines agree.
    """
    if (source := archive()) is not None:  # numba opens the file by its path
        code = function.__code__
        function.__code__ = code.replace(co_filename=str(source.parent / code.co_filename))
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
