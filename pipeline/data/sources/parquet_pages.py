"""Pages of a Parquet file by their headers: how much memory they ask for, known before any of it is decoded.

pyarrow believes what a page says of itself: some hundred bytes can be a page of gigabytes, or a dictionary whose one
long value is repeated a million times.

Source: the Parquet format, "Data Pages", its `PageHeader` in `parquet.thrift`, and Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from typing import Any

import pyarrow as pa

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DELTA_LENGTH_BYTE_ARRAY, _DELTA_BYTE_ARRAY = 6, 7
_SLACK_BYTES = 100
"""So much behind a column chunk pyarrow reads where old writers have left the dictionary's header out of its size."""
_HEADER_BYTES = 2**12
_LARGEST_HEADER = 2**24
"""As in pyarrow; statistics may have whole values."""
_DEEPEST = 16


@dataclass(frozen=True)
class Page:
    """A page of a column chunk, as its header describes it."""

    compressed: int
    uncompressed: int
    values: int
    """0 in a dictionary: its values are not rows."""
    repeats: bool
    """True if a value of it may come out many times, wholly or as the beginning of others."""
    by_difference: bool
    """True if the lengths of all of its values are decoded at once."""


def first_byte(chunk: Any) -> int:
    """The byte at which a column chunk (`ColumnChunkMetaData`) begins."""
    at, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    return int(dictionary if dictionary is not None and 0 < dictionary < at else at)


def pages(file: RawIOBase, chunk: Any) -> Iterator[Page]:
    """The pages of a column chunk, in the order in which pyarrow reads them.

    Args:
        file: open at any place.
        chunk: `ColumnChunkMetaData`.

    Raises:
        pa.ArrowInvalid: what stands where a page should begin is none.
    """
    at = first_byte(chunk)
    end, left = at + chunk.total_compressed_size + _SLACK_BYTES, chunk.num_values
    while left > 0 and at < end:
        header, length = _header(file, at)
        try:
            kind, uncompressed, compressed = header[1], header[2], header[3]
            about = header.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, -1), {})
            encoding = about.get(4 if kind == _DATA_V2 else 2, 0)
            values = about.get(1, 0) if kind in (_DATA, _DATA_V2) else 0
            wrong = min(uncompressed, compressed, values) < 0
        except (KeyError, TypeError, AttributeError):
            wrong = True
        if wrong:
            raise pa.ArrowInvalid(f"the header of the page at byte {at} is damaged")
        differs = kind != _DICTIONARY and encoding in (_DELTA_LENGTH_BYTE_ARRAY, _DELTA_BYTE_ARRAY)
        repeats = kind == _DICTIONARY or (differs and encoding == _DELTA_BYTE_ARRAY)
        yield Page(compressed, uncompressed, values, repeats, differs)
        left -= values
        at += length + compressed


def _header(file: RawIOBase, at: int) -> tuple[dict[int, Any], int]:
    """Fields of the page header at a byte, and its length."""
    size = _HEADER_BYTES
    while True:
        file.seek(at)
        data = file.read(size) or b""
        try:
            return _Thrift(data).struct()
        except IndexError:
            if len(data) < size or size >= _LARGEST_HEADER:
                raise pa.ArrowInvalid(f"there is no page at byte {at}") from None
            size *= 8
        except ValueError as error:
            raise pa.ArrowInvalid(f"there is no page at byte {at}: {error}") from None


class _Thrift:
    """Values in the compact protocol.

    Raises:
        IndexError: by all methods, if there are too few bytes.
        ValueError: it is none.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self) -> tuple[dict[int, Any], int]:
        """The fields of a struct by number, and where it ends."""
        return self._struct(0), self._at

    def _struct(self, depth: int) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            found[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth + 1)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("too deep")
        match kind:
            case 1 | 2 | 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._unsigned())
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._unsigned()
                return [self._value(head & 15, depth + 1) for _ in range(count)]
            case 12:
                return self._struct(depth)
        raise ValueError(f"type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise IndexError(self._at)

    def _unsigned(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
