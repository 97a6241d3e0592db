"""Spans of host work: named stretches of time, one inside another, as a file that Perfetto opens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import orjson
from torch.profiler import record_function

from pipeline.common import links

_NOTHING = nullcontext()


class Spans:
    """Takes spans of the thread that trains, to a file or to a trace of torch's profiler.

    The file is a JSON array in Chrome's trace event format, with an event a line. Readers of that format do without
    the bracket at the end, which is missing where the process was killed. Times are those of the machine's clock, so
    that the files of several ranks can be laid side by side as far as their clocks agree.

    Args:
        path: Of the file, which is begun anew; None where there is none.
        rank: Of this process.
        traced: Whether a profiler runs, which gets the names; then they are in its trace beside the kernels.
    """

    def __init__(self, path: Path | None, rank: int, *, traced: bool) -> None:
        self._rank = rank
        self._traced = traced
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._events: list[dict[str, Any]] = []
        self._file = None if path is None else links.create(path)
        if self._file is not None:
            name = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}, host"}}
            self._file.write(b"[\n" + orjson.dumps(name))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A span with this name."""
        with record_function(name) if self._traced else _NOTHING:
            begin = time.perf_counter_ns()
            try:
                yield
            finally:
                if self._file is not None:
                    end = time.perf_counter_ns()
                    # In microseconds, as the format has it.
                    where = {"pid": self._rank, "tid": 0, "ts": (begin + self._offset) / 1e3}
                    self._events.append({"name": name, "ph": "X", **where, "dur": (end - begin) / 1e3})

    def write(self) -> None:
        """Append what has been taken since the last call; an `OSError` where that cannot be."""
        if self._file is not None:
            # A span is known when it ends; in the file it comes before those inside it.
            events, self._events = sorted(self._events, key=lambda event: (event["ts"], -event["dur"])), []
            self._file.write(b"".join(b",\n" + orjson.dumps(event) for event in events))
            self._file.flush()

    def close(self) -> None:
        """Write what is left, and the end of the file."""
        if self._file is not None:
            with self._file as file:
                self.write()
                file.write(b"\n]\n")


_recorders: list[Spans] = []
"""The one that spans of this process go to, or none."""


def span(name: str) -> AbstractContextManager[None]:
    """A span with this name, where a profile is made. Elsewhere this costs a look at a list."""
    return _recorders[-1].span(name) if _recorders else _NOTHING


@contextmanager
def recorded_by(spans: Spans) -> Iterator[None]:
    """Spans of this process go there, up to the end."""
    _recorders.append(spans)
    try:
        yield
    finally:
        _recorders.pop()
