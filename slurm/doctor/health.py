"""A site's own health check, the profile's `health_command`: before a launch and, at a cadence, while it runs.

The command runs outside of any container, once on each node. Its exit code decides: 0 is healthy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence

import orjson

from pipeline.common.process_identity import node_name
from slurm.doctor.report import NodeCheck, failed

SECONDS = 60.0
"""A command that takes longer has failed."""
_SHOWN = 200
"""Characters of its last line that are shown."""


def health_words(command: str) -> list[str]:
    """Words after the interpreter, for one process on each node, which prints the result as a line."""
    return ["-m", "slurm.doctor.health", command]


def health_check(command: str) -> NodeCheck:
    """Run the command on this machine."""
    name, shell = "health_command", ["bash", "-c", command]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        shell, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return failed(name, "hangs", f"health_command: it did not end within {SECONDS:g} s")
    lines = output.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:_SHOWN]
    if process.returncode == 0:
        return NodeCheck(name, True, last or "ok")
    text = f"health_command: it ended with code {process.returncode}" + (f": {last}" if last else "")
    return failed(name, f"code {process.returncode}", text)


def unhealthy(output: Iterable[str]) -> dict[str, str]:
    """Nodes that are not healthy, with the reason, from the lines that their processes have printed."""
    found = {}
    for line in output:
        try:
            values = orjson.loads(line[line.index("{") :])  # srun puts the number of the task before it
            if values["problem"]:
                found[str(values["node"])] = str(values["problem"])
        except (ValueError, KeyError, TypeError):  # what srun itself says
            continue
    return found


def main(words: Sequence[str]) -> None:
    """Print the result of this node."""
    (command,) = words
    print(orjson.dumps({"node": node_name(), "problem": health_check(command).message}).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
