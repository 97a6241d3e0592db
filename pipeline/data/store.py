"""The only way to disk: write under a temporary name in the same folder, flush, rename.

A reader sees the old file or the new one, never a part of one. Whatever is left under a temporary name after a crash
is nobody's: `pipeline` commands pass it over.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

import orjson

TEMPORARY_SUFFIX = ".tmp"


def temporary(final: Path) -> Path:
    """A name beside `final` that no other process uses: host, pid and a nonce are part of it."""
    host = socket.gethostname().split(".")[0]
    return final.with_name(f".{final.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def sync(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
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
                sync(Path(folder, name))
            sync(Path(folder))
    else:
        sync(tmp)
    os.replace(tmp, final)
    sync(final.parent)


def put(final: Path, data: bytes) -> None:
    """Write a small file atomically. On an error (a full disk, say) the temporary file is removed."""
    tmp = temporary(final)
    try:
        tmp.write_bytes(data)
        commit(tmp, final)
    except BaseException as error:
        tmp.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(final)  # a failed write does not say where
        raise


def put_json(final: Path, value: Any) -> None:
    """`put` for JSON, indented and with sorted keys so that equal content is equal bytes."""
    put(final, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE))


def get_json(path: Path) -> Any:
    """Read a JSON file; a `ValueError` names the file if it is not JSON."""
    data = path.read_bytes()
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error


def remove_if_stale(tmp: Path) -> None:
    """Remove a file with a name by `temporary` if the process of this host that made it is gone."""
    fields = tmp.name.rsplit(".", 4)
    if len(fields) != 5 or fields[1] != socket.gethostname().split(".")[0] or not fields[2].isdigit():
        return
    try:
        os.kill(int(fields[2]), 0)
    except ProcessLookupError:
        tmp.unlink(missing_ok=True)
    except OSError:
        pass  # it lives, under another user
