"""Masked language modelling: exact counts, what becomes of masked tokens, and one draw at a time."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from pipeline.common.errors import UserError
from pipeline.data.loading.objectives.base import sample_key
from pipeline.data.loading.objectives.masked import Masked
from pipeline.data.loading.objectives.words import WordTable, word_table
from tests.data.loading.objectives.windows import END, FIRST, count_valid, window
from tests.data.reference import mix_one

MASK = 7
ORDINARY = np.arange(20, 40)
STREAM = 2**40


def masked(rate=0.15, **options):
    return Masked(rate, MASK, ORDINARY, **options)


def test_counts_are_exact():
    chance = np.random.default_rng(0)
    for number in range(600):
        length, mean = int(chance.choice([1, 2, 7, 64, 500])), float(chance.choice([1, 2, 5, 100, 1e4]))
        rate = float(chance.choice([0.15, 0.3, 0.4, 0.5, 1.0]))
        objective, key = masked(rate), sample_key(1, number)
        ids, begins = window(chance, length, mean)
        arranged, shape = objective.arrange(ids, begins, key), objective.shape(length)
        ends = begins[1:] - 1
        expected = round(rate * (length - len(ends)))
        assert arranged.weight.sum() == count_valid(objective, begins, length, key) == expected
        assert not arranged.weight[ends].any() and set(arranged.weight.tolist()) <= {0, 1}
        assert arranged.targets.tolist() == ids[:length].tolist()
        assert arranged.tokens[arranged.weight == 0].tolist() == ids[:length][arranged.weight == 0].tolist()
        assert shape.predicted == len(arranged.predicted) == round(rate * length) and shape.length == length
        assert np.all(np.diff(arranged.predicted) > 0)
        assert set(np.flatnonzero(arranged.weight).tolist()) <= set(arranged.predicted.tolist())
        assert arranged.begins.tolist() == begins[begins < length].tolist()
        assert arranged.raw.tolist() == list(range(length))


def test_shares():
    """80 / 10 / 10, and each position as often as any other."""
    length, rounds = 200, 500
    ids, begins = np.arange(FIRST, FIRST + length + 1), np.array([0])
    kinds, positions, random = np.zeros(3), np.zeros(length), np.zeros(len(ORDINARY))
    for number in range(rounds):
        arranged = masked().arrange(ids, begins, sample_key(2, number))
        where = np.flatnonzero(arranged.weight)
        positions[where] += 1
        inputs = arranged.tokens[where]
        is_random = (inputs != MASK) & (inputs != arranged.targets[where])
        kinds += [np.sum(inputs == MASK), is_random.sum(), np.sum(inputs == arranged.targets[where])]
        np.add.at(random, inputs[is_random] - ORDINARY[0], 1)
    total = rounds * 30
    assert kinds.sum() == total
    assert np.all(np.abs(kinds / total - [0.8, 0.1, 0.1]) < 0.012)
    assert np.sum((positions - total / length) ** 2 / (total / length * 0.85)) < 271  # 199 degrees, one in a thousand
    assert np.sum((random - random.mean()) ** 2 / random.mean()) < 43.8  # 19 degrees of freedom


def test_against_one_draw_at_a_time():
    chance = np.random.default_rng(3)
    for key in range(60):
        ids, begins = window(chance, 50, 12)
        arranged = masked(0.3, random_share=0.2, keep_share=0.3).arrange(ids, begins, key)
        ends = {begin - 1 for begin in begins[1:].tolist()}
        bits = 6
        order = sorted((mix_one(p, key) >> bits, p) for p in range(50) if p not in ends)
        chosen = [position for _, position in order[: round(0.3 * (50 - len(ends)))]]
        expected = ids[:50].tolist()
        for position in chosen:
            how = mix_one(STREAM + position, key) / 2**64
            if how >= 0.5:
                expected[position] = MASK
            elif how >= 0.3:
                expected[position] = int(ORDINARY[(mix_one(2 * STREAM + position, key) >> 32) * 20 >> 32])
        assert arranged.tokens.tolist() == expected
        assert np.flatnonzero(arranged.weight).tolist() == sorted(chosen)


def test_golden():
    """What a run was trained on must never change."""
    ids, begins = np.arange(FIRST, FIRST + 25), np.array([0, 14])
    ids[13] = END
    arranged = masked(0.4).arrange(ids, begins, sample_key(1234, 0))
    golden = "1000 7 1002 7 7 1005 1006 1007 1008 1009 1010 7 1012 0 1014 7 32 1017 1018 7 1020 7 7 1023"
    assert " ".join(map(str, arranged.tokens.tolist())) == golden
    assert arranged.predicted.tolist() == [1, 3, 4, 5, 11, 15, 16, 19, 21, 22]


class TestWords:
    def test_words_are_masked_as_a_whole(self):
        """All but one of a window at most, of which the first tokens are."""
        chance = np.random.default_rng(5)
        continues = np.arange(3000) % 3 > 0  # words of three tokens by id
        table = WordTable(continues, np.ones(3000, np.bool_))
        for number in range(200):
            ids, begins = window(chance, 300, 40)
            arranged = masked(words=table).arrange(ids, begins, sample_key(6, number))
            ends = (begins[1:] - 1).tolist()
            assert arranged.weight.sum() == count_valid(masked(words=table), begins, 300, 0)
            assert not arranged.weight[ends].any()
            firsts = [p for p in range(300) if p in begins or p in ends or ids[p] % 3 == 0 or ids[p - 1] == END]
            cut = 0
            for one, two in zip(firsts, [*firsts[1:], 300], strict=True):
                weights = arranged.weight[one:two].tolist()
                assert weights == sorted(weights, reverse=True)
                cut += 0 < sum(weights) < len(weights)
            assert cut <= 1
        assert masked(words=table).reads and not masked().reads

    def test_wordpiece(self):
        library = Library(models.WordPiece({"[UNK]": 0, "un": 1, "##happy": 2, "!": 3, "##!": 4}, unk_token="[UNK]"))
        assert self.continuing(library) == {"##happy", "##!"}

    def test_byte_level(self):
        entries = ["!", "a", "Ġ", "Ġa", "b", "Ã", "Ċ", "Ġab", "ab"]
        library = Library(models.BPE({entry: n for n, entry in enumerate(entries)}, [("a", "b"), ("Ġ", "a")]))
        library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        assert self.continuing(library) == {"a", "b", "Ã", "ab"}
        table = self.table(library)
        assert [entries[n] for n in np.flatnonzero(~table.is_open)] == ["!", "Ġ", "Ċ"]
        ids = np.array([entries.index(token) for token in ("Ġa", "b", "!", "a", "Ċ", "b", "ab", "Ġab")])
        assert table.firsts(ids, np.array([0, 6]), np.array([5])).tolist() == [0, 2, 3, 4, 5, 6, 7]

    def test_sentencepiece(self):
        library = Library(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0), ("▁", -2.0), (",", -2.0)], 0))
        assert self.continuing(library) == {"b"}

    def test_a_vocabulary_that_does_not_tell(self):
        library = Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        with pytest.raises(UserError, match=r"whole_words: true: .* set train.objective.whole_words: false"):
            self.table(library)

    def table(self, library):
        class Opened:
            definition = library.to_str().encode()
            vocab_size = library.get_vocab_size()

        return word_table(Opened())

    def continuing(self, library):
        table = self.table(library)
        return {entry for entry, number in library.get_vocab().items() if table.continues[number]}
