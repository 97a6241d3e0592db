"""Prefix language modelling: what is in front, and what counts."""

from collections import Counter

import numpy as np
import pytest

from pipeline.data.loading.objectives.base import sample_key
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.prefix import Prefix
from tests.data.loading.objectives.windows import count_valid, window
from tests.data.reference import mix_one


@pytest.mark.parametrize("mask", [False, True])
def test_against_one_draw_at_a_time(mask):
    chance = np.random.default_rng(0)
    objective, causal = Prefix(mask_document_start=mask), Causal(mask_document_start=mask)
    for number in range(200):
        length = int(chance.choice([1, 2, 30, 100]))
        ids, begins = window(chance, length, float(chance.choice([1, 4, 20, 1e3])))
        key = sample_key(3, number)
        arranged, plain = objective.arrange(ids, begins, key), causal.arrange(ids, begins, key)
        assert arranged.tokens.tolist() == plain.tokens.tolist() and arranged.targets.tolist() == plain.targets.tolist()
        behind = {}
        for piece, (begin, end) in enumerate(zip(begins.tolist(), [*begins[1:].tolist(), length + 1], strict=True)):
            cut = begin + ((mix_one(piece, key) >> 32) * (end - begin) >> 32)
            behind |= dict.fromkeys(range(begin, end), cut)
        assert arranged.prefix.tolist() == [behind[p] for p in range(length)]
        expected = [plain.weight[p] * (p + 1 >= behind[p + 1]) for p in range(length)]
        assert arranged.weight.tolist() == expected
        assert count_valid(objective, begins, length, key) == sum(expected)


def test_each_length_of_a_prefix_is_as_likely():
    ids, begins = np.arange(10), np.array([0])
    found = Counter(int(Prefix().arrange(ids, begins, sample_key(1, n)).prefix[0]) for n in range(2000))
    assert set(found) == set(range(10))
    assert sum((count - 200) ** 2 / 200 for count in found.values()) < 27.9  # 9 degrees, one in a thousand
