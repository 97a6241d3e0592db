"""Named held-out sets: scored while training, by `pipeline eval` and in what is shown of both, as plain loops do it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.config.objective import MixedObjectiveConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.plan.build import make_data_plan
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.eval.report.command import report
from pipeline.eval.summary import show, summarize
from pipeline.eval.table import show_table
from pipeline.train.loop.trainer import train
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.setup import InferenceModel, load_for_inference
from slurm.status.command import status
from tests import tiny
from tests.heldout_sets import SETS, mean, nats_by_window, spread, write


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    before = _hashes(write(folder).parent / "data")
    config = load(folder / "run.yaml")
    preprocess(config)
    assert {name: _hashes(folder / "data")[name] for name in before} == before, "what was made without sets stays"
    train(config)
    return folder


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    return load(root / "run.yaml")


@pytest.fixture(scope="module")
def loaded(config: Config) -> InferenceModel:
    return load_for_inference(config, None)


def _hashes(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob("*/*/parts/*/*"), *folder.glob("*/*/manifest.json"), folder / "tokenizer" / "tokenizer.json"]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def datasets(root: Path) -> dict[str, Dataset]:
    folders = {
        "sea": "data/sea/heldout",
        "land": "data/land/heldout",
        "sky": "data/sky/heldout",
        "past": "other/past/train",
    }
    return {name: Dataset.open(root / folder) for name, folder in folders.items()}


def scored(run: Path, name: str) -> dict[int, Any]:
    """By step what the metrics have of a set."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["validation"][name] for row in rows if name in row.get("validation", {})}


def test_files_of_a_held_out_source_are_all_held_out(root: Path) -> None:
    assert not (root / "data" / "sky" / "train").exists()
    assert datasets(root)["sky"].documents == 9


