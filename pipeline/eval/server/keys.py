"""API keys of a server: made for one start, or from the environment, or from a file that is read again when it changes.

A key is never printed but in the link of `private_link`, and stands in no message, log or command line.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.storage import open_regular
from pipeline.common.trust import writers

KEY_VARIABLE = "PIPELINE_API_KEY"
REREAD_SECONDS = 1.0
"""A file of keys is not looked at again before."""
_LEAST_KEY = 16
_MOST_BYTES = 2**20
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)


class Keys:
    """The keys that requests may have, several at once.

    Args:
        keys: pairs of a name for the log, which may be empty, and a key.
        file: that they come from. Its content holds at any time: if it becomes unusable, no key is accepted.
    """

    def __init__(self, keys: list[tuple[str, str]], file: Path | None = None) -> None:
        self._keys, self._file = keys, file
        self._stamp = None if file is None else _stamp(file)
        self._next_look = 0.0

    def name(self, authorization: bytes, log: Callable[[str], None]) -> str | None:
        """The name of the key in an Authorization header; None if it is none of these.

        Args:
            authorization: the header.
            log: told when the file has changed.
        """
        self._read_again(log)
        found = None
        for name, key in self._keys:  # all of them, so that the time does not say which one is similar
            if hmac.compare_digest(authorization, f"Bearer {key}".encode()):
                found = name
        return found

    def _read_again(self, log: Callable[[str], None]) -> None:
        if self._file is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + REREAD_SECONDS
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_file(self._file)
            log(f"{self._file} has changed: {len(self._keys)} keys are accepted")
        except UserError as error:
            self._keys = []
            log(f"no key is accepted until this is corrected: {error}")


class MadeKey(Keys):
    """A random key for one start of a server."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        super().__init__([("", self.key)])


def choose_keys(file: Path | None, *, makes_one: bool) -> Keys | None:
    """The keys of a file, else that of `PIPELINE_API_KEY`, else a random one; None if none is wanted.

    Args:
        file: of `--api-key-file`.
        makes_one: whether a key is made if none is given.

    Raises:
        UserError: a key is short or has characters that a header cannot, or others can read or replace the file.
    """
    if file is not None:
        return Keys(read_file(file), file)
    if (key := os.environ.get(KEY_VARIABLE)) is not None:
        _check(key, KEY_VARIABLE)
        return Keys([("", key)])
    return MadeKey() if makes_one else None


def read_file(file: Path) -> list[tuple[str, str]]:
    """Names and keys of a file with a line `KEY` or `NAME KEY` for each; empty lines and those with `#` are left out.

    Raises:
        UserError: as in `choose_keys`.
    """
    place = f"--api-key-file {file}"
    found = []
    for number, line in enumerate(read_private(file, place).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or (len(words) == 2 and not _NAME.fullmatch(words[0])):
            raise UserError(f"{place}, line {number} is neither KEY nor NAME KEY; a key is {_RULE}")
        _check(words[-1], f"{place}, line {number}")
        found.append((words[0] if len(words) == 2 else f"of line {number}", words[-1]))
    if not found:
        raise UserError(f"{place} has no key; a key is {_RULE}")
    return found


_RULE = f"{_LEAST_KEY} or more letters, digits and signs, like the output of `openssl rand -hex 16`"


def _check(key: str, place: str) -> None:
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{place} has {len(key)} characters; a key is {_RULE}")


def read_private(file: Path, place: str) -> str:
    """The text of a file with a secret.

    Args:
        file: to read.
        place: option and file, for messages.

    Raises:
        UserError: the file cannot be read, is not a plain file, or others can read or replace it.
    """
    try:
        with open_regular(file) as opened:
            # Of the file that is read, whatever stands at its name by now.
            if os.fstat(opened.fileno()).st_mode & 0o077:
                raise UserError(f"{place} can be read by others on this machine; chmod 600 {file}")
            for where in writers(file).values():
                raise UserError(f"{place} can be replaced: {where}; keep the file in a folder of yours")
            return opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}") from None


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Changes whenever the file or its permissions do; None if the file is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size
