"""Span corruption: sizes, the way back to the text, and the distribution of lengths."""

from collections import Counter

import numpy as np
import pytest

from pipeline.config.objective import DenoiserConfig, ObjectiveConfig
from pipeline.data.loading.objectives.base import sample_key
from pipeline.data.loading.objectives.spans import SpanCorruption, Tokens, cut
from pipeline.data.loading.objectives.ul2 import MixtureOfDenoisers
from pipeline.data.loading.stream_shape import padding_share, stream_shape
from tests.data.loading.objectives.windows import END, FIRST, SENTINELS, START, count_valid, inverted, sides, window
from tests.data.reference import mix_one
from tests.tiers import first

TOKENS = Tokens(np.array(SENTINELS), START, END)
T5 = SpanCorruption(0.15, 3.0, TOKENS)
STREAM = 2**40


def test_the_sizes_are_those_of_t5():
    """As its `random_spans_helper` has them: 568 tokens become 512 and 114."""
    shape = T5.shape(568)
    assert (shape.raw, shape.encoder, shape.decoder, shape.length) == (568, 512, 114, 626)
    assert T5.shape(8192).encoder == 7374 and T5.shape(8192).decoder == 1640


def test_one_document_is_corrupted_as_by_t5():
    ids = np.arange(FIRST, FIRST + 569)
    arranged = T5.arrange(ids, np.array([0]), sample_key(1, 0))
    ((encoder, inputs, targets, weight),) = sides(arranged, 512)
    assert encoder[-1] == targets[-1] == END and inputs[0] == START
    assert len([token for token in targets if token in SENTINELS]) == 28
    assert len([token for token in targets if token >= FIRST]) == 85
    assert sum(weight) == len(weight) == 114
    assert encoder[-2] in SENTINELS  # tokens come first, and noise last


@pytest.mark.parametrize(("seed", "count"), first(1, [(0, 400), (1, 4000), (2, 4000)], rest="slow"))
def test_both_sides_give_the_text_back(seed, count):
    chance = np.random.default_rng(seed)
    several = 0
    for number in range(count):
        length, mean = int(chance.choice([4, 8, 16, 33, 64, 200, 568])), float(chance.choice([1, 1.5, 3, 10, 50, 1e3]))
        objective = T5 if length > 4 else SpanCorruption(0.3, 1.0, TOKENS)
        ids, begins = window(chance, length, mean)
        key = sample_key(seed, number)
        arranged, shape = objective.arrange(ids, begins, key), objective.shape(length)
        text = inverted(arranged, shape.encoder)
        assert text[:length] == ids[:length].tolist() and text[length:] in ([], [END])
        assert count_valid(objective, begins, length, key) == arranged.weight.sum() == shape.decoder
        pieces = int((arranged.begins < shape.encoder).sum())
        several += pieces > 1
        whole = [begin for begin in begins.tolist() if begin < length]
        if mean >= 50 and length >= 200:  # documents are joined only where there are too many
            assert pieces == len(whole)
            ends = {ids[begin - 1] for begin in begins[1:].tolist()}
            assert ends <= {END}
            for encoder, _, targets, _ in sides(arranged, shape.encoder)[:-1]:
                assert encoder[-1] == END and END not in targets[:-1]
        # Each target says which token of the window it is, or stands for.
        for target, raw in zip(arranged.targets.tolist(), arranged.raw.tolist(), strict=True):
            if target >= FIRST:
                assert ids[raw] == target
    assert several > count / 4


def test_noise_is_dealt_by_the_size_of_documents():
    ids, begins = np.arange(FIRST, FIRST + 569), np.array([0, 100, 104])
    ids[begins[1:] - 1] = END
    arranged = T5.arrange(ids, begins, 3)
    counts = [sum(token >= FIRST for token in targets) for _, _, targets, _ in sides(arranged, 512)]
    # 84 and not 85: three ends of the decoder in place of one. A document of four tokens may have none.
    assert sum(counts) == 84 and abs(counts[0] - 84 * 100 / 568) < 2 and counts[1] <= 1


def test_too_many_documents_are_joined():
    length = 568
    ids, begins = np.arange(FIRST, FIRST + length + 1), np.arange(0, length + 1, 2)
    ids[begins[1:] - 1] = END
    arranged = T5.arrange(ids, begins, 5)
    pieces = sides(arranged, 512)
    assert 1 < len(pieces) < len(begins) and inverted(arranged, 512)[:length] == ids[:length].tolist()
    assert all(sum(token >= FIRST for token in encoder) for encoder, _, _, _ in pieces)


def test_lengths_of_spans_are_those_of_t5():
    """Mean 3; a length of 1 with the share (K - 1) / (N - 1) of cutting N into K at random: 27 / 84 = 0.32."""
    found = Counter()
    for number in range(400):
        lengths = cut(np.array([85, 483]), np.array([28, 28]), sample_key(2, number))
        assert lengths[:28].sum() == 85 and lengths[28:].sum() == 483 and lengths.min() >= 1
        found.update(lengths[:28].tolist())
    total = sum(found.values())
    assert total == 400 * 28
    for size in (1, 2, 3):
        share, before = 1.0, 85 - 1
        # The first of 28 parts has `size` units if the next place, and none before it, is one of 27 cuts out of 84.
        for place in range(size - 1):
            share *= (before - place - 27) / (before - place)
        share *= 27 / (before - size + 1)
        assert abs(found[size] / total - share) < 0.015, size


def test_all_ways_to_cut_are_as_likely():
    found = Counter(tuple(cut(np.array([5, 4]), np.array([3, 2]), sample_key(9, n)).tolist()) for n in range(3600))
    assert len(found) == 6 * 3
    chi_square = sum((count - 200) ** 2 / 200 for count in found.values())
    assert chi_square < 40.8  # 17 degrees of freedom, one in a thousand


