"""A logger: some numbers of each row of the metrics as lines of text, in a file of the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field

from pipeline.config.base import Section
from pipeline.train.monitor.loggers.base import Logger, RunInfo, flat


class LinesLogger(Logger):
    """`step name=value name=value` per row that has one of the numbers."""

    class Options(Section):
        """Options of `type: example.lines`."""

        names: list[str] = Field(default=["loss"], min_length=1)
        """Numbers to write; nested ones with a slash."""
        file: str = Field(default="lines.txt", pattern=r"^[\w.-]+$")
        """Name of the file."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._path = path
        self._names = names

    @classmethod
    def open(cls, options: Options, run: RunInfo) -> Self:
        """Continue the file of the run, or begin one."""
        made = cls(run.folder / options.file, options.names)
        made.rewind(run.first_step)
        return made

    def write(self, row: dict[str, Any]) -> None:
        """Append a line. Its errors are those of the disk, so the row comes again later."""
        values = [f"{name}={flat(row)[name]}" for name in self._names if name in flat(row)]
        if values:
            with self._path.open("a") as file:
                file.write(" ".join([str(row["step"]), *values]) + "\n")

    def rewind(self, step: int) -> None:
        """Take out the lines of later steps, which the run logs again."""
        if self._path.exists():
            lines = self._path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and int(line.split()[0]) <= step]
            self._path.write_text("".join(kept))
