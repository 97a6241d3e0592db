"""The process that renders a template, whose time and memory are bounded: `python -m pipeline.data.chat.child`.

Reads lines of JSON from standard input, writes a line for each, and ends with its input. A template that runs for too
long ends the process; one that fills memory gets an error.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 2**30
"""Address space."""
TOO_LARGE = "needs more memory than a template may take"


def _answer(environment: Any, request: dict[str, Any], longest: int) -> dict[str, Any]:
    from pipeline.data.chat.results import CannotRender

    try:
        text, spans = environment.render(request)
    except CannotRender as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": TOO_LARGE}
    # In UTF-8 a lone surrogate, which JSON may have, takes as much as any other character of its size.
    if len(text.encode("utf-8", "surrogatepass")) > longest:
        return {"error": f"its text has more than {longest:,} bytes"}
    return {"text": text, "spans": spans}


def main() -> None:
    """Compile the template of the first line, then render the conversations of the others."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    from pipeline.data.chat.environment import ChatEnvironment
    from pipeline.data.chat.results import BadTemplate

    def put(value: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
        sys.stdout.buffer.flush()

    def start_clock(seconds: int) -> None:
        # The clock of computing, so that a busy machine takes nothing away. Its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)

    first = json.loads(sys.stdin.buffer.readline())
    start_clock(first["seconds"])
    try:
        environment = ChatEnvironment(first["template"], first["date"])
    except BadTemplate as error:
        put({"bad": str(error)})
        return
    put({"has_markers": environment.used.has_markers, "variables": sorted(environment.used.variables)})
    while line := sys.stdin.buffer.readline():
        start_clock(first["seconds"])
        try:
            found = _answer(environment, json.loads(line), first["longest"])
        except (MemoryError, RecursionError):
            found = {"error": TOO_LARGE}
        start_clock(0)
        put(found)


if __name__ == "__main__":
    main()
