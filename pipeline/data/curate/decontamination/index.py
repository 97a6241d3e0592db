"""An index of the n-grams of items: hashes in ascending order, and the items of each, in one file that is mapped.

An item with `words` words or more has all of its n-grams in it; a shorter one is one n-gram of all its words, from
`SHORTEST` words on. Items that are shorter still cannot be told from common phrases: they are listed, not looked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.common.mapped_file import map_file
from pipeline.config.curation.curate import DecontaminateConfig
from pipeline.data.curate.decontamination.items import KEY, PIECE, EvalItem, all_items, item_at, read_items, write_items
from pipeline.data.curate.decontamination.numpy_engine import ngram_hashes, word_hashes
from pipeline.data.curate.decontamination.words import find_words, word_settings
from pipeline.data.datasets.indexed import HashedFile

SHORTEST = 8
"""Words of the shortest item that is looked for as a whole, unless n-grams are shorter."""
ITEMS_FILE = "items.jsonl"
INDEX_FILE = "items.ngrams"
_MAGIC = b"ITEM-NGRAMS 1\n\0\0"
_ALIGNED = 64
_BITS_PER_NGRAM = 32
_MIN_BITS, _MAX_BITS = 12, 31
_ITEMS_AT_ONCE = 4096
_ARRAYS = (
    ("hashes", "<u8"),  # of n-grams, ascending; the place is the number of the n-gram
    ("bitmap", "|u1"),  # a bit for the first words of each n-gram, by the highest bits of their hash
    ("offsets", "<u8"),  # of each n-gram in `items`, and the end
    ("items", "<u4"),  # numbers of the items of each n-gram, ascending
    ("words", "<u4"),  # word of the first of those items that the n-gram begins with
    ("lengths", "<u1"),  # words of each n-gram
    ("tasks", "<u2"),  # of each item, the number of its task
    ("places", "<u8"),  # of each item, the byte of its line in the file of items
    ("counts", "<u4"),  # of each item, its different n-grams
)


@dataclass(frozen=True)
class NgramIndex:
    """An index, mapped.

    Attributes:
        path: of the file.
        hash: xxh3 of its content.
        about: settings and `tasks` (names by number).
        arrays: by their names in `_ARRAYS`.
    """

    path: Path
    hash: str
    about: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays["hashes"])

    @property
    def prefix(self) -> int:
        """First words of an n-gram that have a bit."""
        return min(SHORTEST, int(self.about["words"]))

    @cached_property
    def ngram_lengths(self) -> npt.NDArray[np.int64]:
        """Words of n-grams, ascending: int64 of shape (lengths,)."""
        return np.unique(self.arrays["lengths"]).astype(np.int64)

    @property
    def task_names(self) -> list[str]:
        """Names of tasks and files by number."""
        return list(self.about["tasks"])

    def items_of(self, ngram: int) -> npt.NDArray[np.uint32]:
        """Numbers of the items that have an n-gram."""
        start, end = self.arrays["offsets"][ngram : ngram + 2].tolist()
        return np.array(self.arrays["items"][start:end])

    def item(self, number: int) -> EvalItem:
        """An item, out of the file of items."""
        return item_at(self.path.with_name(ITEMS_FILE), int(self.arrays["places"][number]))

    def ngram_text(self, ngram: int) -> str:
        """An n-gram as its first item has it."""
        text = self.item(int(self.items_of(ngram)[0])).text
        start, length = int(self.arrays["words"][ngram]), int(self.arrays["lengths"][ngram])
        words = find_words(text)[start : start + length]
        return text[words[0].start : words[-1].end]


def prepare_index(config: DecontaminateConfig, folder: Path) -> Path:
    """Write items and index of a run file, if they are not there yet; returns the path of the index.

    Args:
        config: of the run file.
        folder: of both files, and of the items of tasks.

    Raises:
        UserError: a task or file has no items, or none can be looked for.
    """
    items = folder / ITEMS_FILE
    write_items(items, all_items(config, folder))
    path = folder / INDEX_FILE
    if path.is_file():
        try:
            before = open_index(path)
        except UserError:  # damaged; it is written anew
            pass
        else:
            if before.about["items_hash"] == f"{file_hash(items):016x}" and before.about["words"] == config.words:
                return path
    build_index(items, config.words, path)
    return path


def index_settings(config: DecontaminateConfig, path: Path) -> dict[str, Any]:
    """Settings that hits depend on, as JSON: the content of the index has the items in it."""
    return {**word_settings(), "ngram": config.words, "index": open_index(path).hash}


def build_index(items: Path, words: int, path: Path) -> None:
    """Write the index of a file of items.

    Raises:
        UserError: no item is long enough.
    """
    rows, about = _collect(items, words)
    if not len(rows):
        raise UserError(
            f"{KEY}: none of the {about['items']:,} items has {min(SHORTEST, words)} words or more, so nothing can be "
            "looked for; name other tasks or files, or remove the section"
        )
    tasks, places = about.pop("item_tasks"), about.pop("item_places")
    rows = rows[np.lexsort((rows["word"], rows["item"], rows["hash"]))]
    new = np.append(True, (rows["hash"][1:] != rows["hash"][:-1]) | (rows["item"][1:] != rows["item"][:-1]))
    rows = rows[new]
    first = np.flatnonzero(np.append(True, rows["hash"][1:] != rows["hash"][:-1]))
    arrays = {
        "hashes": rows["hash"][first],
        "bitmap": _bitmap(rows["prefix"][first]),
        "offsets": np.append(first, len(rows)),
        "items": rows["item"],
        "words": rows["word"][first],
        "lengths": rows["length"][first],
        "tasks": tasks,
        "places": places,
        "counts": np.bincount(rows["item"], minlength=len(tasks)),
    }
    _write(path, about, {name: np.ascontiguousarray(arrays[name].astype(kind)) for name, kind in _ARRAYS})


_ROW = np.dtype([("hash", "<u8"), ("prefix", "<u8"), ("item", "<u4"), ("word", "<u4"), ("length", "<u1")])


def _collect(items: Path, words: int) -> tuple[npt.NDArray[Any], dict[str, Any]]:
    """(records of all n-grams of all items, settings)."""
    names: dict[str, int] = {}
    tasks, places, found = [], [], [np.zeros(0, _ROW)]
    texts: list[str] = []
    for place, item in read_items(items):
        tasks.append(names.setdefault(item.task, len(names)))
        places.append(place)
        texts.append(item.text)
        if len(texts) == _ITEMS_AT_ONCE:
            found += _rows(texts, len(tasks) - len(texts), words)
            texts = []
    found += _rows(texts, len(tasks) - len(texts), words)
    about = {"words": words, "items": len(tasks), "tasks": list(names), "items_hash": f"{file_hash(items):016x}"}
    about |= word_settings()
    return np.concatenate(found), {**about, "item_tasks": np.array(tasks), "item_places": np.array(places)}


def _rows(texts: Sequence[str], first: int, words: int) -> list[npt.NDArray[Any]]:
    """Records of the n-grams of items, of which `first` is the number of the first one."""
    pieces = [(number, piece) for number, text in enumerate(texts, first) for piece in text.split(PIECE)]
    hashes, starts = word_hashes([piece for _, piece in pieces])
    shortest = min(SHORTEST, words)
    found = []
    item_start, item = 0, first
    for (number, _), start, end in zip(pieces, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if number != item:
            item, item_start = number, start
        length = min(words, end - start)
        if length < shortest:
            continue
        ngrams = ngram_hashes(hashes[start:end], length)
        rows = np.zeros(len(ngrams), _ROW)
        rows["hash"], rows["item"], rows["length"] = ngrams, number, length
        rows["word"] = np.arange(len(ngrams)) + (start - item_start)
        rows["prefix"] = ngram_hashes(hashes[start:end], shortest)[: len(ngrams)]
        found.append(rows)
    return found


def _bitmap(prefixes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    bits = min(max((len(prefixes) * _BITS_PER_NGRAM).bit_length(), _MIN_BITS), _MAX_BITS)
    found = np.zeros(2 ** (bits - 3), np.uint8)
    slots = prefixes >> np.uint64(64 - bits)
    np.bitwise_or.at(found, slots >> np.uint64(3), np.uint8(1) << (slots & np.uint64(7)).astype(np.uint8))
    return found


def _write(path: Path, about: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
    about = about | {"arrays": {name: len(arrays[name]) for name, _ in _ARRAYS}}
    head = orjson.dumps(about, option=orjson.OPT_SORT_KEYS)
    with HashedFile(path) as file:
        for data in (_MAGIC + len(head).to_bytes(8, "little") + head, *(arrays[name].tobytes() for name, _ in _ARRAYS)):
            file.write(data + bytes(-len(data) % _ALIGNED))
        file.write(file.hash.to_bytes(8, "little"))
        file.commit()


def open_index(path: Path) -> NgramIndex:
    """Map an index.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    try:
        with storage.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = map_file(file.fileno(), size) if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; `pipeline curate RUN.yaml` writes it") from error
    content, end = data[:-8], data[-8:].tobytes()
    hashed = xxhash.xxh3_64_intdigest(content.data)
    if size < _ALIGNED or hashed.to_bytes(8, "little") != end or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise UserError(f"{path} is damaged; remove it, and `pipeline curate RUN.yaml` writes it anew")
    at = len(_MAGIC) + 8
    length = int.from_bytes(content[len(_MAGIC) : at].tobytes(), "little")
    about = orjson.loads(content[at : at + length].tobytes())
    at += length
    arrays = {}
    for name, kind in _ARRAYS:
        at += -at % _ALIGNED
        nbytes = about["arrays"][name] * np.dtype(kind).itemsize
        arrays[name] = content[at : at + nbytes].view(kind)
        at += nbytes
    return NgramIndex(path, f"{hashed:016x}", about, arrays)


def unchecked_items(index: NgramIndex) -> npt.NDArray[np.int64]:
    """Numbers of the items that are too short to look for."""
    return np.flatnonzero(index.arrays["counts"] == 0)
