"""Files of fastText models: their labels, read without the library, which has no call for them.

The format is that of `FastText::saveModel`: integers and floats in the machine's order, which is little-endian here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash

MAGIC = 793712314
MAX_VERSION = 12
SUPERVISED = 3
MAX_LABELS = 2**16 - 1
"""Labels have numbers of 16 bits, of which the last one stands for none."""
_HEADER = struct.Struct("<ii12id")
"""Magic, version, and the arguments: dim, ws, epoch, minCount, neg, wordNgrams, loss, model, ..., t."""
_DIMENSION = 2
_MODEL = 2 + 7
_COUNTS = struct.Struct("<iiiqq")
"""Entries, words, labels, tokens, pruned n-grams (-1: not pruned)."""
_ENTRY_END = 9
"""Bytes behind the name of an entry: its count, and whether it is a label."""
_NAME_BYTES = 2**16
_READ = 2**20


@dataclass(frozen=True)
class ModelFile:
    """A fastText model that predicts labels.

    Attributes:
        path: of the file.
        hash: xxh3 of its bytes, 16 hexadecimal digits.
        labels: as the model has them (`__label__en`), sorted.
    """

    path: Path
    hash: str
    labels: tuple[str, ...]


def read_model_file(path: Path, key: str) -> ModelFile:
    """Read labels and hash of a model file.

    Args:
        path: of the file.
        key: of the run file that names it.

    Raises:
        UserError: it cannot be read, is damaged or cut, or is not a fastText model with labels.
    """
    try:
        size = path.stat().st_size
        with storage.open_regular(path) as file:
            labels = _labels(file, size)
        return ModelFile(path, f"{file_hash(path):016x}", tuple(sorted(labels)))
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error.strerror}; name a model file of yours") from error
    except (ValueError, struct.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{key}: {path} is not a whole fastText model ({error}); name a supervised model like lid.176.ftz, and "
            "download or copy it again if it should be one"
        ) from None


def _labels(file: BinaryIO, size: int) -> list[str]:
    """Labels in the order of the file; everything up to its end is checked to be there."""
    head = _HEADER.unpack(_take(file, _HEADER.size))
    if head[0] != MAGIC:
        raise ValueError("it does not begin with fastText's number")
    if not 0 < head[1] <= MAX_VERSION:
        raise ValueError(f"its format has version {head[1]}")
    if head[_MODEL] != SUPERVISED:
        raise ValueError("it has word vectors, but is not a classifier")
    entries, words, count, _, pruned = _COUNTS.unpack(_take(file, _COUNTS.size))
    if min(entries, words, count) < 0 or entries != words + count or entries > size or not 0 < count <= MAX_LABELS:
        raise ValueError(f"its dictionary would have {words} words and {count} labels")
    names = _Names(file)
    labels = [name.decode() for name, is_label in (names.next() for _ in range(entries)) if is_label]
    if len(labels) != count or len(set(labels)) != count:
        raise ValueError("its labels are damaged")
    end = names.position + 8 * max(pruned, 0)
    for expected in (None, count):
        file.seek(end)
        end, rows, columns = _skip_matrix(file, end + 1, quantized=bool(_take(file, 1)[0]))
        if columns != head[_DIMENSION] or expected not in (None, rows):
            raise ValueError(f"a table of it is {rows} x {columns}")
    if end != size:
        raise ValueError(f"it has {size} bytes, but its tables take {end}")
    return labels


class _Names:
    """Entries of the dictionary, each ended by a zero byte, a count and a type."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = b""
        self._at = 0
        self.position = file.tell()
        """Bytes of the file before the next entry."""

    def next(self) -> tuple[bytes, bool]:
        if len(self._data) - self._at < _NAME_BYTES:
            self._data, self._at = self._data[self._at :] + self._file.read(_READ), 0
        end = self._data.find(b"\0", self._at, self._at + _NAME_BYTES)
        if end < 0 or end + _ENTRY_END >= len(self._data):
            raise ValueError("its dictionary is damaged")
        name, kind = self._data[self._at : end], self._data[end + _ENTRY_END]
        self.position += end + 1 + _ENTRY_END - self._at
        self._at = end + 1 + _ENTRY_END
        if kind > 1:
            raise ValueError("its dictionary is damaged")
        return name, kind == 1


def _skip_matrix(file: BinaryIO, start: int, *, quantized: bool) -> tuple[int, int, int]:
    """(end, rows, columns) of a table that begins at `start`."""
    if not quantized:
        rows, columns = struct.unpack("<qq", _take(file, 16))
        return start + 16 + _positive(rows) * _positive(columns) * 4, rows, columns
    norms, rows, columns, size = struct.unpack("<?qqi", _take(file, 21))
    end = _skip_quantizer(file, start + 21 + _positive(size))
    if norms:
        end = _skip_quantizer(file, end + _positive(rows))
    return end, rows, columns


def _skip_quantizer(file: BinaryIO, start: int) -> int:
    """The end of the centroids of a product quantizer: 256 of each sub-vector."""
    file.seek(start)
    dimensions, *_ = struct.unpack("<4i", _take(file, 16))
    return start + 16 + _positive(dimensions) * 256 * 4


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it is cut")
    return data


def _positive(number: int) -> int:
    if not 0 <= number < 2**48:
        raise ValueError("its tables are damaged")
    return number