def test_a_set_has_its_cadence_and_the_loss_of_a_plain_loop(root: Path, config: Config, loaded: InferenceModel) -> None:
    run = config.run.dir
    assert list(scored(run, "waters")) == [2, 4, 6, 8]
    assert list(scored(run, "far")) == [4, 8]
    assert scored(run, "rare") == {}
    for name, length in (("waters", 32), ("far", 48)):
        chosen = {source: datasets(root)[source] for source in SETS[name]["sources"]}
        counts = {source: -(-dataset.tokens // length) for source, dataset in chosen.items()}
        windows = spread(counts, SETS[name]["samples"])
        by_hand = {
            source: nats_by_window(loaded, dataset, length, windows[source]) for source, dataset in chosen.items()
        }
        found = scored(run, name)[8]
        assert found["loss"] == pytest.approx(mean([nats for each in by_hand.values() for nats in each]), rel=1e-6)
        assert found["loss_by_source"] == pytest.approx({k: mean(v) for k, v in by_hand.items()}, rel=1e-6)


@pytest.mark.guard
def test_an_evaluation_has_a_result_for_each_set_and_source(root: Path, config: Config, loaded: InferenceModel) -> None:
    found = evaluate(config)
    assert found.sets.keys() == SETS.keys()
    for name, each in found.sets.items():
        length = SETS[name].get("sequence_length", 32)
        assert list(each.sources) == SETS[name]["sources"]
        by_hand = {source: nats_by_window(loaded, datasets(root)[source], length) for source in each.sources}
        for source, score in each.sources.items():
            assert (score.targets, score.documents) == (
                datasets(root)[source].tokens,
                datasets(root)[source].documents,
            )
            assert score.loss == pytest.approx(mean(by_hand[source]), rel=1e-6)
            nats = sum(map(sum, by_hand[source]))
            assert score.bits_per_byte == pytest.approx(nats / math.log(2) / (score.text_bytes or 0), rel=1e-6)
        assert each.blended.loss == pytest.approx(mean([w for each in by_hand.values() for w in each]), rel=1e-6)
    assert read_report(config, 8) == found
    other = load(root / "run.yaml", ["heldout_sets.far.sequence_length=32"])
    assert read_report(other, 8) is None

    (row,) = csv.DictReader((config.run.dir / "eval" / "table.csv").open())
    assert float(row["loss of set far"]) == pytest.approx(found.sets["far"].blended.loss)
    out = io.StringIO()
    show_table(config, Console(file=out, width=300))
    assert "loss of set waters" in out.getvalue()
    figures = summarize(config, found, {}, Console(quiet=True))
    assert figures["sets"]["rare"]["loss"] == found.sets["rare"].blended.loss
    show(config, figures, Console(file=out, width=300))
    assert "loss of rare" in out.getvalue()
    (now,) = status({config.run.dir: None})
    assert (
        now.validation_sets is not None
        and now.validation_sets["waters"].loss == scored(config.run.dir, "waters")[8]["loss"]
    )
    page = report([config.run.dir], Console(quiet=True)).read_text()
    assert "Validation by set" in page and "set waters" in page


@pytest.mark.guard
def test_a_split_without_a_dataset_is_left_out(root: Path, config: Config) -> None:
    """A run on datasets that have no held-out split is evaluated on its sets alone."""
    sources = [{"name": "past", "dataset": str(root / "other" / "past")}, {"name": "sky", "dataset": str(root / "x")}]
    (root / "x").mkdir()
    (root / "x" / "train").symlink_to(root / "data" / "land" / "train")
    (root / "other" / "past" / "heldout").rename(root / "other" / "past" / "held")
    changes = {
        "run.dir": str(root / "alone"),
        "data.sources": sources,
        "data.heldout_sources": [{"name": "sea", "dataset": str(root / "data" / "sea")}],
        "tokenizer": {"path": str(root / "data" / "tokenizer" / "tokenizer.json")},
        "heldout_sets": {"one": {"sources": ["sea"]}},
        "train.validation.samples": 0,
        "train.duration": "2 steps",
    }
    alone = load(write(root, changes, "alone.yaml"))
    train(alone)
    found = evaluate(alone)
    assert found.sources == {} and math.isnan(found.blended.loss) and found.sets["one"].blended.targets > 0
    kept = read_report(alone, 2)
    assert kept is not None and kept.sets == found.sets
    figures = summarize(alone, found, {}, Console(quiet=True))
    assert figures["heldout_loss"] is None
    show(alone, figures, Console(quiet=True))
    show_table(alone, Console(quiet=True))


@pytest.mark.guard
def test_what_cannot_be_scored_is_refused(root: Path, config: Config, tmp_path: Path) -> None:
    def refused(changes: dict[str, Any]) -> str:
        wanted = load(write(root, {"run.dir": str(tmp_path / "run"), **changes}, "refused.yaml"))
        with pytest.raises(UserError) as caught:
            train(wanted)
        assert not (tmp_path / "run" / "checkpoints").exists()
        return str(caught.value)

    gone = [{"name": "past", "dataset": str(root / "other" / "past"), "split": "test"}]
    only = {"one": {"sources": ["past"]}}
    told = refused({"data.heldout_sources": gone, "heldout_sets": only})
    assert "heldout_sets.one" in told and "other/past/test" in told and "data.heldout_sources.0.split" in told

    bare = {"data.heldout_sources": [], "data.dir": str(tmp_path / "bare"), "data.splits": {"heldout": 0.2, "none": 0}}
    bare["heldout_sets"] = {"one": {"sources": ["sea"], "split": "none"}}
    preprocess(load(write(root, bare, "bare.yaml")))
    told = refused(bare)
    assert "heldout_sets.one has no token" in told and "data.splits.none" in told

    # Tokenized with the tokenizer of that run, which saw the same texts and others.
    bare |= {"data.dir": str(tmp_path / "bytes"), "tokenizer": {"train": {"vocab_size": 280}}, "heldout_sets": {}}
    preprocess(load(write(root, bare, "bytes.yaml")))
    strange = [{"name": "strange", "dataset": str(tmp_path / "bytes" / "land")}]
    told = refused({"data.heldout_sources": strange, "heldout_sets": {"one": {"sources": ["strange"]}}})
    assert "'strange'" in told and "another tokenizer" in told and "280 entries" in told
    with pytest.raises(UserError, match="another tokenizer"):
        preprocess(load(root / "refused.yaml"))
    with pytest.raises(UserError, match="different tokenizers"):
        make_data_plan(load(root / "refused.yaml"))


@pytest.mark.guard
def test_a_set_has_an_objective_of_its_own(tmp_path: Path) -> None:
    """It is scored as a training with that objective and length would be."""
    sentinels = {"special_tokens": [f"<extra_id_{n}>" for n in range(20)], "train": {"vocab_size": 320}}
    spans = {"type": "spans", "rate": 0.2}
    noisy = {"type": "spans", "rate": 0.4}
    sets = {
        "same": {"sources": ["sea", "land"], "samples": 4},
        "noisy": {"sources": ["sea", "land"], "sequence_length": 48, "objective": noisy},
    }
    changes = {"model.encoder": {"layers": 1}, "tokenizer": sentinels, "train.objective": spans, "heldout_sets": sets}
    changes |= {"train.duration": "2 steps", "train.precision.compute": "fp32"}
    config = load(tiny.write_run(tmp_path, changes))
    preprocess(config)
    train(config)
    row = next(row for row in read_metrics(config.run.dir) if "validation_loss" in row)
    assert row["validation"]["same"]["loss"] == row["validation_loss"]
    found = evaluate(config)
    assert found.sets["same"].blended == found.blended
    wanted = config.train.model_copy(update={"sequence_length": 48, "objective": MixedObjectiveConfig(**noisy)})
    other = evaluate(config.model_copy(update={"train": wanted, "heldout_sets": {}}), keep=False)
    assert found.sets["noisy"].blended.targets == other.blended.targets > found.blended.targets
    assert found.sets["noisy"].blended.loss == pytest.approx(other.blended.loss, rel=1e-6)
