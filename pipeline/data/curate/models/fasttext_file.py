"""Files of fastText models: their labels, read without the library, which has no call for them.

The format is that of `FastText::saveModel`: integers and floats in the machine's order, which is little-endian here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash

MAGIC = 793712314
VERSIONS = (11, 12)
SUPERVISED = 3
HIERARCHICAL = 1
"""The loss that orders labels in a tree, by their counts."""
LOSSES = (HIERARCHICAL, 2, 3, 4)
"""Hierarchical softmax, negative sampling, softmax, one versus all."""
MAX_LABELS = 2**16 - 1
"""Labels have numbers of 16 bits, of which the last one stands for none."""
MAX_DIMENSION = 2**14
MAX_ENTRIES = 2**30
MAX_NGRAM = 32
"""Characters or words of an n-gram: the library keeps the numbers of all n-grams of each word, and 6 are usual."""
MAX_COUNT = 10**15
"""Count of a label, for the tree: the library takes this one for nodes that it has not made yet."""
_HEADER = struct.Struct("<ii12id")
_FIELDS = (
    *("magic", "version", "dim", "ws", "epoch", "minCount", "neg", "wordNgrams", "loss", "model", "bucket"),
    *("minn", "maxn", "lrUpdateRate", "t"),
)
_COUNTS = struct.Struct("<iiiqq")
"""Entries, words, labels, tokens, pruned n-grams (-1: not pruned)."""
_ENTRY_END = 9
"""Bytes behind the name of an entry: its count, and whether it is a label."""
_NAME_BYTES = 2**16
_READ = 2**20
_CENTROIDS = 256
"""Values of each part of a quantized vector."""


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


class _Header(NamedTuple):
    """Numbers that predictions depend on, by the names of fastText."""

    version: int
    dim: int
    wordNgrams: int
    loss: int
    model: int
    bucket: int
    minn: int
    maxn: int


def _labels(file: BinaryIO, size: int) -> list[str]:
    """Labels in the order of the file.

    All that the library takes as it is, is checked: it would read behind its tables, divide by zero or never end.
    """
    head = _header(file)
    entries, words, count, _, pruned = _COUNTS.unpack(_take(file, _COUNTS.size))
    if not 0 < count <= MAX_LABELS or words < 0 or entries != words + count or entries > min(size, MAX_ENTRIES):
        raise ValueError(f"its dictionary would have {entries} entries: {words} words and {count} labels")
    if not -1 <= pruned <= size // 8:
        raise ValueError(f"pruneidx_size is {pruned} in a file of {size} bytes")
    names = _Names(file)
    labels = _names_of_labels(names, words, count, head.loss)
    file.seek(names.position)
    ngrams = head.bucket if pruned < 0 else _pruned_rows(_take(file, 8 * pruned))
    end = names.position + 8 * max(pruned, 0)
    quantized = _flag(file, "quant_input")
    if pruned >= 0 and not quantized:
        raise ValueError(f"pruneidx_size is {pruned}, but its input table is not quantized")
    rows = words + ngrams
    end = _check_matrix(file, end + 1, "input", rows, head.dim, exact=pruned < 0, quantized=quantized, size=size)
    file.seek(end)
    quantized_output = _flag(file, "qout")
    if quantized_output and not quantized:
        raise ValueError("qout is 1, but its input table is not quantized")
    end = _check_matrix(file, end + 1, "output", count, head.dim, exact=True, quantized=quantized_output, size=size)
    if end != size:
        raise ValueError(f"it has {size} bytes, but its tables take {end}")
    return labels


def _header(file: BinaryIO) -> _Header:
    fields = dict(zip(_FIELDS, _HEADER.unpack(_take(file, _HEADER.size)), strict=True))
    if fields["magic"] != MAGIC:
        raise ValueError("it does not begin with fastText's number")
    head = _Header(*(fields[name] for name in _Header._fields))
    if head.model != SUPERVISED:
        raise ValueError(f"model is {head.model}, but a classifier has {SUPERVISED}: it has word vectors")
    bounds = {
        "version": head.version in VERSIONS,
        "dim": 0 < head.dim <= MAX_DIMENSION,
        "wordNgrams": 0 <= head.wordNgrams <= MAX_NGRAM,
        "loss": head.loss in LOSSES,
        "minn": 0 <= head.minn <= MAX_NGRAM,
        "maxn": 0 <= head.maxn <= MAX_NGRAM,
        "bucket": 0 <= head.bucket < MAX_ENTRIES,
    }
    for name, is_within in bounds.items():
        if not is_within:
            raise ValueError(f"{name} is {fields[name]}, which no classifier has")
    if head.minn > head.maxn > 0:
        raise ValueError(f"minn is {head.minn}, but maxn is {head.maxn}")
    if head.bucket == 0 and (head.maxn > 0 or head.wordNgrams > 1):
        raise ValueError(f"bucket is 0, but wordNgrams is {head.wordNgrams} and maxn is {head.maxn}")
    return head


def _names_of_labels(names: _Names, words: int, count: int, loss: int) -> list[str]:
    """Labels, which follow the words."""
    for number in range(words):
        if names.next().is_label:
            raise ValueError(f"entry {number} of its dictionary is a label among {words} words")
    found = [names.next() for _ in range(count)]
    if not all(entry.is_label for entry in found):
        raise ValueError("its dictionary has a word among the labels")
    counts = [entry.frequency for entry in found]
    if loss == HIERARCHICAL and (counts != sorted(counts, reverse=True) or not 0 < counts[-1] <= counts[0] < MAX_COUNT):
        raise ValueError("the counts of its labels do not fall, from which the library would make a tree")
    labels = [entry.name.decode() for entry in found]
    if len(set(labels)) != count:
        raise ValueError("its labels are damaged")
    return labels


def _pruned_rows(pairs: bytes) -> int:
    """Rows of n-grams that the pairs of a pruned dictionary (number of an n-gram, its row) point to."""
    rows = [row for _, row in struct.iter_unpack("<ii", pairs)]
    if min(rows, default=0) < 0:
        raise ValueError(f"its dictionary has the row {min(rows)} for an n-gram")
    return max(rows, default=-1) + 1


class _Entry(NamedTuple):
    """An entry of the dictionary."""

    name: bytes
    frequency: int
    is_label: bool


class _Names:
    """Entries of the dictionary, each ended by a zero byte, a count and a type."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = b""
        self._at = 0
        self.position = file.tell()
        """Bytes of the file before the next entry."""

    def next(self) -> _Entry:
        if len(self._data) - self._at < _NAME_BYTES:
            self._data, self._at = self._data[self._at :] + self._file.read(_READ), 0
        end = self._data.find(b"\0", self._at, self._at + _NAME_BYTES)
        if end < 0 or end + _ENTRY_END >= len(self._data):
            raise ValueError("its dictionary is damaged")
        name, (count, kind) = self._data[self._at : end], struct.unpack_from("<qb", self._data, end + 1)
        self.position += end + 1 + _ENTRY_END - self._at
        self._at = end + 1 + _ENTRY_END
        if kind not in (0, 1):
            raise ValueError(f"its dictionary has an entry of the type {kind}")
        return _Entry(name, count, kind == 1)


