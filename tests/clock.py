"""A clock that a test moves: for the code of this project alone, in the process of the test."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class _Clock(SimpleNamespace):
    """What stands for `time`."""


def set_time(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Replace functions of `time` in each module of this project that has imported it.

    `time` itself stays: the loop of a server in another thread, whose timers were set by a clock that then goes back,
    would wait for as long.
    """
    clock = _Clock(**{**vars(time), **functions})
    for name, module in list(sys.modules.items()):
        is_ours = name.partition(".")[0] in ("pipeline", "slurm")
        if is_ours and isinstance(getattr(module, "time", None), (ModuleType, _Clock)):
            monkeypatch.setattr(module, "time", clock)
