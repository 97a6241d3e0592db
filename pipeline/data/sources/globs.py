"""The files of a source: globs with `**`, and what to leave out."""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.listing import find_objects
from pipeline.common.objects.partial_copy import PartialCopy
from pipeline.common.objects.stored import StoredObject
from pipeline.common.objects.stream import ObjectStream
from pipeline.common.objects.urls import is_url, parse_url

_SHOWN = 10
_LOOK_BYTES = 2**12
"""Bytes of an object that a look at one place of it fetches."""
NO_REMOTE = RemoteAccess()
"""Settings where no run file has others."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source, or an object.

    Attributes:
        name: its path below the fixed part of the glob: equal wherever the corpus lies.
        path: of the file, or URL.
        size: in bytes.
        mtime_ns: time of its last change; 0 of objects.
        version: of an object, its ETag; empty of files.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    version: str = ""

    @property
    def is_object(self) -> bool:
        """True if it lies in object storage."""
        return bool(self.version)

    @property
    def changed_at(self) -> int | str:
        """Its time, or the version of an object: equal means that it need not be read again."""
        return self.version or self.mtime_ns

    def stored(self, remote: RemoteAccess) -> StoredObject:
        """The object."""
        return StoredObject.of(self.path, self.size, self.version, remote)

    def open(self, remote: RemoteAccess, stop: int | None = None) -> io.RawIOBase:
        """Open it for reading from a place on.

        Args:
            remote: settings of access to objects.
            stop: about where reading will end.
        """
        if self.is_object:
            return ObjectStream(self.stored(remote), stop)
        return open(self.path, "rb", buffering=0)

    def open_kept(self, remote: RemoteAccess) -> io.RawIOBase:
        """Open it for reading some of it twice."""
        if self.is_object:
            return ObjectStream(self.stored(remote), keeps=True)
        return open(self.path, "rb", buffering=0)

    def open_to_look(self, remote: RemoteAccess) -> io.RawIOBase:
        """Open it for a look at a few bytes."""
        if self.is_object:
            return ObjectStream(self.stored(remote), small=_LOOK_BYTES)
        return open(self.path, "rb", buffering=0)

    def open_anywhere(self, remote: RemoteAccess) -> io.RawIOBase:
        """Open it for reading here and there."""
        if self.is_object:
            return PartialCopy(self.stored(remote))
        return open(self.path, "rb", buffering=0)


def find_files(
    paths: list[str],
    exclude: list[str],
    key: str,
    in_folder: Callable[[str, str], list[str]] | None = None,
    remote: RemoteAccess = NO_REMOTE,
) -> list[File]:
    """The files that globs match, without those excluded, each once, sorted by name.

    Args:
        paths: globs; `**` matches any folders. `~` and relative paths are understood.
        exclude: globs. One without a slash is compared with the file's name alone; others with its path, and with
            its path below the fixed part of the glob that found it.
        key: config key of the source, for messages (`data.sources.0`).
        in_folder: the files that a folder stands for which is named without a glob, from its path and the config key.
        remote: settings of access to objects.

    Raises:
        UserError: a pattern matches no file, or something that cannot be read as one.
    """
    unwanted = [_Exclude(pattern) for pattern in exclude]
    found: dict[str, str] = {}
    objects: dict[str, StoredObject] = {}
    for pattern in paths:
        if is_url(pattern):
            listed = find_objects(parse_url(pattern), remote)
            if not listed:
                raise UserError(f"{key}.paths: {pattern!r} matches no object, of those that the store lists")
            for name, stored in listed:
                path = str(stored.url)
                if not any(excluded(path, name) for excluded in unwanted):
                    found.setdefault(path, name)
                    objects[path] = stored
            continue
        full = os.path.abspath(os.path.expanduser(pattern))
        # A file whose own name has a bracket in it is that file. `_is_no_folder` would raise with the glob, not
        # with the folder that may not be read.
        literal = os.path.lexists(full) and not os.path.isdir(full)
        if in_folder is not None and os.path.isdir(full):
            for path in in_folder(full, f"{key}.paths"):
                found.setdefault(path, os.path.relpath(path, full))
            continue
        matches = [full] if literal else list(_matches("/", full.split("/")[1:], frozenset()))
        if not matches:
            raise UserError(f"{key}.paths: {pattern!r} matches no file{_why_nothing(full)}")
        base = os.path.dirname(full) if literal else full[: glob_start(full)].rpartition("/")[0] or "/"
        for path in matches:
            name = os.path.relpath(path, base)
            if not any(excluded(path, name) for excluded in unwanted):
                found.setdefault(path, name)
    if not found:
        raise UserError(f"{key}.exclude: {exclude} leaves no file of {paths}")
    # Two globs may find different files under one name; their paths tell them apart.
    times = Counter(found.values())
    files = []
    strange: dict[str, str] = {}
    for path, name in found.items():
        if path in objects:
            about_object = objects[path]
            shown_name = path if times[name] > 1 else name
            files.append(File(shown_name, path, about_object.size, 0, about_object.version))
            continue
        try:
            about = os.stat(path)
        except OSError as error:
            if isinstance(error, PermissionError) or not os.path.islink(path):
                raise
            is_loop = error.errno == errno.ELOOP
            strange[path] = (
                "a link that points to itself" if is_loop else f"a link to {os.readlink(path)}, which does not exist"
            )
            continue
        if not stat.S_ISREG(about.st_mode):
            strange[path] = "not a file but a pipe, a socket or a device"
            continue
        if not _is_utf8(path):
            raise UserError(
                f"{key}.paths: the name of the file {os.fsencode(path)!r} is not UTF-8; rename it (`convmv` does many)"
            )
        files.append(File(path if times[name] > 1 else name, path, about.st_size, about.st_mtime_ns))
    if strange:
        first = [f"{path} is {what}" for path, what in sorted(strange.items())[:_SHOWN]]
        more = f" and {len(strange) - _SHOWN:,} more like these" if len(strange) > _SHOWN else ""
        raise UserError(
            f"{key}.paths: {'; '.join(first)}{more}; put the {'files' if len(strange) > 1 else 'file'} there, or leave "
            f"{'them' if len(strange) > 1 else 'it'} out with {key}.exclude"
        )
    return sorted(files, key=lambda file: file.name)


def _matches(folder: str, parts: list[str], above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """The files below `folder` that the parts of a glob match, and whatever else is not a folder.

    Like `glob.iglob`: links are followed and hidden names need a dot in the glob. But a link to a folder that it lies
    in is skipped, which would give every document dozens of times, and a folder that cannot be read is an error.

    Args:
        folder: where to look.
        parts: the rest of the glob, split at its slashes.
        above: (device, inode) of the folders that `**` came through.
    """
    part, rest = parts[0], parts[1:]
    if parts[:2] == ["**", "**"]:
        yield from _matches(folder, rest, above)
        return
    if part != "**" and glob_start(part) == len(part):
        path = os.path.join(folder, part)
        if rest:
            yield from _matches(path, rest, above)
        elif _is_no_folder(path):
            yield path
        return
    if part == "**":
        try:
            about = os.stat(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        if (about.st_dev, about.st_ino) in above:
            return
        above |= {(about.st_dev, about.st_ino)}
        yield from _matches(folder, rest or ["*"], above)
    for name, is_folder in _entries(folder, hidden=part.startswith(".")):
        path = os.path.join(folder, name)
        if part == "**":
            if is_folder:
                yield from _matches(path, parts, above)
        elif fnmatch.fnmatchcase(name, part):
            if rest and is_folder:
                yield from _matches(path, rest, above)
            elif not rest and not is_folder and _is_no_folder(path):
                yield path


def _entries(folder: str, hidden: bool) -> list[tuple[str, bool]]:
    """(name, whether it is a folder) of what is in a folder; nothing if there is none."""
    try:
        with os.scandir(folder) as entries:
            return [
                # A link to itself is an error to the entry, and no folder to `isdir`.
                (entry.name, os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir())
                for entry in entries
                if hidden or not entry.name.startswith(".")
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_no_folder(path: str) -> bool:
    """Tell whether something may be meant as a file. What may not be known is an error: no file is lost."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        raise
    except OSError:
        return os.path.islink(path)


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # the system's bytes are kept in lone surrogates
        return False
    return True


