"""Objectives from the run file: what fits a model and a tokenizer, by phase and source; and what is refused."""

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.objective import ObjectiveConfig
from pipeline.data.datasets.manifest import TokenizerInfo
from pipeline.data.loading.objectives.base import sample_key
from pipeline.data.loading.objectives.choice import OBJECTIVES, check_objectives, make_objective, uses
from pipeline.data.loading.stream_shape import padding_share, stream_shape
from tests.data.runs import make_config

SPECIAL = {"[MASK]": 5, **{f"<extra_id_{n}>": 299 - n for n in range(20)}, "[S2S]": 6, "<pad>": 7}
MODELS = {"masked": {"direction": "both"}, "spans": {"encoder": {"layers": 1}}, "ul2": {"encoder": {"layers": 1}}}


def info(**special):
    return TokenizerInfo(
        fingerprint="f",
        vocab_size=300,
        end_of_document=4,
        end_of_document_token="<|end|>",
        special_tokens=special or SPECIAL,
    )


def config_of(root, objective, *, length=64, model=None, **keys):
    values = make_config(root, [{"name": name, "paths": [str(root / "*.txt")]} for name in ("s", "t")]).model_dump(
        mode="json"
    )
    values["train"] |= {"objective": objective, "sequence_length": length}
    values["model"] |= MODELS.get(objective.get("type"), {}) if model is None else model
    return Config.model_validate(values | keys)


@pytest.mark.parametrize(
    ("objective", "shape"),
    [
        ({"type": "masked"}, (64, 0, 64, 10)),
        ({"type": "masked", "rate": 0.4}, (64, 0, 64, 26)),
        ({"type": "prefix"}, (64, 0, 64, 64)),
        ({"type": "spans"}, (64, 58, 14, 14)),
        ({"type": "ul2", "denoisers": [{"rate": 0.15}, {"rate": 0.25, "mean_span": None}]}, (64, 59, 19, 19)),
    ],
)
def test_shapes(tmp_path, objective, shape):
    config = config_of(tmp_path, objective)
    made = make_objective(config, info())
    assert stream_shape(config.train.objective, 64) == made.shape(64)
    assert (made.shape(64).raw, made.shape(64).encoder, made.shape(64).decoder, made.shape(64).predicted) == shape


def test_random_ids_are_those_of_texts(tmp_path):
    made = make_objective(
        config_of(tmp_path, {"type": "masked", "rate": 1, "random_share": 1, "keep_share": 0}), info()
    )
    seen = np.concatenate([made.arrange(np.full(301, 9), np.array([0]), sample_key(1, n)).tokens for n in range(40)])
    assert set(seen.tolist()) == set(range(300)) - {4, *SPECIAL.values()}


def test_sentinels_go_by_their_names(tmp_path):
    """Ids of T5's count down."""
    for sentinels in ("<extra_id_{}>", [f"<extra_id_{n}>" for n in range(20)]):
        made = make_objective(
            config_of(tmp_path, {"type": "spans", "sentinels": sentinels, "start_token": "<pad>"}), info()
        )
        arranged = made.arrange(np.arange(10, 75), np.array([0]), 1)
        first = [token for token in arranged.tokens[:58].tolist() if token >= 280]
        assert first == [299, 298, 297] and arranged.tokens[58] == 7 and arranged.targets[-1] == 4


@pytest.mark.parametrize(
    ("objective", "keys", "message"),
    [
        ({"type": "masked", "rate": 0}, {}, r"rate: 0 predicts nothing"),
        ({"type": "spans", "rate": 1}, {}, r"rate: 1 leaves nothing to predict"),
        ({"type": "spans", "rate": 0}, {}, r"rate: 0 leaves nothing to predict"),
        ({"type": "spans", "mean_span": 0.5}, {}, r"mean_span"),
        ({"type": "spans", "sentinels": "<s>"}, {}, r"sentinels: '<s>' needs one \{\}"),
        ({"type": "fim", "sentinels": ["a", "b"]}, {}, r"`type: fim` needs a list of three"),
        ({"type": "masked", "random_share": 0.7, "keep_share": 0.5}, {}, r"random_share 0.7 and keep_share 0.5"),
        ({"type": "ul2", "denoisers": [{"rate": 1}]}, {}, r"denoisers"),
        ({"type": "masked"}, {"model": {}}, r"train.objective.type: masked needs model.direction: both"),
        (
            {},
            {"model": {"direction": "both"}},
            r"causal needs model.direction: causal, .* train.objective.type: masked",
        ),
        ({"type": "spans"}, {"model": {}}, r"train.objective.type: spans trains an encoder .* model.encoder.layers"),
        ({}, {"model": {"encoder": {"layers": 1}}}, r"train.objective.type: causal has no text for model.encoder"),
        ({"by_source": {"u": {}}}, {}, r"by_source.u: 'u' is not one of data.sources \(s, t\)"),
        ({"by_source": {"s": {"type": "masked"}}}, {}, r"train.objective.by_source.s.type: masked needs"),
        (
            {"type": "masked"},
            {"eval": {"stride": 8, "split": "heldout"}},
            r"eval.stride does not go with train.objective.type: masked",
        ),
    ],
)
def test_what_the_run_file_may_not_say(tmp_path, objective, keys, message):
    with pytest.raises(ValidationError, match=message):
        config_of(tmp_path, objective, **keys)


