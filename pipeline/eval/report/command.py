"""`pipeline report`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.common import storage
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.page.words import clean
from pipeline.eval.report.charts import curves, scales
from pipeline.eval.report.drawing import png
from pipeline.eval.report.facts import headline
from pipeline.eval.report.gather import RunFacts, gather_all
from pipeline.eval.report.outcomes import others
from pipeline.eval.report.page import page

REPORT_FILE = "report.html"


def report(runs: Sequence[Path], console: Console, *, out: Path | None = None, picture: bool = False) -> Path:
    """Write the report on one run, or on several that are compared.

    Reads the files of the run folders alone, takes no lock, and may be made while a run goes on.

    Args:
        runs: run files or run folders.
        console: where it is said what was written.
        out: the HTML file; by default `report.html` in the folder of the run, of several in the current folder.
        picture: also write the charts as a PNG beside it.

    Returns:
        The HTML file.

    Raises:
        UserError: a run is none, nothing of it is there, or the file cannot be written.
    """
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out is {out}; name a file that ends with .html")
    if out is not None and out.is_dir():
        raise UserError(f"--out is {out}, a folder; name a file in it, like {out / REPORT_FILE}")
    if out is not None and not out.parent.exists() and not any(path.is_file() for path in out.parents):
        todo = f"`mkdir -p {shlex.quote(str(out.parent))}`"
        raise UserError(f"--out is {out}, but the folder {out.parent} is missing; make it ({todo}), or name another")
    found = gather_all(runs)
    file = out or (found[0].folder / REPORT_FILE if len(found) == 1 else Path(REPORT_FILE))
    contents = {file: page(found)}
    if picture:
        contents[file.with_suffix(".png")] = sheet(found)
    with storage.writing(f"--out {file}"):
        for path, content in contents.items():
            storage.put(path, content)
            say(console, f"report: {path}")
    for facts in found:
        why = f": {facts.state.why}" if facts.state.why else ""
        # What others wrote, as an error or a name: cleaned as in the page, so that it commands no terminal.
        say(console, clean(f"{facts.name}: {facts.state.word}{why}"))
        for line in facts.problems:
            say(console, clean(f"  missing or damaged: {line}"))
    return file


def sheet(runs: Sequence[RunFacts]) -> bytes:
    """All charts, those of steps over tokens, as one PNG."""
    by_tokens, _ = scales(runs)
    lines = []
    for facts in runs:
        by_label = {fact.label: fact for fact in headline(facts)}
        shown = ("step", "tokens trained on", "training loss", "validation loss", "throughput", "goodput")
        parts = [f"{label} {by_label[label].value}" for label in shown]
        lines.append(f"{facts.name}: {facts.state.word}. " + " · ".join(parts))
    return png([*curves(runs, by_tokens), *others(runs)], ", ".join(facts.name for facts in runs), lines)