def glob_start(pattern: str) -> int:
    """Index of the first glob character of a pattern; its length if there is none."""
    found = re.search(r"[*?\[]", pattern)
    return found.start() if found else len(pattern)


def _why_nothing(full: str) -> str:
    """Hint about a pattern that matches no file."""
    if os.path.isfile(os.path.join(full, "state.json")):
        return "; it is a folder of `Dataset.save_to_disk`: set type: arrow"
    if os.path.isdir(full):
        return f"; it is a folder: write {os.path.join(full, '**', '*.txt')!r} for the .txt files in it"
    base = full[: glob_start(full)].rpartition("/")[0] or "/"
    if not os.path.isdir(base):
        return f"; there is no folder {base}"
    with os.scandir(base) as entries:
        empty = next(entries, None) is None
    return f"; the folder {base} is empty" if empty else f"; the folder {base} exists, but nothing in it matches"


class _Exclude:
    """A glob to leave files out by."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(_glob_regex(pattern))
        full = pattern if is_url(pattern) else os.path.abspath(os.path.expanduser(pattern))
        self._full = re.compile(_glob_regex(full))
        self._bare = "/" not in pattern

    def __call__(self, path: str, name: str) -> bool:
        if self._full.fullmatch(path) or self._pattern.fullmatch(name):
            return True
        return self._bare and bool(self._pattern.fullmatch(os.path.basename(path)))


def _glob_regex(pattern: str) -> str:
    """A regular expression for a glob with `**` (`glob.translate` came with Python 3.13)."""
    tokens = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def one(found: re.Match[str]) -> str:
        token = found[0]
        if token in tokens:
            return tokens[token]
        if len(token) > 1:  # a character class
            inside = token[1:-1].replace("\\", "\\\\")
            return f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
        return re.escape(token)

    return "(?s:" + re.sub(r"\*\*/|/\*\*$|\*\*|\*|\?|\[!?[^\]]+\]|.", one, pattern, flags=re.DOTALL) + ")"
