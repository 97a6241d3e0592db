"""Coverage of texts by token ids, against counts by hand and by the `tokenizers` library."""

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.tokenization.coverage import Coverage, CoverageCounter, RoundTrip, covered, unknown_counts
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.tokenization.test_tokenizer import byte_vocabulary
from tests.data.tokenization.tokenizers_of_all_kinds import KINDS

END = "<|endoftext|>"
TEXT = "Hello  World naïve 漢字 {x}\n"


def load(tmp_path, engine):
    engine.add_special_tokens([END])
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    return Tokenizer.load(path, TokenizerConfig(path=path))


def byte_level(normalizer=None, added=()):
    engine = tokenizers.Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    if normalizer is not None:
        engine.normalizer = normalizer
    engine.add_tokens(list(added))
    return engine


def word_level(*words):
    engine = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<unk>", *words))}, "<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    return engine


def sample(tokenizer, *texts):
    counter = CoverageCounter(tokenizer)
    for number, text in enumerate(texts):
        counter.offer(f"d{number}", text)
    return counter.round_trip


class TestRoundTrip:
    def test_all_comes_back(self, tmp_path):
        assert sample(load(tmp_path, byte_level()), TEXT) == RoundTrip(
            documents=1, characters=len(TEXT), kept=len(TEXT)
        )

    @pytest.mark.parametrize(
        ("normalizer", "text", "lost"),
        [
            (normalizers.Lowercase(), "Hello World", 2),
            (normalizers.NFKC(), "ﬁne ²", 2),
            (normalizers.StripAccents(), "nai\u0308ve", 1),
            (normalizers.Strip(), "  a \n", 4),
            (normalizers.Replace("x", ""), "axbx", 2),
        ],
    )
    def test_normalizers(self, tmp_path, normalizer, text, lost):
        found = sample(load(tmp_path, byte_level(normalizer)), text)
        assert (found.characters - found.kept, found.uncovered, found.changed) == (lost, 0, 1)
        assert "d0" in found.example

    def test_added_tokens_that_strip(self, tmp_path):
        added = [AddedToken("<m>", lstrip=True, rstrip=True)]
        found = sample(load(tmp_path, byte_level(added=added)), "a   <m>  b")
        assert (found.characters - found.kept, found.uncovered) == (5, 0)

    def test_unknown_words(self, tmp_path):
        found = sample(load(tmp_path, word_level("a", "bc")), "a bc xyz w")
        assert found.uncovered == 4
        assert found.kept == len("a bc")
        assert "<unk>" in found.example

    def test_text_that_no_token_stands_for_and_no_unknown_token_counts(self, tmp_path):
        engine = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
        engine.decoder = decoders.Fuse()
        tokenizer = load(tmp_path, engine)
        assert (tokenizer.unknown, tokenizer.encode("axxb")) == (None, [0, 1])
        found = sample(tokenizer, "axxb")
        assert (found.uncovered, found.kept) == (2, 2)

    def test_one_unknown_token_for_many_characters(self, tmp_path):
        vocabulary = [("<unk>", 0.0), ("▁", -1.0), ("a", -1.0)]
        engine = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, False))
        engine.pre_tokenizer = pre_tokenizers.Metaspace()
        engine.decoder = decoders.Metaspace()
        tokenizer = load(tmp_path, engine)
        text = "a " * 50 + "漢" * 100
        assert tokenizer.unknown == 0
        assert np.count_nonzero(np.array(tokenizer.encode(text)) == 0) == 1
        assert sample(tokenizer, text).uncovered == 100

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
    def test_only_models_without_bytes_leave_text_uncovered(self, kind, tmp_path):
        found = sample(kind(tmp_path), TEXT)
        assert (found.uncovered > 0) == (kind.__name__ in ("unigram", "wordpiece"))

    def test_the_sample_reaches_to_the_last_documents(self, tmp_path):
        tokenizer = load(tmp_path, byte_level())
        assert sample(tokenizer, *["x"] * 1000).documents == 16
        assert sample(tokenizer, *["x"] * 3).documents == 3


class TestCounts:
    def test_unknown_ids_by_text(self):
        ids, lengths = np.array([7, 1, 7, 7, 2, 7]), np.array([0, 1, 3, 1, 1])
        assert unknown_counts(ids, lengths, 7) == {1: 1, 2: 2, 4: 1}
        assert unknown_counts(ids, lengths, 9) == {}
        assert unknown_counts(ids, lengths, None) == {}

    def test_sums(self):
        first = Coverage(10, 1, RoundTrip(documents=1, characters=20, kept=10, uncovered=4, example="first"))
        second = Coverage(30, 3, RoundTrip(documents=2, characters=20, kept=20, example="second"))
        both = covered([first, second])
        assert (both.tokens, both.unknown_tokens, both.unknown_share, both.lost_share) == (40, 4, 0.1, 0.25)
        assert both.round_trip is not None and both.round_trip.example == "first"

    def test_counts_of_earlier_versions_are_missing(self):
        both = covered([Coverage(10, 1), Coverage(10, None, None)])
        assert (both.unknown_tokens, both.round_trip, both.unknown_share, both.in_words) == (None, None, 0.0, "")

    def test_limit(self):
        coverage = Coverage(1000, 10)
        coverage.check("s", 0.01)
        with pytest.raises(UserError, match=r"1 % of 1,000 tokens .*data\.preprocess\.max_unknown"):
            coverage.check("s", 0.009)
