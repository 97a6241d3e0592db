"""Records of WARC files (ISO 28500, versions 1.0 and 1.1), read one after another from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

VERSIONS = (b"WARC/1.0", b"WARC/1.1")
_LINE_ENDS = (b"\r\n", b"\n")
_CHUNK_BYTES = 2**18
_HEAD_BYTES = 2**20
"""Bytes that the header of a record may have."""


class BrokenWarcError(Exception):
    """A file has something else where a record should be.

    Attributes:
        reason: one of a few.
        detail: what was found.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class WarcHead(NamedTuple):
    """Header of a record.

    Attributes:
        raw: as it lies in the file, with the blank line behind it.
        fields: values by name in lower case; of a name that is there twice the first.
        length: bytes of the block that follows.
    """

    raw: bytes
    fields: dict[str, str]
    length: int


def line_after(stream: BinaryIO, length: int) -> bytes:
    """The line behind a record and its line ends: the first one of the next record, or nothing.

    Args:
        stream: the file, at the end of the block.
        length: of the block.

    Raises:
        BrokenWarcError: the block ends elsewhere than its header says: neither a line end follows, nor a record.
    """
    line = stream.readline(_HEAD_BYTES)
    if line and line not in _LINE_ENDS and not _begins(line) and not _is_cut(line):
        raise _damaged(line, f", behind a record with a Content-Length of {length}")
    return _filled(stream, line)


def read_head(stream: BinaryIO, line: bytes | None = None) -> WarcHead | None:
    """The header of the next record; None at the end of the file.

    Args:
        stream: the file.
        line: its first one, if that was read before.

    Raises:
        BrokenWarcError: there is something else.
    """
    line = _filled(stream, stream.readline(_HEAD_BYTES)) if line is None else line
    if not line:
        return None
    if not _begins(line):
        raise _truncated() if _is_cut(line) else _damaged(line)
    lines, size = [line], len(line)
    while line not in _LINE_ENDS:
        line = stream.readline(_HEAD_BYTES)
        lines.append(line)
        size += len(line)
        if not line.endswith(b"\n") and size < _HEAD_BYTES:
            raise _truncated()
        if size >= _HEAD_BYTES:
            raise BrokenWarcError("damaged WARC file", f"the header of a record has more than {_HEAD_BYTES} bytes")
    fields = header_fields(b"".join(lines[1:]), "utf-8")
    length = fields.get("content-length", "")
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        raise BrokenWarcError("damaged WARC file", f"the Content-Length of a record is {length[:30]!r}")
    return WarcHead(b"".join(lines), fields, int(length))


def header_fields(raw: bytes, encoding: str) -> dict[str, str]:
    """Fields of a header by name in lower case, with folded lines as one. A line without a colon is left out."""
    fields: dict[str, str] = {}
    name = ""
    for line in raw.decode(encoding, "backslashreplace").split("\n"):
        if line[:1] in (" ", "\t") and name:
            fields[name] += f" {line.strip()}"
            continue
        before, colon, value = line.partition(":")
        name = before.strip().lower() if colon and before.strip().lower() not in fields else ""
        if name:
            fields[name] = value.strip()
    return fields


def block_chunks(stream: BinaryIO, length: int) -> Iterator[bytes]:
    """The block of a record in chunks.

    Raises:
        BrokenWarcError: the file ends before it does.
    """
    while length:
        chunk = stream.read(min(length, _CHUNK_BYTES))
        if not chunk:
            raise _truncated()
        length -= len(chunk)
        yield chunk


def _filled(stream: BinaryIO, line: bytes) -> bytes:
    """The first line from this one on that is not blank."""
    while line in _LINE_ENDS:
        line = stream.readline(_HEAD_BYTES)
    return line


def _begins(line: bytes) -> bool:
    return line.rstrip() in VERSIONS


def _is_cut(line: bytes) -> bool:
    return not line.endswith(b"\n") and any(version.startswith(line.rstrip()) for version in VERSIONS)


def _damaged(line: bytes, where: str = "") -> BrokenWarcError:
    return BrokenWarcError("damaged WARC file", f"no record of WARC 1.0 or 1.1 begins with {line[:20]!r}{where}")


def _truncated() -> BrokenWarcError:
    return BrokenWarcError("truncated WARC file", "it ends inside of a record")
