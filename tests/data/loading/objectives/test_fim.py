"""Objectives: the rearrangement of fill-in-the-middle against an inverse that only knows the sentinels."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config.objective import ObjectiveConfig
from pipeline.data.datasets.manifest import TokenizerInfo
from pipeline.data.loading.objectives.base import sample_key
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.loading.objectives.choice import OBJECTIVES, make_objective
from pipeline.data.loading.objectives.fim import FillInTheMiddle
from tests.data.reference import mix_one
from tests.data.runs import make_config

PRE, SUF, MID, END = 1, 2, 3, 0
FIRST = 10


def bounds_of(lengths):
    starts = np.cumsum([0, *lengths[:-1]])
    return np.repeat(starts, lengths)


def begins_of(bounds):
    return np.flatnonzero(bounds == np.arange(len(bounds)))


def text_of(lengths, ends):
    """Ids of pieces of these lengths, all different; the pieces in `ends` have END as their last."""
    ids = np.arange(FIRST, FIRST + sum(lengths), dtype=np.int64)
    for piece, last in enumerate(np.cumsum(lengths) - 1):
        if piece in ends:
            ids[last] = END
    return ids


def fim(rate=1.0, spm_rate=0.5, **options):
    return FillInTheMiddle(rate, spm_rate, (PRE, SUF, MID), END, **options)


def rearranged(objective, ids, bounds, key):
    if len(ids) == 1:  # of no window: it has no target
        return ids.tolist()
    arranged = objective.arrange(ids, begins_of(bounds), key)
    assert arranged.tokens[1:].tolist() == arranged.targets[:-1].tolist()
    return [*arranged.tokens.tolist(), int(arranged.targets[-1])]


def undo(piece):
    """What stands behind PRE, MID and SUF in a rearranged piece without its END."""
    assert [piece.count(sentinel) for sentinel in (PRE, SUF, MID)] == [1, 1, 1]
    assert piece[0] == PRE
    suffix_at, middle_at = piece.index(SUF), piece.index(MID)
    assert 0 < suffix_at < middle_at
    prefix, suffix, rest = piece[1:suffix_at], piece[suffix_at + 1 : middle_at], piece[middle_at + 1 :]
    return prefix, rest, suffix


@pytest.mark.parametrize(("spm_rate", "order"), [(0.0, "PSM"), (1.0, "SPM")])
def test_the_inverse_gives_the_piece_without_its_first_three_tokens(spm_rate, order):
    chance = np.random.default_rng(0)
    seen_prefix = False
    for key in range(300):
        lengths = chance.integers(1, 40, size=chance.integers(1, 6)).tolist()
        ends = set(range(len(lengths) - 1)) | ({len(lengths) - 1} if key % 2 else set())
        ids, bounds = text_of(lengths, ends), bounds_of(lengths)
        result = rearranged(fim(spm_rate=spm_rate), ids, bounds, sample_key(7, key))
        assert len(result) == len(ids)
        first = 0
        for number, length in enumerate(lengths):
            old, new = ids[first : first + length].tolist(), result[first : first + length]
            first += length
            if number in ends:
                assert new[-1] == END
                old, new = old[:-1], new[:-1]
            if len(old) < 6:
                assert new == old
                continue
            prefix, rest, suffix = undo(new)
            assert prefix + rest + suffix == old[3:]
            seen_prefix |= bool(prefix)
    assert seen_prefix == (order == "PSM")  # in SPM, variant 2, the prefix stands behind the middle's sentinel


def test_rates():
    lengths = [20] * 50
    ids, bounds = text_of(lengths, range(50)), bounds_of(lengths)
    kinds = Counter()
    for key in range(200):
        result = rearranged(fim(0.3, 0.8), ids, bounds, sample_key(1, key))
        for first in range(0, len(ids), 20):
            piece = result[first : first + 20]
            if piece[0] != PRE:
                kinds["as it was"] += 1
                continue
            prefix, *_ = undo(piece[:-1])
            kinds["PSM or SPM" if not prefix else "PSM"] += 1
    # 10,000 pieces. A PSM with an empty prefix looks like an SPM with an empty one: of 17 places both cuts are not 0.
    prefixed = 0.2 * (1 - 1 / 17) ** 2
    for kind, share in (("as it was", 0.7), ("PSM", 0.3 * prefixed)):
        sigma = (10_000 * share * (1 - share)) ** 0.5
        assert abs(kinds[kind] - 10_000 * share) < 4 * sigma, kinds
    assert rearranged(fim(0.0), ids, bounds, 5) == ids.tolist()


def test_every_pair_of_cuts_is_as_likely():
    """Two cuts, each uniform over the 5 places of 4 tokens: unordered pairs have 2/25, equal ones 1/25."""
    ids, bounds = text_of([7], ()), bounds_of([7])
    found = Counter()
    for key in range(5_000):
        prefix, middle, _ = undo(rearranged(fim(spm_rate=0.0), ids, bounds, sample_key(3, key)))
        found[len(prefix), len(prefix) + len(middle)] += 1
    assert set(found) == {(low, high) for low in range(5) for high in range(low, 5)}
    expected = {cut: 5_000 * (1 if cut[0] == cut[1] else 2) / 25 for cut in found}
    chi_square = sum((found[cut] - expected[cut]) ** 2 / expected[cut] for cut in found)
    assert chi_square < 36.1  # 14 degrees of freedom, one in a thousand


def test_a_piece_does_not_depend_on_the_text_of_others():
    """Nor on where others end: its number, its length and the key decide."""
    key = sample_key(0, 0)
    one = rearranged(fim(0.7), text_of([9, 30, 12], {0, 1}), bounds_of([9, 30, 12]), key)
    other_text = text_of([9, 30, 12], {0, 1})
    other_text[:9], other_text[39:] = END, 5000
    two = rearranged(fim(0.7), other_text, bounds_of([9, 30, 12]), key)
    assert one[9:39] == two[9:39]
    longer = text_of([17, 30, 2], {0, 1})
    longer[17:47] = text_of([9, 30, 12], {0, 1})[9:39]
    three = rearranged(fim(0.7), longer, bounds_of([17, 30, 2]), key)
    assert one[9:39] == three[17:47]


def test_against_one_draw_at_a_time():
    """The same with Python integers: four numbers a piece, mix_one(4 piece + draw, key)."""
    lengths = [13, 40, 5, 26, 31]
    ids, bounds = text_of(lengths, {0, 1, 2, 3}), bounds_of(lengths)
    for index in range(100):
        key = sample_key(11, index)
        expected, first = ids.tolist(), 0
        for piece, length in enumerate(lengths):
            whether, order, *cuts = (mix_one(4 * piece + draw, key) for draw in range(4))
            text = expected[first : first + length]
            end = [text.pop()] if text[-1] == END else []
            if whether / 2**64 < 0.6 and len(text) >= 6:
                low, high = sorted(cut * (len(text) - 2) // 2**64 for cut in cuts)
                prefix, middle, suffix = text[3:][:low], text[3:][low:high], text[3:][high:]
                spm, psm = [PRE, SUF, *suffix, MID, *prefix, *middle], [PRE, *prefix, SUF, *suffix, MID, *middle]
                text = spm if order / 2**64 < 0.25 else psm
            expected[first : first + length] = text + end
            first += length
        assert rearranged(fim(0.6, 0.25), ids, bounds, key) == expected


def test_golden():
    """What a run was trained on must never change."""
    ids, bounds = text_of([9, 10, 5], {0, 1}), bounds_of([9, 10, 5])
    golden = [
        [1, 2, 3, 13, 14, 15, 16, 17, 0, 1, 2, 3, 22, 23, 24, 25, 26, 27, 0, 29, 30, 31, 32, 33],
        [1, 13, 14, 15, 16, 2, 3, 17, 0, 1, 22, 23, 2, 27, 3, 24, 25, 26, 0, 29, 30, 31, 32, 33],
    ]
    assert [rearranged(fim(), ids, bounds, sample_key(1234, index)) for index in (0, 1)] == golden


def test_weights_are_those_of_the_bounds():
    bounds = bounds_of([3, 1, 4])
    begins, ids = begins_of(bounds), text_of([3, 1, 4], {0, 1})
    assert fim().weight(begins, 7).tolist() == Causal().weight(begins, 7).tolist() == [1] * 7
    masked = fim(mask_document_start=True)
    assert masked.fixed_valid(7) is None and fim().fixed_valid(7) == 7
    assert masked.arrange(ids, begins, 5).weight.tolist() == [1, 1, 0, 0, 1, 1, 1]
    assert masked.valid(begins, np.array([0, 3]), 7, int).tolist() == [5]


def test_causal_leaves_tokens_alone():
    ids = text_of([8], ())
    assert rearranged(Causal(), ids, bounds_of([8]), 3) == ids.tolist()
    assert fim().arranges and not Causal().arranges


SENTINELS = {"<|fim_prefix|>": 5, "<|fim_suffix|>": 6, "<|fim_middle|>": 7}


def info(**special):
    return TokenizerInfo(
        fingerprint="f", vocab_size=300, end_of_document=4, end_of_document_token="<|end|>", special_tokens=special
    )


def config_of(root, objective, **data):
    config = make_config(root, data.pop("sources", [{"name": "s", "paths": [str(root / "*.txt")]}]), **data)
    values = config.model_dump(mode="json")
    values["train"]["objective"] = objective
    return type(config).model_validate(values)


class TestMakeObjective:
    def test_the_config_lists_those_that_can_be_made(self):
        assert get_args(get_args(ObjectiveConfig.model_fields["type"].annotation)[0]) == tuple(OBJECTIVES)

    def test_causal(self, tmp_path):
        objective = make_objective(config_of(tmp_path, {}), info())
        assert type(objective) is Causal and objective.fixed_valid(9) == 9

    def test_fim(self, tmp_path):
        objective = make_objective(config_of(tmp_path, {"type": "fim", "rate": 1, "spm_rate": 0}), info(**SENTINELS))
        ids = np.arange(10, 20)
        ids[-1] = 4
        result = rearranged(objective, ids, bounds_of([10]), sample_key(0, 0))
        assert result[0] == 5 and result[-1] == 4
        assert {5, 6, 7} <= set(result)

    def test_mask(self, tmp_path):
        config = config_of(tmp_path, {"type": "fim"})
        masking = config.model_copy(
            update={"train": config.train.model_copy(update={"loss": SimpleNamespace(mask_document_start=True)})}
        )
        assert make_objective(masking, info(**SENTINELS)).fixed_valid(9) is None
        assert make_objective(config, info(**SENTINELS)).fixed_valid(9) == 9

    @pytest.mark.parametrize(
        ("data", "way"),
        [
            ({}, r"list them in tokenizer.special_tokens and run `pipeline preprocess` with another data.dir"),
            (
                {"tokenizer": {"path": "/t/tokenizer.json"}},
                r"remove the copy .* in .*/run/data/tokenizer",
            ),
            ({"sources": [{"name": "s", "dataset": "/d"}]}, r"`pipeline data adopt --special-token`"),
        ],
    )
    def test_missing(self, tmp_path, data, way):
        config = config_of(tmp_path, {"type": "fim"}, **data)
        with pytest.raises(UserError, match=way) as error:
            make_objective(config, info(**{"<|fim_prefix|>": 5, "<pad>": 9}))
        text = str(error.value)
        assert text.startswith("train.objective.sentinels.1: '<|fim_suffix|>' is not a special token")
        assert "it has '<|fim_prefix|>', '<pad>'." in text

    def test_twice(self, tmp_path):
        config = config_of(tmp_path, {"type": "fim", "sentinels": ["a", "b", "a"]})
        with pytest.raises(UserError, match=r"sentinels.2: 'a' is given twice"):
            make_objective(config, info(a=1, b=2))

    def test_what_a_text_may_contain(self, tmp_path):
        tokenizer = {
            "train": {"vocab_size": 400},
            "special_tokens": list(SENTINELS),
            "allow_special": ["<|fim_middle|>"],
        }
        with pytest.raises(UserError, match=r"sentinels.2: '<\|fim_middle\|>' is in tokenizer.allow_special"):
            make_objective(config_of(tmp_path, {"type": "fim"}, tokenizer=tokenizer), info(**SENTINELS))


def test_without_torch():
    module = "pipeline.data.loading.objectives.choice"
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'tokenizers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
