"""The record that this process hands to a parser of another package, where the process that started it can read it.

A record may keep such a parser busy for hours, fill memory or crash it, inside of C code where Python handles no
signal. So the parent of a worker looks from outside (`pipeline.data.work.worker_watch`), and this says what it sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

FOREIGN_PARSERS = (
    *("trafilatura", "ftfy", "fasttext", "tokenizers", "gigatoken", "fastokens"),
    *("sentencepiece", "tiktoken", "regex"),
)
"""Packages that texts of others are given to, record by record. Each call is inside of `parsing`."""
SLOT_BYTES = 2048
SKIPPED = "listed in skip_records"
"""Reason of a record that the run file leaves out."""


class _Here:
    """State of this process."""

    memory: ctypes.Array[ctypes.c_char] | None = None
    record: tuple[str, ...] = ()
    careful = False
    deadly: tuple[int, ...] = ()


def share(memory: ctypes.Array[ctypes.c_char]) -> None:
    """Write to memory that the parent reads, `SLOT_BYTES` of it."""
    _Here.memory, _Here.deadly = memory, ()


@contextlib.contextmanager
def ended_by(*numbers: int) -> Iterator[None]:
    """Let signals end this process where they find it inside of a parser: a handler of Python would wait for its end.

    That is for the process that starts workers, which reads samples itself. A worker is killed by that process.
    """
    _Here.deadly = numbers
    try:
        yield
    finally:
        _Here.deadly = ()


def set_careful(careful: bool) -> None:
    """Hand over one record at a time from now on, or many: a parser failed on a batch that held the wrong one."""
    _Here.careful = careful


def is_careful() -> bool:
    """Tell whether records are to be handed over one at a time."""
    return _Here.careful


def working_on(*records: str) -> None:
    """Name the record that parsers get next; or the first and the last one of a batch."""
    _Here.record = records


class parsing:
    """A call of a parser of another package, with the record that `working_on` has named."""

    __slots__ = ("_handlers", "_parser")

    def __init__(self, parser: str) -> None:
        self._parser = parser
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> None:
        if _Here.memory is not None:
            text = "\n".join((self._parser, *_Here.record)).encode("utf-8", "backslashreplace")
            _Here.memory.value = text[: SLOT_BYTES - 1]
        if _Here.deadly and threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, signal.SIG_DFL) for number in _Here.deadly}

    def __exit__(self, *_: object) -> None:
        if _Here.memory is not None:
            _Here.memory.value = b""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