def test_cuts_against_one_draw_at_a_time():
    chance = np.random.default_rng(4)
    for key in range(200):
        totals = chance.integers(1, 30, chance.integers(1, 6))
        parts = np.array([chance.integers(1, total + 1) for total in totals.tolist()])
        places = [(group, unit) for group, total in enumerate(totals.tolist()) for unit in range(total - 1)]
        group_bits, place_bits = (max(1, (n - 1).bit_length()) for n in (len(totals), max(1, len(places))))
        drawn = [(mix_one(place, key) >> group_bits >> place_bits, place) for place in range(len(places))]
        expected = []
        for group, (total, count) in enumerate(zip(totals.tolist(), parts.tolist(), strict=True)):
            mine = sorted(each for each in drawn if places[each[1]][0] == group)[: count - 1]
            cuts = sorted(places[place][1] + 1 for _, place in mine)
            expected += np.diff([0, *cuts, total]).tolist()
        assert cut(totals, parts, key).tolist() == expected


def test_golden():
    """What a run was trained on must never change."""
    ids, begins = np.arange(FIRST, FIRST + 25), np.array([0, 14])
    ids[13] = END
    arranged = SpanCorruption(0.3, 2.0, TOKENS).arrange(ids, begins, sample_key(1234, 0))
    golden = (
        "1000 100 1003 1004 1005 1006 1007 1008 1009 1010 1011 101 0 1014 1015 1016 1017 100 1020 1021 1022 101 "
        "900 100 1001 1002 101 1012 900 100 1018 1019 101 1023"
    )
    assert " ".join(map(str, arranged.tokens.tolist())) == golden
    assert arranged.targets.tolist()[22:] == [100, 1001, 1002, 101, 1012, 0, 100, 1018, 1019, 101, 1023, 0]
    assert arranged.begins.tolist() == [0, 13, 22, 28]


class TestUl2:
    MODES = (801, 802, 803)
    DENOISERS = (
        DenoiserConfig(rate=0.15, mode="[NLU]"),
        DenoiserConfig(rate=0.5, mode="[NLG]"),
        DenoiserConfig(rate=0.25, mean_span=None, mode="[S2S]", weight=2),
    )
    CONFIG = ObjectiveConfig(type="ul2", denoisers=list(DENOISERS))

    @pytest.mark.parametrize(("seed", "count"), first(1, [(0, 300), (1, 4000)], rest="slow"))
    def test_both_sides_give_the_text_back(self, seed, count):
        chance = np.random.default_rng(seed)
        plain = MixtureOfDenoisers(ObjectiveConfig(type="ul2"), TOKENS, [None] * 7)
        mixture = MixtureOfDenoisers(self.CONFIG, TOKENS, self.MODES)
        for number in range(count):
            length, mean = int(chance.choice([160, 200, 568])), float(chance.choice([1, 1.5, 3, 10, 50, 1e3]))
            ids, begins = window(chance, length, mean)
            key = sample_key(seed, number)
            for objective, modes in ((plain, ()), (mixture, self.MODES[mixture.which(key) :][:1])):
                arranged, shape = objective.arrange(ids, begins, key), objective.shape(length)
                text = inverted(arranged, shape.encoder, modes)
                assert text[:length] == ids[:length].tolist() and text[length:] in ([], [END])
                assert count_valid(objective, begins, length, key) == arranged.weight.sum()

    def test_the_prefix_denoiser_predicts_the_end_of_each_document(self):
        objective = MixtureOfDenoisers(self.CONFIG, TOKENS, self.MODES)
        key = next(key for key in range(100) if objective.which(key) == 2)
        ids, begins = np.arange(FIRST, FIRST + 569), np.array([0, 300])
        ids[299] = END
        *pieces, padding = sides(objective.arrange(ids, begins, key), objective.shape(568).encoder)
        assert not any(padding[3])
        for (encoder, _, targets, _), last in zip(pieces, (FIRST + 298, FIRST + 567), strict=True):
            assert sum(token in SENTINELS for token in encoder) == 1 and encoder[-2] in SENTINELS
            assert targets[-2] == last and len(targets) > 30

    def test_weights_of_denoisers(self):
        objective = MixtureOfDenoisers(self.CONFIG, TOKENS, self.MODES)
        found = Counter(objective.which(sample_key(1, number)) for number in range(4000))
        assert [abs(found[number] / 4000 - share) < 0.03 for number, share in enumerate((0.25, 0.25, 0.5))] == [
            True
        ] * 3

    def test_padding(self):
        """With one denoiser there is none; with the paper's it is counted here from whole windows."""
        one = ObjectiveConfig(type="ul2", denoisers=[DenoiserConfig(rate=0.15)])
        assert stream_shape(one, 568) == T5.shape(568) and padding_share(one, 568) == 0
        alone = MixtureOfDenoisers(one, TOKENS, [None])
        ids = np.arange(FIRST, FIRST + 569)
        assert alone.fixed_valid(568) == 114
        for field, other in zip(alone.arrange(ids, np.array([0]), 7), T5.arrange(ids, np.array([0]), 7), strict=True):
            assert field is other is None or np.array_equal(field, other)
        config = ObjectiveConfig(type="ul2")
        every = MixtureOfDenoisers(config, TOKENS, [None] * 7)
        keys = [next(key for key in range(1000) if every.which(key) == number) for number in range(7)]
        padding = []
        for key in keys:
            arranged, shape = every.arrange(ids, np.array([0]), key), every.shape(568)
            enc, dec = (int(arranged.begins[1]), int(arranged.begins[3]) - shape.encoder)
            padding.append(1 - (enc + dec) / shape.length)
        assert abs(np.mean(padding) - padding_share(config, 568)) < 1e-9
