"""A child process with limits of processor time and memory, for code that may crash, hang or take all memory.

The child imports a module of ours and calls a function of it with a value as JSON; what the function returns comes
back as JSON. Whatever a library does there, the caller learns how it ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import orjson

from pipeline.common.imports import module_command

End = Literal["result", "out of time", "out of memory", "signal", "code", "not started"]
"""Ways in which a child ends; `code` is an exit code without a result."""
_MEMORY_CODE = 86
_OUT_OF_MEMORY = re.compile(rb"memory allocation of \d+ bytes failed|std::bad_alloc|MemoryError|[Oo]ut of memory")
"""Last words of Rust, C++ and Python programs whose allocator gave nothing."""


@dataclass(frozen=True)
class ChildLimits:
    """Limits of a child process. Only time tells them apart from a faster machine's, so they are generous.

    Attributes:
        cpu_s: seconds of processor time, of all threads together.
        wall_s: seconds until the child is killed.
        memory: bytes of address space beyond those that the imported module takes; None for no limit.
    """

    cpu_s: int
    wall_s: float
    memory: int | None = None


@dataclass(frozen=True)
class ChildEnd:
    """End of a child.

    Attributes:
        how: kind of the end.
        value: what the function returned; None for all ends but `result`.
        detail: rest of a sentence that begins with the work: "was ended by SIGSEGV"; empty for `result`.
    """

    how: End
    value: Any = None
    detail: str = ""


def run_limited(module: str, function: str, value: Any, limits: ChildLimits) -> ChildEnd:
    """Call `module.function(value)` in a child process with limits.

    Args:
        module: full name of a module of ours.
        function: public or private name of a function in it, of one argument.
        value: argument, as JSON.
        limits: of the child.

    Returns:
        The end of the child. What it printed is dropped, but for the last line of an end without a result.
    """
    job = {"module": module, "function": function, "value": value, "cpu_s": limits.cpu_s, "memory": limits.memory}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            module_command(__name__),
            input=orjson.dumps(job),
            capture_output=True,
            env=environment,
            timeout=limits.wall_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ChildEnd("out of time", detail=f"took longer than {limits.wall_s:g} s")
    except OSError as error:
        return ChildEnd("not started", detail=f"was not tried: no process could be started ({error})")
    if done.returncode == 0:
        with contextlib.suppress(ValueError, IndexError):
            return ChildEnd("result", orjson.loads(done.stdout.splitlines()[-1]))
    return _failure(done.returncode, done.stderr, limits)


def _failure(code: int, stderr: bytes, limits: ChildLimits) -> ChildEnd:
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and limits.wall_s > limits.cpu_s):
        # The hard limit kills, where a library ignores the soft one.
        return ChildEnd("out of time", detail=f"took longer than {limits.cpu_s} s of processor time")
    if code == _MEMORY_CODE or _OUT_OF_MEMORY.search(stderr[-(2**16) :]):
        return ChildEnd("out of memory", detail=f"took more than {(limits.memory or 0) / 2**20:,.0f} MiB of memory")
    last = _line(stderr)
    about = f" ({last})" if last else ""
    if code < 0:
        return ChildEnd("signal", detail=f"was ended by {signal.Signals(-code).name}{about}")
    return ChildEnd("code", detail=f"exited with code {code}{about}")


def _line(stderr: bytes) -> str:
    """The last line, without what a terminal would obey."""
    last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return "".join(c if c.isprintable() else "?" for c in last)[:200]


def _child() -> None:
    job: dict[str, Any] = orjson.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_CPU, job["cpu_s"], job["cpu_s"] + 1)
    # One thread: each further one reserves address space by the hundred megabytes, which the limit counts.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ.pop("RUST_BACKTRACE", None)  # the last line of a panic is its message
    function = getattr(import_module(job["module"]), job["function"])
    if job["memory"] is not None:
        _limit(resource.RLIMIT_AS, *[_address_space() + job["memory"]] * 2)
    try:
        result = orjson.dumps(function(job["value"]))
    except MemoryError:
        os._exit(_MEMORY_CODE)
    # After whatever a library printed.
    sys.stdout.buffer.write(b"\n" + result)


def _limit(what: int, soft: int, hard: int) -> None:
    """Set a limit; one that is lower already stays."""
    old_soft, old_hard = resource.getrlimit(what)
    unlimited = resource.RLIM_INFINITY
    hard = hard if old_hard == unlimited else min(hard, old_hard)
    soft = min(soft, hard) if old_soft == unlimited else min(soft, hard, old_soft)
    resource.setrlimit(what, (soft, hard))


def _address_space() -> int:
    """Bytes of address space of this process; much where the system has no such file, so that the limit is high."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**34


if __name__ == "__main__":
    _child()
