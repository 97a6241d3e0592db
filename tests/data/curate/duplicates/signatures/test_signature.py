"""Words, signatures and their engines against plain Python."""

from __future__ import annotations

import unicodedata
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import MachineError
from pipeline.data.curate.duplicates.normalize import folding_table, normalized, split_words, words
from pipeline.data.curate.duplicates.signature import (
    NO_VALUE,
    band_hashes,
    has_signature,
    permutations,
    reference_signature,
    signature_checks,
)
from pipeline.data.curate.duplicates.signatures import numpy_engine, signer
from pipeline.data.curate.duplicates.signatures.numpy_engine import NumpySigner
from pipeline.data.curate.duplicates.signatures.signer import Signer, make_signer, text_batch
from pipeline.data.tokenization.hard_texts import hard_texts
from tests.data.curate.duplicates.made import jaccard, near_copy
from tests.data.curate.duplicates.made import words as made_words

_NAMES: dict[str, Any] = {"special_tokens": [], "added_tokens": [], "allow_special": ()}
TOKENIZER = cast("Any", SimpleNamespace(**_NAMES, end_of_document_token="<|end|>"))
_TEXTS = st.text(st.one_of(st.characters(), st.sampled_from("ab 0é\u0301\u200b字ไ٣!\n\x00")), max_size=60)


def _engines() -> list[str]:
    pytest.importorskip("numba")
    return ["python", "numba"]


def _signers(size: int, values: int) -> list[Signer]:
    return [make_signer(cast("Any", engine), size, values) for engine in _engines()]


def test_words() -> None:
    assert words("Hello, WORLD! don't x_y 12.5") == ["hello", "world", "don", "t", "x", "y", "00", "0"]
    assert words("Élan E\u0301LAN \u00c9l\u00adan") == ["elan"] * 3
    assert words("Привет שָׁלוֹם ٣٤ ①") == ["привет", "שלום", "00", "①"]
    assert words("中文abc字 日本") == ["中", "文", "abc", "字", "日", "本"]
    assert words("ภาษา") == ["ภ", "า", "ษ", "า"]
    assert words("a\U0001f600b \ue000") == ["a", "b"]
    assert words("!? …\n") == []
    for form in ("NFC", "NFD"):
        assert words(unicodedata.normalize(form, "Crème Brûlée Ångström Ñandú")) == [
            "creme",
            "brulee",
            "angstrom",
            "nandu",
        ]


def test_definition_stays() -> None:
    # Signatures on disk are compared with those of later versions, and of other Pythons.
    assert xxhash.xxh3_64_hexdigest(folding_table().astype("<u4").tobytes()) == "693daab1b3b8cb76"
    signature = reference_signature("The quick brown fox jumps over the lazy dog 42 times; naïve 中文", 5, 8)
    assert signature == [61787810, 293180173, 719140411, 49174334, 270135856, 11009697, 336999450, 430098458]
    values = np.array([signature], np.uint32)
    assert band_hashes(values, 2).tolist() == [[16902438065918846416, 2544071766844812564]]
    assert signature_checks(values).tolist() == [1071905840]


def test_engines_equal_the_definition_on_hard_texts() -> None:
    texts = [text[:3000] for text in hard_texts(TOKENIZER, long=False)]
    few = [text for text in texts if len(text) < 400][::7] + texts[-12:]
    expected = np.array([reference_signature(text, 5, 24) for text in few], np.uint32)
    signers = _signers(5, 24)
    for each in signers:
        assert np.array_equal(each.sign(text_batch(few)), expected)
    # And each other on all of them, long runs too.
    found = [each.sign(text_batch(hard_texts(TOKENIZER, long=False))) for each in signers]
    assert np.array_equal(found[0], found[1])
    assert [split == words(text) for text, split in zip(texts, map(_split, texts), strict=True)] == [True] * len(texts)


def _split(text: str) -> list[str]:
    letters, starts, before = split_words([text])
    assert before.tolist() == [0, len(starts)]
    return ["".join(map(chr, part.tolist())) for part in np.split(letters, starts[1:])] if len(starts) else []


@given(texts=st.lists(_TEXTS, max_size=6), size=st.integers(1, 7))
@settings(max_examples=150)
def test_engines_equal_the_definition(texts: list[str], size: int) -> None:
    expected = np.array([reference_signature(text, size, 6) for text in texts], np.uint32).reshape(-1, 6)
    for each in _signers(size, 6):
        assert np.array_equal(each.sign(text_batch(texts)), expected)
    assert normalized(texts) == ["\0".join(words(text)).encode("utf-32-le", "surrogatepass") for text in texts]


def test_blocks_of_texts_and_of_shingles(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(made_words(rng, int(count))) for count in rng.integers(0, 300, 40)]
    expected = np.array([reference_signature(text, 3, 6) for text in texts], np.uint32)
    for block_bytes, shingles in ((1, 1), (100, 7), (5000, 64), (2**20, 2**20)):
        monkeypatch.setattr(numpy_engine, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(numpy_engine, "_BLOCK_SHINGLES", shingles)
        assert np.array_equal(NumpySigner(3, 6).sign(text_batch(texts)), expected)


def test_few_words_and_none() -> None:
    signatures = NumpySigner(5, 16).sign(text_batch(["a b", "A, b!", "a b c", "", "?!", "b a"]))
    assert has_signature(signatures).tolist() == [True, True, True, False, False, True]
    assert (signatures[3:5] == NO_VALUE).all()
    assert np.array_equal(signatures[0], signatures[1])
    assert not np.array_equal(signatures[0], signatures[2])
    assert not np.array_equal(signatures[0], signatures[5])
    assert len({tuple(row) for row in signatures[[0, 2, 5]].tolist()}) == 3


def test_fewer_values_are_the_first_of_more() -> None:
    batch = text_batch(["a b c d e f g h", "x y z"])
    assert np.array_equal(NumpySigner(5, 112).sign(batch)[:, :20], NumpySigner(5, 20).sign(batch))
    a, b = permutations(256)
    assert (a % 2 == 1).all()
    assert len(set(zip(a.tolist(), b.tolist(), strict=True))) == 256


def test_estimate_is_that_of_true_similarity() -> None:
    rng = np.random.default_rng(3)
    pairs = []
    for _ in range(300):
        one = made_words(rng, 200)
        pairs.append((one, near_copy(rng, one, int(rng.integers(0, 12)))))
    texts = [" ".join(text) for pair in pairs for text in pair]
    signatures = NumpySigner(5, 112).sign(text_batch(texts))
    estimates = (signatures[::2] == signatures[1::2]).mean(axis=1)
    errors = estimates - np.array([jaccard(*pair) for pair in pairs])
    assert abs(errors.mean()) < 0.006
    assert np.sqrt((errors**2).mean()) < 0.045


def test_checks_tell_every_changed_value() -> None:
    signatures = NumpySigner(5, 112).sign(text_batch(["some words of a text that has a signature"]))
    right = signature_checks(signatures)
    for place in range(112):
        for bit in range(32):
            other = signatures.copy()
            other[0, place] ^= np.uint32(1 << bit)
            assert signature_checks(other) != right


def test_an_engine_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(NumpySigner):
        def sign(self, batch: Any) -> Any:
            found = super().sign(batch)
            found[5, 0] += np.uint32(1)
            return found

    monkeypatch.setattr(signer, "NumpySigner", Wrong)
    with pytest.raises(MachineError, match=r"data\.curate\.engine"):
        make_signer("python", 5, 112)
