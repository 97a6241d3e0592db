"""The table of features against kinds: it has a cell for each pair, and each cell is tried."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config.layers.layer import LayerConfig
from pipeline.config.load import load
from pipeline.config.objective import ObjectiveConfig
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint.export import average
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.feature_table import FEATURES, KINDS, Feature, letter
from pipeline.train.huggingface.configs import from_hf_config
from pipeline.train.huggingface.registry import FAMILIES
from pipeline.train.model.decoder_spec import MIXERS, MLPS
from pipeline.train.rules.layout import check_layout, layout_warnings
from tests import tiny
from tests.train.huggingface import test_parity, test_t5
from tests.train.runs import column, train

SPECIAL = ["[MASK]", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", *(f"<extra_id_{n}>" for n in range(8))]
MODEL = {"layers": 2, "dim": 32, "heads": 2, "ffn_dim": 48, "vocab_multiple": 16}
DELTA = {"delta": {"key_heads": 2, "key_dim": 16, "value_dim": 16}, "heads": None}
SECTIONS: dict[str, dict[str, Any]] = {
    "mla": {"mla": {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 16}},
    "mamba2": {"mamba2": {"heads": 4, "head_dim": 16, "state_dim": 16}, "heads": None},
    "gated_delta": DELTA,
    "kda": DELTA,
    "experts": {"experts": {"count": 4, "top_k": 2, "ffn_dim": 32, "shared_ffn_dim": 32}, "ffn_dim": None},
}
ENCODER = {"model.encoder": {"layers": 1}}
NEEDS: dict[str, dict[str, Any]] = {"masked": {"model.direction": "both"}, "spans": ENCODER, "ul2": ENCODER}
PAIRS = [(registry, kind) for registry, kinds in KINDS.items() for kind in kinds]
QUICK = {("model.mixer", "mla"), ("model.mlp", "experts")}
CASES = [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in PAIRS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    preprocess(load(tiny.write_run(folder, {"tokenizer.special_tokens": SPECIAL})))
    return folder


def _changes(registry: str, kind: str) -> dict[str, Any]:
    """Keys of a run of a small model of a kind."""
    if registry == "family":
        return _of_family(kind)
    if registry == "train.objective.type":
        return {"model": MODEL, "train.objective": {"type": kind}, **NEEDS.get(kind, {})}
    key = registry.removeprefix("model.")
    return {"model": {**MODEL, key: kind, **SECTIONS.get(kind, {})}}


def _of_family(kind: str) -> dict[str, Any]:
    """The model that a `config.json` of transformers describes, with sizes that fp8 takes."""
    row = next(row for row in (*test_parity.ROWS.values(), *test_t5.ROWS.values()) if row.config.model_type == kind)
    config = row.config(**{"vocab_size": 512, "pad_token_id": None, "eos_token_id": 0, **row.values})
    model = from_hf_config(json.loads(config.to_json_string(use_diff=False)), "config.json")[1]
    keys = {**model.model_dump(mode="json", exclude_unset=True), "dim": 48}
    keys |= {key: 48 for key in ("ffn_dim",) if keys.get(key)}
    keys |= {"rope_share": 0.5} if keys.get("rope_share") else {}
    keys |= {"heads": 4, "kv_heads": 2, "head_dim": 16} if model.heads and model.mla is None else {}
    objective = "spans" if model.encoder else "masked" if model.direction == "both" else "causal"
    return {"model": keys, "train.objective": {"type": objective}}


def _file(root: Path, registry: str, kind: str) -> Path:
    return tiny.write_run(
        root, {"tokenizer.special_tokens": SPECIAL, **_changes(registry, kind)}, f"{registry}-{kind}.yaml"
    )


def _with(registry: str, kind: str, letters: str) -> Iterator[Feature]:
    return (each for each in FEATURES if letter(registry, kind, each) in letters)


def test_each_kind_of_each_registry_has_a_cell_for_each_feature() -> None:
    kinds = {
        "model.mixer": {*MIXERS, "none"},
        "model.mlp": {*MLPS, "none"},
        "train.objective.type": set(_words(ObjectiveConfig, "type")),
        "family": FAMILIES.keys(),
    }
    assert {registry: set(found) for registry, found in KINDS.items()} == kinds
    for key in ("mixer", "mlp"):  # what a run file may say is what a model is built from
        assert set(_words(LayerConfig, key)) == kinds[f"model.{key}"]
    first = sum(feature.run == 0 for feature in FEATURES)
    for registry, kind in PAIRS:
        runs = KINDS[registry][kind].split(" ")
        assert [len(run) for run in runs] == [first, len(FEATURES) - first], kind
        assert set("".join(runs)) <= set("wr-"), kind


def _words(section: type[Any], key: str) -> Iterator[str]:
    annotation = section.model_fields[key].annotation
    return (word for part in get_args(annotation) for word in get_args(part))


@pytest.mark.parametrize(("registry", "kind"), CASES)
def test_what_is_refused_is_refused_by_name(root: Path, registry: str, kind: str) -> None:
    file = _file(root, registry, kind)
    check_layout(load(file), 1)
    for feature in _with(registry, kind, "r"):
        name = feature.settings[0].partition("=")[0].removeprefix("model.").removeprefix("train.")
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            check_layout(load(file, feature.settings), 1)


@pytest.mark.first(2)
@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize(("registry", "kind"), CASES)
def test_what_works_trains_together(root: Path, registry: str, kind: str, run: int) -> None:
    file = _file(root, registry, kind)
    chosen = [each for each in _with(registry, kind, "w-") if each.run == run]
    settings = [setting for each in chosen for setting in each.settings]
    short = ("train.duration=2 steps", "train.schedule.warmup=0 steps", "train.validation.samples=0")
    folder = train(root, f"{registry}-{kind}-{run}", *short, *settings, file=file.name)
    losses = column(folder, "loss")
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    if run == 0:
        to = folder / "average"
        quiet = Console(file=io.StringIO())
        average(Checkpoints.of_run(folder), to, steps=None, last=2, weights="ema", max_shard=None, console=quiet)
        assert list(to.glob("*.safetensors"))


@pytest.mark.parametrize(("registry", "kind"), CASES)
def test_what_has_nothing_to_act_on_is_said(root: Path, registry: str, kind: str) -> None:
    for feature in _with(registry, kind, "-"):
        config = load(_file(root, registry, kind), feature.settings)
        warnings = layout_warnings(config, check_layout(config, 1))
        section = feature.settings[0].partition("=")[0].rpartition(".")[0]
        assert any("no effect" in each and section in each for each in warnings), feature.name
