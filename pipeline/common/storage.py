"""The only way to disk: write under a temporary name in the same folder, flush, rename.

A reader sees the old file or the new one, never a part of one. Whatever is left under a temporary name after a crash
is nobody's: `pipeline` commands pass it over, and remove it when they can tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import orjson

from pipeline.common import links, process_identity
from pipeline.common.errors import MachineError, UserError

TEMPORARY_SUFFIX = ".tmp"
FOREIGN_S = 7 * 86_400.0
"""A temporary file of another machine or container that nobody has written for so long is nobody's."""
SMALL_BYTES = 2**26
"""Bytes of a file that people write, or that has a few numbers: far more than it needs."""
MAX_JSON_BYTES = 2**32
"""Bytes of a JSON file that is read: a plan of ten million files has less."""
_MAX_LINE = 2**26
"""Bytes of a line of JSON that is read; a sparse file can be one line of terabytes."""
_FLAGS = {
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "r+": os.O_RDWR,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
"""Flags of the modes of files that are written."""
_SHOWN_NAME = 200
_BLOCK = 2**20
"""Bytes that are read at once from the end of a file."""
_TEMPORARY = re.compile(r"\..+\.(?P<space>[^.]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp", re.DOTALL)


def temporary(final: Path) -> Path:
    """A name beside `final` that no other process uses: a pid, where that pid is known, and a nonce are part of it."""
    space = process_identity.pid_space()
    return final.with_name(f".{final.name}.{space}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def sync(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to disk; nothing of a link, a pipe or a device."""
    # In a folder of a group a member can put a pipe beside what is written, and opening it would wait for ever.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            return
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(tmp: Path, final: Path) -> None:
    """Make `tmp` (a file, or a folder with everything in it) durable and visible as `final`.

    A file replaces an older one. A folder needs `final` to be absent.
    """
    if tmp.is_dir():
        for folder, _, files in os.walk(tmp, topdown=False):
            for name in files:
                if not (path := Path(folder, name)).is_symlink():
                    sync(path)
            sync(Path(folder))
    else:
        sync(tmp)
    links.replace(tmp, final)
    sync(final.parent)


def put(final: Path, data: bytes, mode: int | None = None) -> None:
    """Write a small file atomically. On an error (a full disk, say) the temporary file is removed.

    With `mode` it has these permissions, else those that the umask leaves.
    """
    tmp = temporary(final)
    try:
        with naming(final):
            write_new(tmp, data, mode)
            commit(tmp, final)
    except BaseException:
        with contextlib.suppress(OSError):
            links.remove(tmp)
        raise


def write_new(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file that must not be there yet; with `mode` it has these permissions, whatever the umask."""
    with os.fdopen(links.open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data)


def make_below(root: Path, folder: Path) -> None:
    """Make a folder and those above it, up to a root that must exist.

    A root that was there before and is gone (its disk is not mounted, it was moved) must not be made anew: what was in
    it would be taken for lost, and the stub would be in the way when it comes back.

    Args:
        root: that exists.
        folder: the root itself, which is then only looked for, or a folder inside.

    Raises:
        FileNotFoundError: there is no root; the error names it.
        ValueError: the folder is not inside the root.
    """
    folder.relative_to(root)
    try:
        if folder == root:
            os.stat(root)
        else:
            links.make_folder(folder)
    except FileNotFoundError:
        if folder == root:
            reason = "the folder is gone: its disk is not mounted, or it was moved. It is not made anew"
            raise FileNotFoundError(errno.ENOENT, reason, str(root)) from None
        make_below(root, folder.parent)
        links.make_folder(folder)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name a file or folder in errors of the system that name none: those of failed writes, and those of pyarrow."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _Named(io.FileIO):
    """A file whose failed writes name it, or the file that it becomes: the system names none."""

    def __init__(self, path: Path, mode: str, name: Path) -> None:
        super().__init__(links.open_to_write(path, _FLAGS[mode]), mode)
        self._shown = name

    def write(self, data: Any) -> int:
        with naming(self._shown):
            return super().write(data)


class NewFile:
    """A file that is written under a temporary name. Leaving its context without `commit` removes it."""

    def __init__(self, final: Path, mode: Literal["wb", "w+b"] = "wb") -> None:
        self.final = final
        self._tmp = temporary(final)
        raw = _Named(self._tmp, mode.replace("b", ""), final)
        self.file: BinaryIO = io.BufferedRandom(raw, 2**20) if "+" in mode else io.BufferedWriter(raw, 2**20)

    def commit(self) -> None:
        """Flush to disk and give the file its final name."""
        with naming(self.final):
            self.file.close()
        commit(self._tmp, self.final)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.file.close()
        except OSError:  # a full disk fails again on close; the first error is the one to see
            if error is None:
                raise
        finally:
            links.remove(self._tmp, missing_ok=True)


def put_json(final: Path, value: Any) -> None:
    """`put` for JSON, indented and with sorted keys so that equal content is equal bytes."""
    put(final, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """JSON as `put_json` writes it."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def open_regular(path: Path, *, symlinks: bool = True) -> BufferedReader:
    """Open a file for reading that may come from a stranger: reading a device may never end, a pipe may never begin.

    Args:
        path: of the file.
        symlinks: whether a symbolic link to a regular file will do. A link could point to a private file.

    Raises:
        UserError: it is something else than a regular file.
        OSError: it cannot be opened.
    """
    return os.fdopen(regular_descriptor(path, symlinks=symlinks), "rb")


def regular_descriptor(path: Path, *, symlinks: bool = True) -> int:
    """`open_regular` as a number, which the caller closes."""
    # A pipe without a writer would hold an open without O_NONBLOCK. Regular files do not know that flag.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if symlinks else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not symlinks:
            raise UserError(
                f"{path} is a symbolic link, but must be a regular file; `cp -rL` copies the files that links point to"
            ) from None
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _not_regular(path)


def _not_regular(path: Path) -> UserError:
    return UserError(f"{path} is not a regular file but a device, a pipe or a socket, and is not read; remove it")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a file that may come from a stranger; raises as `open_regular`.

    Args:
        path: of the file.
        most: bytes of a file that is read; a larger one, which may take no room on the disk, is a `UserError`.
    """
    with open_regular(path) as file:
        if most is not None and (size := os.fstat(file.fileno()).st_size) > most:
            raise UserError(f"{path} has {size:,} bytes, of which at most {most:,} are read; do not trust its origin")
        return file.read()


def shown(text: str) -> str:
    """A text of a stranger for a message, cut if it is long."""
    return text if len(text) <= _SHOWN_NAME else f"{text[:_SHOWN_NAME]}..."


def plain_name(name: object, where: Path) -> str:
    """A file's name out of a list that may come from a stranger: it must name a file beside the list.

    Args:
        name: as the list has it.
        where: the list is.

    Raises:
        UserError: it could lead to another folder, or is not printable.
    """
    if isinstance(name, str) and name not in ("", ".", "..") and name.isprintable() and not set(name) & {"/", "\\"}:
        return name
    raise UserError(
        f"{where} names {shown(ascii(name))}, which is not a plain file name (without folders, '..' and control "
        "characters); this program never writes such a name, so do not trust the origin of these files"
    )


def get_json(path: Path, *keys: str) -> Any:
    """Read a JSON file; with `keys`, an object that has at least them.

    Raises:
        UserError: it is something else; the message names the file.
    """
    data = read_bytes(path, MAX_JSON_BYTES)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: it is not valid JSON: {error}") from None
    if keys and not (isinstance(value, dict) and value.keys() >= set(keys)):
        raise UserError(f"{path} is damaged: it is not an object with the keys {', '.join(keys)}")
    return value


def have_sizes(sizes: Mapping[Path, int]) -> bool:
    """Tell whether files are there and have these sizes in bytes."""
    try:
        return all(os.stat(path).st_size == size for path, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_json(path: Path, *keys: str) -> Any:
    """`get_json`, or None where the file is missing or damaged."""
    try:
        return get_json(path, *keys)
    except (FileNotFoundError, UserError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, without a word of the file in the errors.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    value = orjson.loads(read_bytes(path, MAX_JSON_BYTES))
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Errors of what is written inside, which is one thing to the user, whatever file of it fails.

    Args:
        what: key or option, and the path as it was given.

    Raises:
        MachineError: it cannot be written. A disk or network that fails is left to the caller.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EIO, errno.ESTALE):  # which may have been met where something was read
            raise
        reason = error.strerror or str(error)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            reason = "a part of the path is a file"
        todo = "name another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = "free some space, or name a folder on another disk"
        raise MachineError(f"{what} cannot be written ({reason}); {todo}") from error


def is_stale(tmp: Path) -> bool:
    """Tell whether nobody writes a file with a name by `temporary` any more, by its process; elsewhere by its age."""
    name = _TEMPORARY.fullmatch(tmp.name)
    if name is None:
        return False
    try:
        if name["space"] != process_identity.pid_space():
            return time.time() - tmp.stat().st_mtime > FOREIGN_S
        return not process_identity.runs(int(name["pid"]))
    except OSError:  # the file is gone
        return False


def remove_if_stale(tmp: Path) -> None:
    """Remove a file with a name by `temporary` that nobody writes any more."""
    if is_stale(tmp):
        with contextlib.suppress(OSError):  # on a disk that cannot be written it stays
            links.remove(tmp)


def keep_room(descriptor: int, size: int = 65536) -> None:
    """Take room on disk behind the end of an open file, for what is still to be written; where that cannot be, nothing.

    Args:
        descriptor: of the file, whose length stays as it is.
        size: bytes.
    """
    keep_size = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
    with contextlib.suppress(OSError, AttributeError):
        end = os.fstat(descriptor).st_size
        ctypes.CDLL(None).fallocate(descriptor, keep_size, ctypes.c_int64(end), ctypes.c_int64(size))


def cannot_write(folder: Path) -> str | None:
    """Reason of the system why a folder cannot take another file; None if it can."""
    probe = temporary(folder / "probe")
    try:
        write_new(probe, bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            links.remove(probe, missing_ok=True)
    return None


class Reserved:
    """A small file of fixed size that takes its room when it is made, and can be written when the disk is full.

    What is written replaces what was there, in place: a reader may find a part of it, and looks again later. On file
    systems that write every block anew (ZFS, Btrfs) a full disk may refuse it all the same.

    Args:
        path: of the file. One of the right size that is there already is used as it is.
        size: bytes; what is written is padded with spaces, which JSON allows.
    """

    def __init__(self, path: Path, size: int = 8192) -> None:
        self.path = path
        self._size = size
        with contextlib.suppress(OSError):  # a write tries again, and says why it cannot be
            self._make()

    def _make(self) -> None:
        if not self.path.is_file() or self.path.stat().st_size != self._size:
            try:
                with naming(self.path), links.create(self.path) as file:
                    file.write(b" " * self._size)
            except OSError:
                links.remove(self.path, missing_ok=True)
                raise

    def write(self, data: bytes) -> None:
        """Replace the content.

        Raises:
            OSError: it cannot be written, or is longer than the file.
        """
        if len(data) > self._size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.path))
        self._make()
        with _Named(self.path, "r+", self.path) as file:
            file.write(data.ljust(self._size))
            os.fsync(file.fileno())

    def become(self, final: Path, data: bytes) -> None:
        """Write it, and give it the name of another file, which it replaces."""
        self.write(data)
        links.replace(self.path, final)

    def remove(self) -> None:
        """It is not needed any more."""
        with contextlib.suppress(OSError):
            links.remove(self.path, missing_ok=True)


class JsonLines:
    """Appends a JSON object a line.

    A line that a crash cut short is closed first, so that the next one stands alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _Named(path, "a+", path)
        self._torn = False
        """A full disk has cut the last line short; it must not spoil the next one."""
        if self._file.seek(0, os.SEEK_END) > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; a kill leaves whole lines, but for the last."""
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        if self._torn:
            line = b"\n" + line
        with naming(self._path):
            while line:
                line = line[self._file.write(line) :]
                self._torn = bool(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def add_json_line(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines, as `JsonLines` does."""
    with contextlib.closing(JsonLines(path)) as lines:
        lines.write(row)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file to which other processes of this machine may add theirs at the same time.

    The line comes after a newline, too, so that one before it that a full disk has cut short does not spoil it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with naming(path), os.fdopen(links.open_to_write(path, flags), "wb", buffering=0) as file:
        file.write(b"\n" + line + b"\n")


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Write a part of a file in place, which other processes of this machine may do with theirs.

    Neither flushed to disk nor in one piece: whoever reads it looks again where it is none.
    """
    with naming(path), os.fdopen(links.open_to_write(path, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
        while data:  # beyond a limit the system writes a part, and refuses the next
            written = os.pwrite(file.fileno(), data, offset)
            data, offset = data[written:], offset + written


def cut(path: Path, size: int) -> None:
    """Take away what a file has beyond a size in bytes."""
    with os.fdopen(links.open_to_write(path, os.O_RDWR), "rb+") as file:
        if file.seek(0, os.SEEK_END) > size:
            file.truncate(size)


def log_to(path: Path) -> None:
    """Let a file take all that this process prints from now on; on an error it stays as it is."""
    with contextlib.suppress(OSError):
        descriptor = links.open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; what a crash cut short, or is not an object, is skipped."""
    return list(json_lines(path))


def json_lines(path: Path, unread: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines one at a time, for a file of millions.

    Args:
        path: of the file; without one there are no objects.
        unread: called for each whole line that is skipped; one without its end may be being written.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(_MAX_LINE):
            if len(line) == _MAX_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(_BLOCK)) and not rest.endswith(b"\n"):
                    file.seek(_data_after(file, file.tell()))
                unread()
            elif (row := json_object(line)) is not None:
                yield row
            elif line.strip() and line.endswith(b"\n"):
                unread()


def json_object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it is damaged, or something else."""
    with contextlib.suppress(orjson.JSONDecodeError):
        row = orjson.loads(line)
        if isinstance(row, dict):
            return row
    return None


def json_lines_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines from the last one on, reading no more than is asked for."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        place, rest = file.seek(0, os.SEEK_END), b""
        while place > 0:
            size = min(_BLOCK, place)
            place -= size
            file.seek(place)
            first, *lines = (file.read(size) + rest).split(b"\n")
            if place == 0:
                lines, first = [first, *lines], b""
            rest = first
            if len(first) >= _MAX_LINE:
                rest, place = b"\0", _data_before(file, place)  # with which no line is JSON
            for line in reversed(lines):
                if (row := json_object(line)) is not None:
                    yield row


def _data_after(file: BufferedReader, place: int) -> int:
    """The first byte from a place on that is not in a hole of a sparse file; the end if there is none."""
    try:
        return _place_of(file, place, os.SEEK_DATA)
    except OSError:  # behind the last bytes
        return os.fstat(file.fileno()).st_size


def _data_before(file: BufferedReader, place: int) -> int:
    """The end of the last bytes before a place that are not in a hole of a sparse file."""
    begin = end = 0
    with contextlib.suppress(OSError):  # behind the last bytes
        while end < place and (begin := _place_of(file, end, os.SEEK_DATA)) < place:
            end = _place_of(file, begin, os.SEEK_HOLE)
    return min(end, place)


def _place_of(file: BufferedReader, place: int, whence: int) -> int:
    """Place that a seek leads to. The descriptor is put back: the buffer of the file counts on where it is."""
    descriptor = file.fileno()
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        return os.lseek(descriptor, place, whence)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)
