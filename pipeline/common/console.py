r"""Output to the terminal: plain lines, tables, and a bar where there is a terminal.

Everything that is printed passes here. File names, manifests, host names, log lines and generated text come from
others, and a terminal obeys the escape sequences in them, which can hide a line, rename the window or write to the
clipboard. So control characters are printed as `\u001b`. JSON spells them like this as well: JSON that is printed keeps
its values.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import signal
import sys
import termios
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import rich.console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pipeline.common.redaction import masked

_NOT_TOLD = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE)
"""Errors of a full disk under a log file, a terminal that is gone and a pipe without a reader: they end no run."""
_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u202a-\u202e\u2066-\u2069"  # turn the direction of what follows: text reads as something else
    "\ud800-\udfff"  # bytes of a file name that are not UTF-8, which no stream can encode
    "]"
)
_COLOURS = re.compile("\x1b\\[[0-9;:]*m")
_LINE_ENDS = re.compile("\r\n?")
_MB = 10**6
_MOST_COLUMNS = 100
"""Columns of a message on a terminal."""
_WIDEST = 10_000
"""Columns of a table in a file, at most."""
VERBOSE = "PIPELINE_VERBOSE"
"""Environment variable of `--verbose`, which processes that a command starts inherit."""


def spell_out_what_cannot_be_encoded() -> None:
    """Let standard output take any text where it is not UTF-8: other characters are spelled out, as in JSON."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("spelled_out", _spelled_out)
        sys.stdout.reconfigure(errors="spelled_out")


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


def visible(text: str) -> str:
    """A text with the characters that a terminal obeys spelled out; line feeds and tabs stay."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def visible_log(text: str) -> str:
    """A piece of a log file as `visible` text: without secrets and colours, a line for each state of a progress bar."""
    return visible(masked(_LINE_ENDS.sub("\n", _COLOURS.sub("", text))))


class Console(rich.console.Console):
    """A console whose own styles reach the terminal, and nothing else that it would obey.

    Text is never taken for markup or emoji codes, since most of it comes from files: style it with `rich.text.Text`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False} | options))

    def render_str(self, text: str, **options: Any) -> Text:
        """A text before it is laid out, so that a column is as wide as what is shown."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of text, before styles become escape sequences."""
        for segment in super().render(renderable, options):
            # Segments with control codes are rich's own: the cursor of a progress bar.
            if segment.control is None and _UNSAFE.search(segment.text):
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment

    def _check_buffer(self) -> None:
        """Write out what was printed; a pipe without a reader is an error, where rich would end the process."""
        if self.quiet:
            del self._buffer[:]
            return
        try:
            self._write_buffer()
        except OSError as error:
            del self._buffer[:]  # or the next print would write it again, and more each time
            if error.errno != errno.EIO or not let_go_of_terminal():
                raise


def let_go_of_terminal() -> bool:
    """Put /dev/null in the place of a terminal that has hung up, to which each write fails; whether there was one."""
    found = False
    for stream in (0, 1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:  # as files and closed streams raise, too
            if error.args[0] == errno.EIO:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, stream)
                os.close(null)
                found = True
    return found


def on_stop(number: int) -> None:
    """First step of a handler of stop signals: nothing printed from now on fails for want of a terminal."""
    if number == signal.SIGHUP:
        with suppress(OSError):
            let_go_of_terminal()


def echo(text: object = "", *, end: str = "\n", error: bool = False, flush: bool = False) -> None:
    """`print` of a text as it is, to standard output or the error output, with control characters spelled out."""
    try:
        print(visible(str(text)), end=end, file=sys.stderr if error else sys.stdout, flush=flush)
    except OSError as failed:
        if failed.errno != errno.EIO or not let_go_of_terminal():
            raise


def _wrapped(console: rich.console.Console, text: str) -> str:
    """A text in lines of at most 100 columns on a terminal, and unchanged elsewhere, so that `grep` finds it whole.

    Lines break at spaces alone, which keeps paths whole.
    """
    if not is_screen(console):
        return text
    columns = min(_MOST_COLUMNS, console.width or _MOST_COLUMNS)
    wrapper = textwrap.TextWrapper(columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) if len(line) > columns else line for line in text.split("\n"))


