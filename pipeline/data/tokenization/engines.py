"""Engines: what computes the ids that the `tokenizers` library defines, and how they are held to that.

Other libraries give the same ids many times faster, if they do. So one of them is used only where it agreed with
`tokenizers` on hard texts (`engine_check`), and a sample of the documents of every unit is compared as well.
"""

from __future__ import annotations

import heapq
import importlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers

from pipeline.common.errors import UserError
from pipeline.common.hashing import mix
from pipeline.data.sources.foreign_parser import parsing
from pipeline.data.sources.records import printable
from pipeline.data.tokenization.tokenizer import Tokenizer

EngineName = Literal["tokenizers", "gigatoken", "fastokens"]
KEY = "data.preprocess.engine: "
ADVICE = "; use engine: auto or tokenizers"


CACHE_BYTES = 2**27
"""gigatoken keeps every word it has seen, for ever: after growth by this much it is loaded again, which takes 0.1 s."""
CHECK_MIN = 64
"""At least this many documents of a unit are compared."""
CHECK_SHORT_BYTES = 2**14
"""Bytes; shorter documents fill up what a small unit lacks to that number, or the comparison would cost more than
all the rest."""
CHECK_TEXT_BYTES = 2**16
"""Only shorter texts are compared, which bounds memory and time."""
_CHECK_BATCH_BYTES = 2**18


_Encode = Callable[[bytes], npt.NDArray[np.uint32]]


class Encoded(NamedTuple):
    """Ids of a batch of texts, without end of document."""

    ids: npt.NDArray[Any]
    """Those of all texts, one after another, in the dtype of the tokenizer."""
    lengths: npt.NDArray[np.int64]
    """Ids of each text."""


class Engine(Protocol):
    """Encodes batches of texts in one thread."""

    name: str
    """Library and version: two that are not equal are two engines."""
    batch_bytes: int
    """UTF-8 bytes of a batch that is fast and does not take much memory."""
    batch_documents: int
    """Documents of such a batch."""

    def encode(self, texts: list[str], raw: list[bytes] | None = None) -> Encoded:
        """Encode a batch.

        Args:
            texts: the batch.
            raw: the texts in UTF-8, if the caller has them: an engine that takes bytes then makes none.

        Raises:
            EngineDiffers: it failed, or gave something else than ids of this vocabulary.
        """
        ...


class EngineDiffers(Exception):
    """An engine does not do what `tokenizers` does. It is not to be used any more, nor what it wrote.

    Attributes:
        engine: name of the engine.
        detail: what it did, with the text and the ids around the first difference where there is one.
        id: id of the document, if known.
        row: row of the document in its unit, if known.
        position: place of the first id that differs, if known.
    """

    def __init__(
        self, engine: str, detail: str, id: str | None = None, row: int | None = None, position: int | None = None
    ) -> None:
        super().__init__(engine, detail, id, row, position)
        self.engine, self.detail, self.id, self.row, self.position = engine, detail, id, row, position

    def __str__(self) -> str:
        document = "" if self.id is None else f"document {printable(self.id)} (record {self.row} of its unit): "
        return f"{document}{self.engine} {self.detail}"


class _Tokenizers:
    """The library that defines the ids. A batch is small, because it takes some hundred times its bytes."""

    batch_bytes = 2**19
    batch_documents = 1000

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = f"tokenizers {tokenizers.__version__}"
        self._tokenizer = tokenizer

    def encode(self, texts: list[str], raw: list[bytes] | None = None) -> Encoded:
        """Encode a batch. Errors are the text's, not the engine's: they are not turned into `EngineDiffers`."""
        return Encoded(*self._tokenizer.encode_flat(texts))


