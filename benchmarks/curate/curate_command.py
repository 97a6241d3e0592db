"""`pipeline curate` with times by pass.

    python benchmarks/curate/curate_command.py NOTES curate RUN.yaml ...

NOTES gets a JSON line for each pass, with the wall time and the CPU time of this process and of its workers, one for
the whole command, and one whenever a file of texts is opened.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As the command does before NumPy is imported: with threads, workers would be spawned instead of forked.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pipeline.cli.main import main as pipeline
from pipeline.data.curate import stage

NOTES = Path(sys.argv.pop(1))


def cpu() -> float:
    """CPU seconds of this process and of the workers that have ended."""
    return sum(os.times()[:4])


def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that notes how long it took; a step of the stage says which pass it was."""

    def run(*arguments: Any, **settings: Any) -> Any:
        wall, used = time.perf_counter(), cpu()
        found = function(*arguments, **settings)
        step = found.name if name == "step" and found is not None else name
        note(step, time.perf_counter() - wall, cpu() - used)
        return found

    return run


def note(name: str, wall: float, used: float) -> None:
    """Add a line."""
    with NOTES.open("a") as file:
        file.write(json.dumps({"pass": name, "wall_s": round(wall, 2), "cpu_s": round(used, 2)}) + "\n")


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Add a line for a file of texts, by an audit hook, which forked workers have, too."""
    if event == "open" and str(arguments[0]).endswith(".jsonl.zst"):
        with NOTES.open("a") as file:
            file.write(json.dumps({"opened": str(arguments[0])}) + "\n")


if __name__ == "__main__":
    NOTES.unlink(missing_ok=True)
    stage.CurationStage._step = noted("step", stage.CurationStage._step)  # type: ignore[method-assign]
    stage.finish_source = noted("finish", stage.finish_source)
    stage.prepare_index = noted("index", stage.prepare_index)
    sys.addaudithook(note_opened)
    begin = time.perf_counter()
    try:
        code = pipeline()
    finally:
        note("command", time.perf_counter() - begin, cpu())
    sys.exit(code)