def is_screen(console: rich.console.Console) -> bool:
    """True for a terminal itself: with FORCE_COLOR rich takes files and pipes for one."""
    try:
        return console.is_terminal and console.file.isatty()
    except ValueError:  # it is closed
        return False


def say(console: rich.console.Console, text: str) -> None:
    """A message without secrets: no markup, no colours for numbers, no breaks within paths."""
    verbatim(console, _wrapped(console, masked(text)))


def verbatim(console: rich.console.Console, text: str) -> None:
    """A text whose lines stay whole, also on a terminal: a script, JSON, a table, a log, a document."""
    try:
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
    except OSError as error:
        if error.errno not in _NOT_TOLD:
            raise


def print_table(console: rich.console.Console, table: Table) -> None:
    """A table in which no number or word is cut.

    A terminal that is too narrow gets it without the columns that are empty, and if these are not enough, each row as a
    block of lines. Files and pipes get it in its whole width.
    """
    wide = console.options.update(width=_WIDEST)
    least, width = Measurement.get(console, wide, table)
    room = console.width if is_screen(console) else _WIDEST
    # Where only names may be broken, rich breaks nothing else.
    if least <= room and all(column.no_wrap or column.overflow == "fold" for column in table.columns):
        width = min(width, room)
    if width > room and table.row_count:
        _drop_empty_columns(table)
        width = Measurement.get(console, wide, table).maximum
    if width <= room:
        # Where there is no terminal, the console's own width is a guess, to which rich would cut the table.
        before, console._width = console._width, width
        try:
            console.print(table)
        finally:
            console._width = before
    else:
        verbatim(console, "\n".join(_blocks(table)))


def _drop_empty_columns(table: Table) -> None:
    """Remove columns in which no row has a value."""
    first, *others = table.columns
    filled = [column for column in others if any(str(cell) not in ("", "-") for cell in column.cells)]
    table.columns = [first, *filled]
    for place, column in enumerate(table.columns):
        column._index = place


def _blocks(table: Table) -> Iterator[str]:
    """Lines of a table with a line per cell: the first cell of a row, and the others below it with their heads."""
    if table.title:
        yield str(table.title)
    heads = [str(column.header).replace("\n", " ") for column in table.columns]
    widest = max(map(len, heads[1:]), default=0)
    for first, *cells in zip(*(list(column.cells) for column in table.columns), strict=True):
        yield str(first)
        for head, cell in zip(heads[1:], cells, strict=True):
            if str(cell) not in ("", "-"):
                yield f"  {head:<{widest}}  {cell}"


def warn(console: rich.console.Console, message: object) -> None:
    """A warning: something may be wrong, and the command continues."""
    say(console, f"warning: {message}")


def confirmed(console: rich.console.Console, text: str) -> bool:
    """Ask a person whether something is meant; False where none can answer."""
    if not is_screen(console) or sys.stdin is None or not sys.stdin.isatty():
        return False
    say(console, text)
    try:
        return console.input(Text("continue? [y/N] ")).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def detail(console: rich.console.Console, text: str) -> None:
    """A line for who looks closely: printed with `--verbose`, and into the logs of jobs."""
    if is_verbose():
        say(console, text)


def is_verbose() -> bool:
    """True with `--verbose`, and in jobs."""
    return os.environ.get(VERBOSE) == "1"


def alarm(label: str, message: str) -> None:
    """An error on the error output, after a word that stands out."""
    console, message = Console(stderr=True, soft_wrap=True, highlight=False), masked(message)
    try:
        console.print(label, style="bold red", end="")
        console.print(_wrapped(console, f"{label} {message}").removeprefix(label))
    except OSError as error:
        if error.errno not in _NOT_TOLD:  # the exit code still says what happened
            raise


def flush() -> None:
    """Write out what was printed; what cannot be written is dropped, so that it does not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                # The interpreter flushes again when it ends, and would leave with code 120.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def progress(console: rich.console.Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar; yields a function that advances it by a number of units."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda units: bar.advance(task, units)


@contextmanager
def byte_progress(console: rich.console.Console, label: str, size: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in megabytes; yields a function that advances it by a number of bytes."""
    done, lock = 0, threading.Lock()
    with progress(console, f"{label} (MB)", max(1, size // _MB)) as advance:

        def advance_bytes(count: int) -> None:
            nonlocal done
            with lock:
                advance((done + count) // _MB - done // _MB)
                done += count

        yield advance_bytes
