"""Engines against `tokenizers`, and the sample of documents against its definition."""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.common.hashing import mix
from pipeline.data.tokenization.engine_choice import FAST, choose_engine
from pipeline.data.tokenization.engines import (
    CHECK_MIN,
    CHECK_SHORT_BYTES,
    CHECK_TEXT_BYTES,
    Check,
    Encoded,
    EngineDiffers,
    first_difference,
    open_engine,
)
from tests.data.reference import mix_one
from tests.data.tokenization import broken_engine
from tests.data.tokenization import tokenizers_of_all_kinds as kinds

LONG = [" " * 10**6, "a" * 10**6, "\x00", "\x00" * 70_000, " \n" * 40_000 + "x", "漢" * 10**5]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return kinds.ours(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def long_runs(ours):
    return [np.array(ids) for ids in reference(ours, LONG)]


def reference(tokenizer, texts):
    """Ids by the library itself, as lists."""
    return [encoding.ids for encoding in tokenizer._engine.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("which", ["tokenizers", *FAST])
class TestEngine:
    @pytest.fixture
    def engine(self, which, ours):
        if which != "tokenizers":
            pytest.importorskip(which)
        return open_engine(ours, which)

    def test_a_batch_is_the_ids_of_every_text(self, engine, ours, which):
        texts = ["", "Hello  world\n", "<|endoftext|> <|sep|>", *kinds.TEXTS[:20], ""]
        ids, lengths = engine.encode(texts)
        expected = reference(ours, texts)
        assert ids.tolist() == [i for one in expected for i in one]
        assert lengths.tolist() == [len(one) for one in expected]
        assert (ids.dtype, lengths.dtype) == (ours.dtype, np.int64)
        assert ours.end_of_document not in ids
        assert engine.name.startswith(f"{which} ")

    @pytest.mark.parametrize("texts", [[], [""], ["", ""]])
    def test_nothing(self, engine, ours, texts):
        ids, lengths = engine.encode(texts)
        assert (ids.tolist(), lengths.tolist(), ids.dtype) == ([], [0] * len(texts), ours.dtype)

    @pytest.mark.first(2)
    def test_long_runs(self, engine, long_runs):
        ids, lengths = engine.encode(LONG)
        assert lengths.tolist() == [len(one) for one in long_runs]
        assert np.array_equal(ids, np.concatenate(long_runs))

    @pytest.mark.first(2)
    def test_large_vocabularies_are_int32(self, which, tmp_path):
        if which != "tokenizers":
            pytest.importorskip(which)
        engine = kinds.byte_level()
        engine.add_tokens([f"#{i}#" for i in range(65_600)])
        tokenizer = kinds.load(tmp_path, engine)
        ids, _ = open_engine(tokenizer, which).encode(["a #65599#"])
        assert ids.dtype == np.int32
        assert ids.tolist() == reference(tokenizer, ["a #65599#"])[0]
        assert ids[-1] > 65_599


class TestForeign:
    def test_an_id_outside_the_vocabulary_is_no_other_id(self, ours, tmp_path, monkeypatch):
        broken_engine.install(tmp_path, monkeypatch, "wraps")
        with pytest.raises(EngineDiffers, match=r"gigatoken 9.9 gives the id \d{5} of a vocabulary of 600 for 'many"):
            open_engine(ours, "gigatoken").encode(["a", "many more ids"])

    def test_a_panic_names_the_text(self, ours, tmp_path, monkeypatch):
        broken_engine.install(tmp_path, monkeypatch, "panics")
        with pytest.raises(EngineDiffers, match=r"failed on 'xxx.*' \(70,000 characters\): PanicException: stack"):
            open_engine(ours, "gigatoken").encode(["a", "x" * 70_000, "b"])

    @pytest.mark.parametrize("load", ["raise ValueError('no \\x1b such model')", "raise PanicException('no model')"])
    def test_what_cannot_be_loaded(self, ours, tmp_path, monkeypatch, load):
        broken_engine.install(tmp_path, monkeypatch, load=load)
        with pytest.raises(UserError, match="gigatoken 9.9 cannot load this tokenizer: no .*model.*auto or tokenizers"):
            open_engine(ours, "gigatoken")

    def test_not_installed(self, ours, monkeypatch):
        monkeypatch.setattr("sys.path", [tempfile.gettempdir()])
        with pytest.raises(UserError, match="gigatoken is not installed .pip install gigatoken."):
            open_engine(ours, "gigatoken")
        choice = choose_engine("auto", ours, Path("none"), set())
        assert choice.which == "tokenizers"
        assert "pip install gigatoken" in choice.why

    def test_an_error_travels_between_processes(self):
        error = EngineDiffers("fast 1.0", "differs", "a\x1bb", 7, 3)
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error) == "document a\\x1bb (record 7 of its unit): fast 1.0 differs"
        assert (copy.engine, copy.id, copy.row, copy.position) == ("fast 1.0", "a\x1bb", 7, 3)


@pytest.mark.slow
def test_memory_of_words_is_bounded():
    """Every word is new, and the library never forgets one: without a new start this takes 600 MB."""
    pytest.importorskip("gigatoken")
    code = """
import resource, sys, tempfile
from pathlib import Path
import numpy as np
from pipeline.data.tokenization.engines import open_engine
from tests.data.tokenization import tokenizers_of_all_kinds as kinds
engine = open_engine(kinds.ours(Path(tempfile.gettempdir())), "gigatoken")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chance = np.random.default_rng(0)
for _ in range(12):
    letters = chance.integers(97, 123, (engine.batch_bytes // 8, 8)).astype(np.uint8)
    letters[:, 0] = 32
    text = letters.tobytes().decode()
    engine.encode([text[i : i + 4000] for i in range(0, len(text), 4000)])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(found) < 280


class TestFirstDifference:
    @pytest.mark.parametrize(
        ("found", "position"), [([1, 2, 3], None), ([1, 2], 2), ([1, 2, 3, 4], 3), ([1, 9, 3], 1), ([], 0)]
    )
    def test_position(self, found, position):
        difference = first_difference("text", np.array([1, 2, 3]), np.array(found, int))
        assert (difference and difference[0]) == position

    def test_it_shows_text_and_ids(self):
        expected, found = np.arange(100), np.arange(100)
        found[50] = 7
        _, said = first_difference("a\x1b" + "b" * 500, expected, found)
        assert "'a\\x1bbbb" in said
        assert "(502 characters): [48, 49, 7, 51, 52, 53] instead of [48, 49, 50, 51, 52, 53] from id 48 on" in said
        assert len(said) < 400


@pytest.mark.parametrize("key", [0, 1, 2**63 + 5, 2**64 - 1])
def test_mix_is_the_published_one(key):
    rows = [0, 1, 2, 1000, 2**32, 2**63, 2**64 - 1]
    expected = [mix_one(row, key) for row in rows]
    assert mix(np.array(rows, np.uint64), key).tolist() == expected


def sample(rows, key, rate):
    """The smallest numbers: a share, and at least 64."""
    ranked = sorted(rows, key=lambda row: mix_one(row, key))
    return set(ranked[: max(CHECK_MIN, sum(mix_one(row, key) < rate * 2**64 for row in rows))])


def run(tokenizer, texts, key, rate, wrong=(), batch=1):
    """Check texts whose rows are their places; the row that was found to differ and the number compared."""
    engine = open_engine(tokenizer, "tokenizers")
    check = Check(tokenizer, key, rate, "fast 1.0")
    ids, lengths = engine.encode(texts)
    ids = ids.copy()
    ends = np.cumsum(lengths)
    ids[ends[list(wrong)] - 1] += 1
    try:
        for begin in range(0, len(texts), batch):
            end = min(len(texts), begin + batch)
            first = ends[begin] - lengths[begin]
            part = Encoded(ids[first : ends[end - 1]], lengths[begin:end])
            names = [f"d{row}" for row in range(begin, end)]
            check.add_batch(np.arange(begin, end, dtype=np.uint64), names, texts[begin:end], part)
        return None, check.finish()
    except EngineDiffers as error:
        assert error.id == f"d{error.row}"
        assert error.position == lengths[error.row] - 1
        return error.row, None


class TestCheck:
    @pytest.mark.parametrize("batch", [1, 7, 1000])
    @pytest.mark.parametrize(("documents", "rate"), [(0, 0.5), (10, 0.0), (300, 0.0), (300, 0.5), (300, 1.0)])
    def test_which_documents(self, ours, batch, documents, rate):
        texts = [f"text {i}" for i in range(documents)]
        key = 2**64 - 17
        expected = sample(range(documents), key, rate)
        assert run(ours, texts, key, rate, batch=batch) == (None, len(expected))
        for row in range(0, documents, 23):
            found, _ = run(ours, texts, key, rate, [row], batch)
            assert found == (row if row in expected else None)

    def test_long_texts_are_passed_over_and_not_counted(self, ours):
        longest, longer = "é" * (CHECK_TEXT_BYTES // 2 - 1), "é" * (CHECK_TEXT_BYTES // 2)
        texts = [longer, longest, *["word", longer] * 4, *["word"] * 90]
        assert run(ours, texts, 1, 0.0, batch=50) == (None, 64)
        assert run(ours, texts, 1, 1.0, [0, 3, 5, 7, 9], batch=50) == (None, 95)
        assert run(ours, texts, 1, 1.0, [1])[0] == 1

    @pytest.mark.guard
    def test_short_texts_fill_up_first(self, ours):
        """Rows 0 to 99 are short, the others are not; a share takes of both, what it lacks to 64 is short."""
        texts = [*["word"] * 100, *["word " * (CHECK_SHORT_BYTES // 5 + 1)] * 15]
        short, key = sample(range(100), 5, 0.0), 5
        assert run(ours, texts, key, 0.0, batch=9) == (None, 64)
        assert run(ours, texts, key, 0.0, range(100, 115), batch=9) == (None, 64)
        for row in range(0, 100, 7):
            assert run(ours, texts, key, 0.0, [row], batch=9)[0] == (row if row in short else None)
        shared = {row for row in range(115) if mix_one(row, key) < 0.2 * 2**64}
        assert 0 < len(shared) < 64
        for row in range(100, 115):
            assert run(ours, texts, key, 0.2, [row], batch=9)[0] == (row if row in shared else None)
        assert run(ours, texts[50:], key, 0.0, batch=9) == (None, 64)  # 50 short ones and 14 others

    def test_memory_is_bounded(self, ours):
        """What waits is compared as it comes, and no more than the least number is kept to the end."""
        check = Check(ours, 3, 0.5)
        text = "word " * 4000
        encoded = open_engine(ours, "tokenizers").encode([text])
        for row in range(400):
            check.add_batch(np.array([row], np.uint64), ["d"], [text], encoded)
            assert check._waiting_bytes + sum(len(entry[2]) for *_, entry in check._spare) < 2**19 + 64 * len(text)
        assert len(check._spare) <= 64

    @pytest.mark.first(2)
    @pytest.mark.parametrize("share", [1 / 1000, 1 / 20])
    def test_it_finds_what_the_formula_says(self, ours, share):
        """1 - (1 - p)^n, over keys; and every single time when a wrong document is in the sample."""
        documents, rate, keys = 2000, 0.1, 60
        texts = [f"{i}" for i in range(documents)]
        wrong = [row for row in range(documents) if mix_one(row, 99) < share * 2**64]
        found, expected = 0, []
        for key in range(keys):
            chosen = sample(range(documents), key * 7919, rate)
            row, _ = run(ours, texts, key * 7919, rate, wrong, batch=500)
            assert (row is not None) == bool(chosen & set(wrong))
            assert row is None or row in chosen
            found += row is not None
            expected.append(1 - (1 - len(wrong) / documents) ** len(chosen))
        deviation = np.sqrt(sum(p * (1 - p) for p in expected))
        assert abs(found - sum(expected)) <= 4 * deviation + 0.01
