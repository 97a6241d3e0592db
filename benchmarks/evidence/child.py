"""`pipeline` in a process that an item starts: the same command line, and a list of what it imported.

python benchmarks/evidence/child.py train run.yaml
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ERROR_CHARACTERS = 500
_PR_SET_PDEATHSIG = 1


def command(*words: object) -> list[str]:
    """The words that start `pipeline` with these."""
    return [sys.executable, __file__, *map(str, words)]


def pipeline(*words: object, codes: Sequence[int] = (0,)) -> str:
    """Run a command to its end; returns what it printed.

    Raises:
        RuntimeError: Its exit code is none of `codes`.
    """
    done = subprocess.run(command(*words), check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode not in codes:
        last = " ".join(done.stdout.split())[-_ERROR_CHARACTERS:]
        raise RuntimeError(f"pipeline {words[0]} ended with exit code {done.returncode}: {last}")
    return done.stdout


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it is killed; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    from evidence.imported import record_at_exit

    record_at_exit()
    from pipeline.cli.main import main

    main()
