"""Engines of signatures: the one that is used agrees with plain Python on hard texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.common.errors import MachineError
from pipeline.data.curate.batch import TextBatch
from pipeline.data.curate.duplicates.signature import reference_signature
from pipeline.data.curate.duplicates.signatures.numpy_engine import NumpySigner

_HARD = (
    "", " ", "word", "!?…", "a b c d e", "One two, three\tfour\nfive six", "x" * 300, "don't STOP_now 12:30 ٣٤٥ Ⅷ ½",
    "é e\u0301 ﬁn Straße İstanbul ΑΣσς Привет שָׁלוֹם مرحباً हिन्दी",
    "中文字と日本語です。カタカナ ภาษาไทย 한국어 각 mixed中英text",
    "soft\u00adhyphen zero\u200bwidth jo\u200din \U0001f600\U0001f469\u200d\U0001f469",
    "\U00020000\U000e0101 \ue000 \uffff",
    " ".join(f"w{number}" for number in range(900)), "字" * 1100, "a字b字" * 300, "\x00\x01\x7f\x85\u2028",
)  # fmt: skip


class Signer(Protocol):
    """Makes signatures."""

    def sign(self, batch: TextBatch) -> npt.NDArray[np.uint32]:
        """Signatures, uint32 of shape (documents, values); those of a text without words are all `NO_VALUE`."""

    def shingles(self, batch: TextBatch) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Hashes of the shingles of all documents, and where those of each begin, int64 of shape (documents + 1,)."""


def make_signer(engine: Literal["numba", "python"], size: int, values: int) -> Signer:
    """Signer of an engine, which has been compared with the definition in this process.

    Args:
        engine: `python` is NumPy.
        size: words of a shingle.
        values: of a signature.

    Raises:
        MachineError: it gives other values here.
    """
    signer: Signer
    if engine == "numba":
        from pipeline.data.curate.duplicates.signatures.numba_engine import NumbaSigner

        signer = NumbaSigner(size, values)
    else:
        signer = NumpySigner(size, values)
    expected = _reference(size, min(values, 16))
    found = signer.sign(text_batch(_HARD))[:, : expected.shape[1]]
    if not np.array_equal(found, expected):
        wrong = np.flatnonzero((found != expected).any(axis=1))[0]
        raise MachineError(
            f"engine {engine!r} gives another signature of {_HARD[wrong][:40]!r} than plain Python on this machine; "
            "set data.curate.engine to the other one of `numba` and `python`"
        )
    return signer


@functools.cache
def _reference(size: int, values: int) -> npt.NDArray[np.uint32]:
    return np.array([reference_signature(text, size, values) for text in _HARD], np.uint32)


def text_batch(texts: Sequence[str]) -> TextBatch:
    """Batch of texts alone."""
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    starts = np.append(0, np.cumsum([len(each) for each in raw], dtype=np.int64))
    data = np.frombuffer(b"".join(raw), np.uint8)
    rows = np.arange(len(raw), dtype=np.uint32)
    return TextBatch(data, starts, texts, rows, [""] * len(raw), [None] * len(raw))