class _Foreign:
    """An engine of another library, behind a function from a text in UTF-8 to its ids as an array of uint32.

    One text at a time: that is within a few percent of their batch interfaces, starts no threads, and the ids of a
    batch are never held twice.
    """

    batch_bytes = 2**21
    batch_documents = 1000

    def __init__(self, name: str, tokenizer: Tokenizer, load: Callable[[], _Encode], may_grow: int | None) -> None:
        self.name = name
        self._library = name.partition(" ")[0]
        self._load = load
        self._encode = load()
        self._may_grow = may_grow
        self._begin_bytes = _resident_bytes()
        self._dtype = tokenizer.dtype
        self._vocab_size = tokenizer.vocab_size

    def encode(self, texts: list[str], raw: list[bytes] | None = None) -> Encoded:
        """Encode a batch."""
        arrays = []
        encode = self._encode
        try:
            with parsing(self._library):
                for each in raw or map(str.encode, texts):
                    arrays.append(encode(each))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            shown = _shown(texts[len(arrays)])
            raise EngineDiffers(self.name, f"failed on {shown}: {type(error).__name__}: {error}") from None
        if not arrays:
            return Encoded(np.empty(0, self._dtype), np.empty(0, np.int64))
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        ids = np.concatenate(arrays)
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            # Checked before it is stored in fewer bits, where it would become another id.
            text = next(t for t, found in zip(texts, arrays, strict=True) if len(found) and found.max() == largest)
            raise EngineDiffers(
                self.name, f"gives the id {largest} of a vocabulary of {self._vocab_size} for {_shown(text)}"
            )
        if self._may_grow is not None and _resident_bytes() > self._begin_bytes + self._may_grow:
            del self._encode  # before there is a second one
            self._encode = self._load()
            self._begin_bytes = _resident_bytes()
        return Encoded(ids.astype(self._dtype), lengths)


def open_engine(tokenizer: Tokenizer, which: EngineName) -> Engine:
    """Load an engine for a tokenizer. That it gives the same ids is for `choose_engine` and `Check` to find out.

    Raises:
        UserError: it is not installed, or cannot load this tokenizer.
    """
    if which == "tokenizers":
        return _Tokenizers(tokenizer)
    name = installed(which)
    if name is None:
        raise UserError(f"{KEY}{which} is not installed (pip install {which}){ADVICE}")
    # `tokenizers` finds those added tokens in a text that are not flagged as special; these libraries find all.
    definition = without_special(tokenizer.definition)
    try:
        if which == "gigatoken":
            return _Foreign(name, tokenizer, lambda: _gigatoken(definition), CACHE_BYTES)
        return _Foreign(name, tokenizer, lambda: _fastokens(definition), None)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        what = "be imported" if isinstance(error, ImportError) else "load this tokenizer"
        raise UserError(f"{KEY}{name} cannot {what}: {printable(str(error))[:300]}{ADVICE}") from None


def without_special(definition: str) -> str:
    """A `tokenizer.json` without the added tokens that are flagged as special."""
    name = '"added_tokens":'
    head, _, tail = definition.partition(name)
    try:
        # The library writes the key ahead of the model, which is so large that reading and writing it takes long.
        orjson.loads(f"{head}{name}null}}")  # or the name is not that of the key
        entries, end = json.JSONDecoder().raw_decode(tail)
    except ValueError:
        state = orjson.loads(definition)
        return orjson.dumps(state | {"added_tokens": _ordinary(state["added_tokens"])}).decode()
    return f"{head}{name}{orjson.dumps(_ordinary(entries)).decode()}{tail[end:]}"


def _ordinary(added_tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in added_tokens if not entry.get("special")]


def installed(which: EngineName) -> str | None:
    """Name and version of an engine's library; None if it is not installed."""
    try:
        return f"{which} {metadata.version(which)}"
    except metadata.PackageNotFoundError:
        return None


def _gigatoken(definition: str) -> _Encode:
    # The batch interface would import another array library, for a third of a second.
    library = importlib.import_module("gigatoken.gigatoken_rs")
    encode: _Encode = library.load_hf_json(definition).encode
    return encode


def _fastokens(definition: str) -> _Encode:
    # By default a long text is cut among threads, one a core, in every worker. Read at the first such text.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    encode = importlib.import_module("fastokens").Tokenizer.from_json_str(definition).encode_batch_flat
    return lambda text: np.frombuffer(encode([text.decode()])[0], "<u4")