@pytest.mark.parametrize(
    ("objective", "length", "special", "message"),
    [
        (
            {"type": "masked"},
            64,
            {"x": 1},
            r"train.objective.mask_token: '\[MASK\]' is not a special token .* it has 'x'.*, since [^;]*$",
        ),
        ({"type": "masked"}, 64, {}, r"tokenizer.special_tokens"),
        ({"type": "masked"}, 1, None, r"train.objective.rate: 0.15 of a window of 1 tokens is less than half a token"),
        ({"type": "masked"}, 3, None, r"of a window of 3 tokens"),
        ({"type": "spans"}, 1, None, r"train.objective.rate: a window of 1 tokens would have 1 tokens of noise"),
        (
            {"type": "spans"},
            512,
            None,
            r"has 26 spans, and the tokenizer has 20 of the 26 special tokens <extra_id_0> to",
        ),
        ({"type": "spans", "sentinels": ["[S2S]"]}, 64, None, r"has 3 spans, and here are 1 sentinels: name 3"),
        ({"type": "spans", "sentinels": "<{a}{}{0}"}, 64, None, r"of the 3 special tokens <\{a\}0\{0\} to"),
        (
            {"type": "spans", "start_token": "<extra_id_2>"},
            64,
            None,
            r"objective.start_token: '<extra_id_2>' is one of",
        ),
        (
            {"type": "ul2", "denoisers": [{"rate": 0.1}, {"rate": 0.1, "mode": "<extra_id_0>"}]},
            64,
            None,
            r"train.objective.denoisers.1.mode: '<extra_id_0>' is one of",
        ),
        ({"type": "spans", "sentinels": ["[S2S]"] * 3}, 64, None, r"sentinels.1: '\[S2S\]' is given twice"),
        ({"type": "spans", "rate": 0.6, "mean_span": 1}, 64, None, r"a window of 64 tokens would have 38 tokens"),
        (
            {"type": "spans", "start_token": "<s>"},
            64,
            None,
            r"train.objective.start_token: '<s>' is not a special token",
        ),
        ({"type": "ul2"}, 1, None, r"train.objective.denoisers.0.rate: a window of 1 tokens"),
        ({"type": "ul2", "denoisers": [{"rate": 0.1, "mode": "[NLU]"}]}, 64, None, r"denoisers.0.mode: '\[NLU\]'"),
    ],
)
def test_what_a_tokenizer_or_a_window_has_no_room_for(tmp_path, objective, length, special, message):
    special = {"<|none|>": 8} if special == {} else special or {}
    with pytest.raises(UserError, match=message):
        make_objective(config_of(tmp_path, objective, length=length), info(**special))


def test_weights_of_denoisers_may_be_huge(tmp_path):
    denoisers = [{"rate": 0.15, "weight": 1.5e308}, {"rate": 0.3, "weight": 1.5e308}]
    made = make_objective(config_of(tmp_path, {"type": "ul2", "denoisers": denoisers}), info())
    assert {made.which(sample_key(0, number)) for number in range(50)} == {0, 1}
    assert 0 < padding_share(ObjectiveConfig(type="ul2", denoisers=denoisers), 64) < 0.5


def test_a_token_that_is_missing_is_no_reason_for_an_objective_that_does_not_fit(tmp_path):
    for objective, fits in (({"type": "masked"}, False), ({"type": "fim"}, True)):
        with pytest.raises(UserError) as caught:
            make_objective(config_of(tmp_path, objective), info(x=1))
        assert ("type: causal" in str(caught.value)) == fits


class TestPhasesAndSources:
    def test_a_phase_may_have_its_own(self, tmp_path):
        phases = [
            {"until": "2 steps", "sequence_length": 32},
            {"objective": {"type": "spans", "rate": 0.3, "by_source": {"t": {"type": "spans", "rate": 0.3}}}},
        ]
        config = config_of(tmp_path, {"type": "spans"}, blend={"phases": phases})
        assert [(use.key, use.objective.share, use.length) for phase in (0, 1) for use in uses(config, phase)] == [
            ("train.objective", 0.15, 32),
            ("blend.phases.1.objective", 0.3, 64),
            ("blend.phases.1.objective.by_source.t", 0.3, 64),
        ]
        check_objectives(config, info(), tmp_path)

    def test_other_shapes_in_one_phase_are_refused(self, tmp_path):
        config = config_of(tmp_path, {"type": "spans", "by_source": {"t": {"type": "spans", "rate": 0.3}}})
        with pytest.raises(UserError, match=r"train.objective.by_source.t: makes windows of another shape .* 58 \+ 14"):
            check_objectives(config, info(), tmp_path)
        same = {"type": "masked", "by_source": {"t": {"type": "masked", "keep_share": 0}}}
        check_objectives(config_of(tmp_path, same), info(), tmp_path)

    def test_that_of_validation_is_checked_where_no_phase_has_it(self, tmp_path):
        """It is made with the first validation else, on the machine that trains."""
        spans = {"type": "spans"}
        phases = [{"until": "2 steps", "objective": spans}, {"objective": spans}]
        config = config_of(tmp_path, {**spans, "sentinels": ["<none>"] * 3}, blend={"phases": phases})
        with pytest.raises(UserError, match=r"train.objective.sentinels.0: '<none>' is not a special token"):
            check_objectives(config, info(), tmp_path)
        validation = config.train.validation.model_copy(update={"samples": 0})
        train = config.train.model_copy(update={"validation": validation})
        check_objectives(config.model_copy(update={"train": train}), info(), tmp_path)

    def test_all_types_can_be_made(self, tmp_path):
        for type in OBJECTIVES:
            objective = {"type": type} | ({"sentinels": list(SPECIAL)[:3]} if type == "fim" else {})
            objective |= {"denoisers": [{"rate": 0.2}]} if type == "ul2" else {}
            check_objectives(config_of(tmp_path, objective), info(), tmp_path)
