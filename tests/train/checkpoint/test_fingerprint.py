"""What a checkpoint is compared by does not change when a key is added."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pipeline.common.errors import UserError
from pipeline.config.layers.layer import RopeScalingConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import KINDS, ObjectiveConfig
from pipeline.train.checkpoint.fingerprint import (
    LATER_KEYS,
    NUMERICS_VERSION,
    compare,
    computing_differences,
    computing_keys,
    differences,
    model_fingerprint,
    numerics_version,
    objective_fingerprint,
)
from pipeline.train.model.decoder_spec import decoder_spec
from tests.tiny import write_run

FIRST = {
    *("layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "norm", "norm_eps", "mlp", "bias", "positions"),
    *("max_positions", "rope_theta", "rope_scaling", "qk_norm", "sliding_window", "document_attention"),
    *("tie_embeddings", "vocab_multiple", "logit_soft_cap", "init"),
}
"""Keys of `model:` that every checkpoint has."""
FIRST_OF_ROPE_SCALING = {
    *("type", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    "attention_factor",
}
"""Keys of `model.rope_scaling:` that every checkpoint has."""


def test_a_new_key_of_the_model_is_left_out_with_its_default(tmp_path: Path) -> None:
    added = {
        *(ModelConfig.model_fields.keys() - FIRST),
        *(f"rope_scaling.{key}" for key in RopeScalingConfig.model_fields.keys() - FIRST_OF_ROPE_SCALING),
    }
    assert added == set(LATER_KEYS), f"add {sorted(added - set(LATER_KEYS))} to LATER_KEYS, or no checkpoint resumes"
    config = load(write_run(tmp_path))
    assert model_fingerprint(config).keys() == FIRST
    assert model_fingerprint(config)["init"].keys() == {"scheme", "std", "mup_base_dim"}
    larger = load(tmp_path / "run.yaml", ["model.vocab_size=400"])
    assert model_fingerprint(larger) == {**model_fingerprint(config), "vocab_size": 400}


def test_a_model_may_be_written_in_several_ways() -> None:
    shape = {"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2}
    near, far = {"sliding_window": 8}, {"positions": "none"}
    whole = ModelConfig(**shape, pattern=["a", "b", "a"], kinds={"a": near, "b": far})
    short = ModelConfig(
        **shape | near, head_dim=8, pattern=["a", "b"], kinds={"a": {}, "b": far | {"sliding_window": None}}
    )
    other = ModelConfig(**shape | near, pattern=["a", "b"], kinds={"a": {}, "b": far})
    spec = decoder_spec(whole, 97, 64)
    found = [computing_keys(each.model_dump(mode="json"), spec) for each in (whole, short, other)]
    assert differences("model", found[0], found[1]) == []
    assert differences("model", found[0], found[2]) == [("model.kinds.b.sliding_window", None, 8)]


def test_kinds_may_have_other_names() -> None:
    shape = {"layers": 3, "dim": 32, "heads": 4}
    near, far = {"sliding_window": 8}, {"positions": "none"}
    usual = ModelConfig(**shape, pattern=["a", "b"], kinds={"a": near, "b": far})
    renamed = ModelConfig(**shape, pattern=["x", "b", "y"], kinds={"x": near, "b": far, "y": near})
    other = ModelConfig(**shape, pattern=["x", "b"], kinds={"x": {"sliding_window": 9}, "b": far})
    equal = ModelConfig(**shape | near)
    one_kind = ModelConfig(**shape, pattern=["a"], kinds={"a": near})
    spec = decoder_spec(usual, 97, 64)

    def found(old: ModelConfig, new: ModelConfig) -> list[str]:
        sections = (each.model_dump(mode="json") for each in (old, new))
        return [name for name, _, _ in computing_differences(*sections, spec)]

    assert found(usual, renamed) == found(equal, one_kind) == []
    assert found(usual, other) == ["model.kinds.a", "model.kinds.x", "model.pattern"]


def test_a_kind_may_write_out_what_it_has_from_the_model(tmp_path: Path) -> None:
    kinds = {
        "model.rope_theta": 500.0,
        "model.pattern": ["a", "b"],
        "model.kinds": {"a": {"sliding_window": 8}, "b": {}},
    }
    file = write_run(tmp_path, kinds)
    usual = model_fingerprint(load(file))
    written_out = ["model.kinds.b={sliding_window: null, rope_theta: 500, bias: none}", "model.kinds.a.rope_theta=500"]
    assert model_fingerprint(load(file, written_out)) == usual
    other = model_fingerprint(load(file, ["model.kinds.b.rope_theta=400"]))
    assert differences("model", usual, other) == [("model.kinds.b.rope_theta", None, 400.0)]


def test_keys_of_later_versions_count_with_their_defaults(tmp_path: Path) -> None:
    config = load(write_run(tmp_path))
    spec = decoder_spec(config.model, 97, 64)
    early, all_keys = model_fingerprint(config), config.model.model_dump(mode="json")
    assert differences("model", computing_keys(early, spec), computing_keys(all_keys, spec)) == []


def test_a_new_key_of_a_section_below_is_left_out_with_its_default(tmp_path: Path) -> None:
    file = write_run(tmp_path, {"model.rope_scaling": {"type": "yarn", "factor": 4}})
    usual = model_fingerprint(load(file))
    assert usual["rope_scaling"] == {
        **{"type": "yarn", "factor": 4.0, "original_max_positions": 8192, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    }, "what version 0.1 wrote"
    assert usual["rope_scaling"].keys() == FIRST_OF_ROPE_SCALING
    other = model_fingerprint(load(file, ["model.rope_scaling.truncate=false"]))
    assert other == {**usual, "rope_scaling": {**usual["rope_scaling"], "truncate": False}}
    assert model_fingerprint(load(file, ["model.rope_scaling=null"]))["rope_scaling"] is None


def test_dropout_is_compared_by_a_resume_and_not_where_weights_are_loaded(tmp_path: Path) -> None:
    usual, dropping = (model_fingerprint(load(write_run(tmp_path), [f"model.dropout={rate}"])) for rate in (0, 0.1))
    assert dropping == {**usual, "dropout": 0.1}
    spec = decoder_spec(load(tmp_path / "run.yaml").model, 300, 32)
    assert computing_keys(dropping, spec) == computing_keys(usual, spec)


def test_objectives_of_sources_and_phases_are_compared(tmp_path: Path) -> None:
    """With their defaults written out, so that a later default does not change what a run was trained on."""
    file = write_run(tmp_path)
    both = ["model.direction=both", "train.objective.type=masked"]
    masked = {"type": "masked", "rate": 0.15, "mask_token": "[MASK]", "random_share": 0.1, "keep_share": 0.1}
    masked["whole_words"] = False
    assert objective_fingerprint(load(file, both)) == masked
    of_sea = [*both, "train.objective.by_source.sea={type: masked, keep_share: 0}"]
    assert objective_fingerprint(load(file, of_sea)) == {**masked, "by_source": {"sea": {**masked, "keep_share": 0.0}}}
    phases = ["blend.phases=[{until: 2 steps}, {objective: {type: prefix}}]"]
    assert objective_fingerprint(load(file, phases)) == {"type": "causal", "phases": {"1": {"type": "prefix"}}}
    ul2 = objective_fingerprint(load(file, ["model.encoder.layers=1", "train.objective.type=ul2"]))
    assert len(ul2["denoisers"]) == 7 and ul2["sentinels"] == "<extra_id_{}>"
    spans = objective_fingerprint(load(file, ["model.encoder.layers=1", "train.objective.type=spans"]))
    with pytest.raises(UserError, match=r"train\.objective\.rate: 0\.15 -> 0\.2"):
        compare({"objective": spans}, {"objective": {**spans, "rate": 0.2}}, [])
    one, other = ({**spans, "phases": {"1": {**spans, "rate": rate}}} for rate in (0.3, 0.4))
    with pytest.raises(UserError, match=r"\n  blend\.phases\.1: none -> \{objective: \{type: spans, rate: 0\.3, "):
        compare({"objective": spans}, {"objective": one}, [])
    assert compare({"objective": one}, {"objective": other}, ["objective"]) == [
        "blend.phases.1.objective.rate: 0.3 -> 0.4"
    ]


def test_an_objective_is_compared_by_the_keys_that_it_reads(tmp_path: Path) -> None:
    assert tuple(KINDS) == get_args(get_args(ObjectiveConfig.model_fields["type"].annotation)[0])
    assert {"type", "options"}.union(*(kind.keys for kind in KINDS.values())) == ObjectiveConfig.model_fields.keys()
    file = write_run(tmp_path)
    assert objective_fingerprint(load(file, ["train.objective.rate=0.9"])) == {"type": "causal"}
    fim = objective_fingerprint(load(file, ["train.objective.type=fim", "train.objective.rate=0.9"]))
    assert fim.keys() == {"type", "rate", "spm_rate", "sentinels"} and fim["rate"] == 0.9


def test_a_change_of_some_runs_alone_refuses_no_others(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    kimi = [
        "model.pattern=[kimi, full]",
        "model.kinds={kimi: {mixer: kda, delta: {key_heads: 2, key_dim: 8, value_dim: 8}}, full: {}}",
    ]
    muon = "train.optimizer.type=muon"
    assert numerics_version(load(file, [muon])) == numerics_version(load(file, kimi)) == NUMERICS_VERSION
    assert numerics_version(load(file, [*kimi, muon])) == "0.3.0"
    assert numerics_version(load(file, [*kimi, "train.precision={compute: bf16, fp8: {emulate: true}}"])) == "0.3.0"