class Check:
    """Compares a keyed sample of a unit's documents with `tokenizers`: which ones depends on key and row alone.

    The sample are the documents with the smallest keyed numbers: a fraction `rate` of the unit, and at least
    `CHECK_MIN`, of those with less than `CHECK_TEXT_BYTES`; where that is more than the fraction, those below
    `CHECK_SHORT_BYTES` come first. If a fraction p of the documents is wrong, n compared ones show it with probability
    1 - (1 - p)^n: 64 find 1 in 14 with 99 %, and 3,000 (1.5 million at the default rate) 1 in 1,000 with 95 %.

    Args:
        tokenizer: what defines the ids.
        key: of the sample.
        rate: fraction of the documents.
        engine: name of the engine, for the message.
    """

    def __init__(self, tokenizer: Tokenizer, key: int, rate: float, engine: str = "the engine") -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._engine = engine
        self._sampled_below = min(int(rate * 2**64), 2**64)
        self._limit = 2**64
        """Documents with a number from here on are not looked at."""
        self._sampled = self._taken = 0
        self._waiting: list[tuple[int, str, str, npt.NDArray[Any]]] = []
        self._waiting_bytes = 0
        self._spare: list[tuple[int, int, tuple[int, str, str, npt.NDArray[Any]]]] = []
        """Heap with the largest number on top: the smallest ones that are not in the fraction."""
        self._compared = 0

    def add_batch(self, rows: npt.NDArray[np.uint64], ids: Sequence[str], texts: Sequence[str], found: Encoded) -> None:
        """Offer a batch of documents and the token ids that they were given.

        Args:
            rows: of the documents in their unit.
            ids: of the documents.
            texts: of the documents.
            found: by the engine.

        Raises:
            EngineDiffers: a sampled document's token ids are not those of `tokenizers`.
        """
        numbers = mix(rows, self._key)
        places = np.arange(len(rows)) if self._limit == 2**64 else np.flatnonzero(numbers < np.uint64(self._limit))
        if not len(places):
            return
        ends = np.cumsum(found.lengths)
        for i in places.tolist():
            number = int(numbers[i])
            if number < self._limit:
                part = found.ids[ends[i] - found.lengths[i] : ends[i]]
                self._take(number, int(rows[i]), ids[i], texts[i], part)

    def finish(self) -> int:
        """Compare what waits; the number of documents compared in all.

        Raises:
            EngineDiffers: as in `add_batch`.
        """
        for _, _, entry in self._spare:
            self._wait(entry)
        self._spare = []
        self._compare()
        return self._compared

    def _take(self, number: int, row: int, id: str, text: str, ids: npt.NDArray[Any]) -> None:
        size = len(text) if len(text) >= CHECK_TEXT_BYTES else len(text.encode())
        if size >= CHECK_TEXT_BYTES:
            return
        entry = (row, id, text, ids.copy())  # the batch it is a part of goes away
        if number < self._sampled_below:
            self._sampled += 1
            self._wait(entry)
        else:
            self._taken += 1
            number += 2**64 if size >= CHECK_SHORT_BYTES else 0
            heapq.heappush(self._spare, (-number, self._taken, entry))
        while len(self._spare) > max(0, CHECK_MIN - self._sampled):
            heapq.heappop(self._spare)
        if self._sampled + len(self._spare) >= CHECK_MIN:
            self._limit = min(max(self._sampled_below, -self._spare[0][0] if self._spare else 0), 2**64)

    def _wait(self, entry: tuple[int, str, str, npt.NDArray[Any]]) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += len(entry[2])
        if self._waiting_bytes >= _CHECK_BATCH_BYTES:
            self._compare()

    def _compare(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        expected = Encoded(*self._tokenizer.encode_flat([text for _, _, text, _ in waiting]))
        begin = 0
        for (row, id, text, found), length in zip(waiting, expected.lengths.tolist(), strict=True):
            difference = first_difference(text, expected.ids[begin : begin + length], found)
            if difference is not None:
                raise EngineDiffers(self._engine, difference[1], id, row, difference[0])
            begin += length
        self._compared += len(waiting)


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system has no such file."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def first_difference(text: str, expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> tuple[int, str] | None:
    """First place where ids differ, and a sentence that shows it; None if they are equal."""
    if np.array_equal(expected, found):
        return None
    shared = min(len(expected), len(found))
    unequal = np.flatnonzero(expected[:shared] != found[:shared])
    position = int(unequal[0]) if len(unequal) else shared
    a = max(0, position - 2)
    return position, (
        f"differs from tokenizers at id {position} of {_shown(text)}: "
        f"{found[a : position + 4].tolist()} instead of {expected[a : position + 4].tolist()} from id {a} on"
    )


def _shown(text: str, most: int = 120) -> str:
    """The beginning of a text, for messages."""
    shown = printable(text[:most])[:most]
    return f"'{shown}'" + (f" ({len(text):,} characters)" if len(shown) < len(text) else "")
