"""Megatron-LM's own reader and builder, from the `megatron-core` package.

Its package imports CUDA kernels and the whole training stack; the one module that is wanted here needs none of them.
So its parent packages are stood in for by empty ones with the real search path, and `megatron.core.utils` by the one
function that is used, a logger.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest


def indexed_dataset() -> Any:
    """The module `megatron.core.datasets.indexed_dataset`; skips the test if megatron-core is not installed."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed (it is in the extra `dev`)")
    root = Path(next(iter(spec.submodule_search_locations)))
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    try:
        for name in ("megatron", "megatron.core", "megatron.core.datasets"):
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        utils = types.ModuleType("megatron.core.utils")
        utils.log_single_rank = lambda *_: None  # type: ignore[attr-defined]
        sys.modules["megatron.core.utils"] = utils
        return importlib.import_module("megatron.core.datasets.indexed_dataset")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        sys.modules.update(before)
