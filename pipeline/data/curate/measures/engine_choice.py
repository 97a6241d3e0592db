"""Engines of the counters, and the check of each against the reference on hard texts."""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import UserError, install_extra
from pipeline.common.imports import has_numba
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.measures import hard_texts, python_counters, reference
from pipeline.data.sources.records import printable

CounterEngineName = Literal["auto", "numba", "python"]
Counts = dict[str, npt.NDArray[np.uint32]]
"""Counters by name, each of shape (documents,)."""


class CounterEngine(Protocol):
    """A way to compute the counters.

    Attributes:
        name: of it.
    """

    name: str

    def count(self, batch: TextBatch) -> Counts:
        """Counters of documents."""


class CountersDiffer(UserError):
    """An engine does not count as the reference does: it is not to be used, nor what it measured before.

    Attributes:
        engine: its name.
        counter: the first counter that differs.
    """

    def __init__(self, engine: str, counter: str, found: int, expected: int, id: str, row: int) -> None:
        self.engine, self.counter = engine, counter
        instead = "python" if engine == "numba" else "numba"
        super().__init__(
            f"document {printable(id)} (record {row} of its chunk): engine {engine} counts {counter} as {found}, plain "
            f"Python as {expected}. Set data.curate.engine: {instead}, remove the folder curate/ of the source, whose "
            "measures cannot be trusted, and run the same command again"
        )

    def __reduce__(self) -> tuple[type[UserError], tuple[str]]:
        return UserError, (str(self),)


class _Numba:
    """Compiled loops."""

    name = "numba"

    def __init__(self) -> None:
        from pipeline.data.curate.measures import numba_counters

        self._module = numba_counters
        self._own = numba_counters.scratch()

    def count(self, batch: TextBatch) -> Counts:
        counts = self._module.count_batch(batch.data, batch.starts, self._own)
        named = dict(zip(self._module.NAMES, counts.T, strict=True))
        named["line_characters"] = named["characters"] - named["newlines"]
        return {name: np.minimum(values, reference.SATURATED).astype(np.uint32) for name, values in named.items()}


class _Python:
    """Built-in functions of Python."""

    name = "python"

    def count(self, batch: TextBatch) -> Counts:
        counts = [python_counters.count(text) for text in batch.texts]
        return {name: np.array([each[name] for each in counts], np.uint32) for name in counts[0]} if counts else {}


def choose(which: CounterEngineName) -> tuple[CounterEngine, str]:
    """Open an engine and check it.

    Returns:
        It, and the reason why `auto` did not take numba; empty if it did, or was not asked.

    Raises:
        UserError: numba is asked for and cannot be used, or Python's built-in functions differ from the reference.
    """
    note = ""
    if which != "python":
        compiled, note = _compiled()
        if compiled is not None:
            return compiled, ""
    if which == "numba":
        raise UserError(f"data.curate.engine: numba cannot be used: {note}. Set it to auto or python")
    engine = _Python()
    if failure := check(engine):
        raise UserError(f"the counters of documents are wrong on this machine: {failure}")
    return engine, note


@cache
def open_once(which: CounterEngineName) -> tuple[CounterEngine, str]:
    """`choose`, once in a process: the check takes a moment."""
    return choose(which)


def _compiled() -> tuple[CounterEngine | None, str]:
    """The engine of numba, or the reason why it is not to be used."""
    if not has_numba():
        return None, f"it is not installed ({install_extra('curate')})"
    try:
        engine = _Numba()
        failure = check(engine)
    except Exception as error:  # whatever a compiler that does not fit this machine raises
        return None, f"it fails: {printable(str(error))[:300]}"
    return (None, failure) if failure else (engine, "")


def check(engine: CounterEngine) -> str:
    """Compare an engine with the reference on hard texts: the first difference, or an empty text."""
    texts = hard_texts.texts()
    counts = engine.count(as_batch(texts))
    for place, text in enumerate(texts):
        for name, expected in reference.count(text).items():
            if (found := int(counts[name][place])) != expected:
                return f"engine {engine.name} counts {name} as {found}, plain Python as {expected}, in {text[:60]!r}"
    return ""


def as_batch(texts: list[str]) -> TextBatch:
    """A batch of texts whose ids are their numbers."""
    encoded = [text.encode() for text in texts]
    starts = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    rows = np.arange(len(texts), dtype=np.uint32)
    return TextBatch(data, starts, texts, rows, list(map(str, range(len(texts)))), [None] * len(texts))
