"""What a report says, read from its HTML by a parser that knows nothing of how it was made."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import orjson
from rich.console import Console

from pipeline.eval.report.command import report

Rows = list[list[str]]


class Report(HTMLParser):
    """Tables by the heading above them (the first of a name, which is over tokens), tiles, and all text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.tables: dict[str, Rows] = {}
        self.tiles: dict[str, str] = {}
        self.titles: list[str] = []
        self.states: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self._open: list[tuple[str, str]] = []
        self._heading = self._label = ""
        self._rows: Rows | None = None
        self.feed(file.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("meta", "link", "input"):
            return
        self._open.append((tag, dict(attrs).get("class") or ""))
        if tag == "h3":
            self._heading = ""
        elif tag == "table":
            self._rows = []
        elif tag == "tr":
            assert self._rows is not None
            self._rows.append([])
        elif tag in ("td", "th"):
            assert self._rows is not None
            self._rows[-1].append("")
        elif tag == "dt":
            self._label = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass
        if tag == "table":
            self.tables.setdefault(self._heading, self._rows or [])
            self._rows = None

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1][0] in ("style", "script"):
            return
        tag, kind = self._open[-1]
        self.text += data
        if tag in ("td", "th"):
            assert self._rows is not None
            self._rows[-1][-1] += data
        elif tag == "h3":
            self._heading += data
        elif tag in ("h1", "h2"):
            self.titles.append(data)
        elif tag == "dt":
            self._label += data
        elif tag == "dd":
            self.tiles[self._label] = data
        elif tag == "span" and kind.startswith("state"):
            self.states.append(data)


def read(*runs: Path, out: Path) -> Report:
    """Make a report and read it."""
    report(runs, Console(quiet=True), out=out)
    return Report(out)


def number(cell: str) -> float:
    """A figure of a table."""
    return float(cell.replace(",", "").removesuffix("%"))


def steps_that_count(run: Path) -> dict[int, dict[str, float]]:
    """Rows of steps, the last line of each: in the order of the file, of runs that no two processes wrote at once."""
    rows = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return {row["step"]: row for row in rows if "loss" in row}
