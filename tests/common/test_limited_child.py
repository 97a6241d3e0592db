"""Ends of a child process with limits: each is told apart, and none is the parent's."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

import pytest

from pipeline.common.limited_child import ChildLimits, run_limited

LIMITS = ChildLimits(cpu_s=30, wall_s=100, memory=2**28)


def echo(value: Any) -> Any:
    os.write(1, b"noise of a library\n")
    return {"value": value, "core": resource.getrlimit(resource.RLIMIT_CORE)}


def crash(value: Any) -> None:
    ctypes.string_at(0)


def abort(value: Any) -> None:
    os.write(2, b"first\nlast \x1b[31mwords\n")
    os.abort()


def leave(value: Any) -> None:
    sys.exit(value)


def fill(value: Any) -> int:
    return len(b"x" * value)


def allocate(value: Any) -> None:
    """As the allocator of Rust ends a process."""
    os.write(2, b"memory allocation of 4294967296 bytes failed\n")
    os.abort()


def spin(value: Any) -> None:
    while True:
        pass


def wait(value: Any) -> None:
    sys.stdin.close()
    os.read(os.pipe()[0], 1)


def test_a_value_comes_back() -> None:
    end = run_limited(__name__, "echo", {"a": [1, "é"]}, LIMITS)
    assert (end.how, end.value, end.detail) == ("result", {"value": {"a": [1, "é"]}, "core": [0, 0]}, "")


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("function", "value", "how", "detail"),
    [
        (crash, None, "signal", "was ended by SIGSEGV"),
        (abort, None, "signal", "was ended by SIGABRT (last ?[31mwords)"),
        (leave, 3, "code", "exited with code 3"),
        (leave, 0, "code", "exited with code 0"),
        (fill, 2**30, "out of memory", "took more than 256 MiB of memory"),
        (allocate, None, "out of memory", "took more than 256 MiB of memory"),
    ],
)
def test_ends(function: Any, value: Any, how: str, detail: str) -> None:
    end = run_limited(__name__, function.__name__, value, LIMITS)
    assert (end.how, end.value, end.detail) == (how, None, detail)


def test_time() -> None:
    end = run_limited(__name__, "spin", None, ChildLimits(cpu_s=1, wall_s=100))
    assert (end.how, end.detail) == ("out of time", "took longer than 1 s of processor time")
    end = run_limited(__name__, "wait", None, ChildLimits(cpu_s=100, wall_s=2))
    assert (end.how, end.detail) == ("out of time", "took longer than 2 s")


def test_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert run_limited(__name__, "echo", None, LIMITS).how == "not started"
