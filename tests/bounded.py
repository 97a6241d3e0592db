"""Code in a process of its own, and what it needed: a bomb must neither take the machine along nor go unseen."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import orjson

_CPU_SECONDS = 60
"""Ends a process that would not end. Far above what is allowed, because machines differ."""
_ADDRESS_BYTES = 8 * 2**30

_FRAME = """
import resource, sys
import orjson
resource.setrlimit(resource.RLIMIT_CPU, ({cpu}, {cpu}))
resource.setrlimit(resource.RLIMIT_AS, ({address}, {address}))

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) // 1024

{imports}
from pipeline.common.errors import UserError
before, message = peak(), ""
try:
{body}
except UserError as error:
    message = str(error)
print(orjson.dumps([message, peak() - before]).decode())
"""


def refused(body: str, imports: str = "", *arguments: object, megabytes: int = 200) -> str:
    """The message of the `UserError` that code ends with; it may need so much memory on top of what it imports.

    Args:
        body: the code; `sys.argv[1:]` are the arguments.
        imports: what it imports.
        arguments: as text.
        megabytes: more fails the test.
    """
    message, grown = _run(body, imports, arguments)
    assert message, "it was not refused"
    assert grown < megabytes, f"{grown} MiB: {message}"
    return message


def allowed(body: str, imports: str = "", *arguments: object, megabytes: int = 200) -> None:
    """As `refused`, for what must go through."""
    message, grown = _run(body, imports, arguments)
    assert not message
    assert grown < megabytes, f"{grown} MiB"


def _run(body: str, imports: str, arguments: tuple[object, ...]) -> tuple[str, int]:
    code = _FRAME.format(
        cpu=_CPU_SECONDS,
        address=_ADDRESS_BYTES,
        imports=textwrap.dedent(imports),
        body=textwrap.indent(textwrap.dedent(body).strip(), "    "),
    )
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    message, grown = orjson.loads(done.stdout.splitlines()[-1])
    return message, grown