def _check_matrix(
    file: BinaryIO, start: int, name: str, rows: int, columns: int, *, exact: bool, quantized: bool, size: int
) -> int:
    """The end of a table that begins at `start`, and is as large as the library will take it to be."""
    file.seek(start)
    norms = quantized and _flag(file, f"qnorm of the {name} table")
    found, width = struct.unpack("<qq", _take(file, 16))
    codes: int = struct.unpack("<i", _take(file, 4))[0] if quantized else 0
    if width != columns or found < rows or (exact and found != rows) or found > size:
        raise ValueError(f"its {name} table is {found} x {width}, not {rows} x {columns}")
    if not quantized:
        return start + 16 + int(found) * columns * 4
    end = _check_quantizer(file, start + 21 + max(codes, 0), name, columns, found, codes)
    return _check_quantizer(file, end + int(found), f"{name} norms", 1, found, found) if norms else end


def _check_quantizer(file: BinaryIO, start: int, name: str, columns: int, rows: int, codes: int) -> int:
    """The end of the centroids of a product quantizer, 256 of each part of a vector."""
    file.seek(start)
    dim, parts, width, last = struct.unpack("<4i", _take(file, 16))
    if not (dim == columns and 0 < width <= dim and parts == -(-dim // width) and last == dim - (parts - 1) * width):
        raise ValueError(
            f"its {name} quantizer has {parts} parts of {width} and {last} columns of {dim}, not {columns}"
        )
    if codes != rows * parts:
        raise ValueError(f"its {name} table has {codes} codes for {rows} x {parts}")
    return start + 16 + columns * _CENTROIDS * 4


def _flag(file: BinaryIO, name: str) -> bool:
    (value,) = _take(file, 1)
    if value > 1:
        raise ValueError(f"{name} is {value}, not 0 or 1")
    return bool(value)


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it is cut")
    return data
