"""The recipes of curation that ship: a run file may include each, and every rule that it names is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from pipeline.config.load import load, packaged_configs
from pipeline.config.root import Config
from pipeline.data.curate.rules.of_run import compared_rules, local_rules
from pipeline.data.curate.rules.presets import preset_rules
from pipeline.data.curate.stage import curate
from pipeline.data.curate.verdicts import read_curation
from tests import tiny
from tests.data.curate.models.fasttext_writer import write_model
from tests.data.provenance.curated import text

FILES = sorted(packaged_configs().glob("curation/*.yaml"))


def with_recipe(root: Path, recipe: Path, changes: dict[str, Any] | None = None) -> Config:
    """A run file with small local sources that includes a recipe."""
    values = tiny.values(root)
    for source in values["data"]["sources"]:
        source |= {"type": "jsonl", "metadata": ["url", "date"]}
    values["include"] = f"curation/{recipe.name}"
    values["data"]["curate"] = {"scopes": {"all": ["sea", "land"]}, **(changes or {})}
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return load(file)


def test_there_are_recipes() -> None:
    assert [file.stem for file in FILES] == ["dclm", "dolma3", "fineweb"]


@pytest.mark.parametrize("recipe", FILES, ids=lambda file: file.stem)
def test_a_run_file_can_include_it(recipe: Path, tmp_path: Path) -> None:
    curate = with_recipe(tmp_path, recipe).data.curate
    assert curate is not None and curate.mode == "observe"
    assert curate.scopes == {"all": ["sea", "land"]}
    names = [rule.name for rule in preset_rules(curate.rules, "data.curate.rules")]
    assert len(names) == len(set(names)) >= 20
    assert curate.language is not None and curate.language.min_score == 0.65
    assert curate.duplicates.near is not None


def test_bounds_are_the_published_ones(tmp_path: Path) -> None:
    curate = with_recipe(tmp_path, packaged_configs() / "curation/fineweb.yaml").data.curate
    assert curate is not None
    bounds = {rule.name: rule.bound for rule in preset_rules(curate.rules, "data.curate.rules")}
    assert (
        bounds.items()
        >= {
            "gopher_quality.min_words": 50,
            "gopher_quality.max_words": 100_000,
            "gopher_quality.min_alpha_words": 0.8,
            "gopher_repetition.max_top_2_grams": 0.2,
            "gopher_repetition.max_duplicate_10_grams": 0.1,
            "c4.min_sentences": 5,
            "fineweb.min_punctuated_lines": 0.12,
            "fineweb.max_short_lines": 0.67,
        }.items()
    )
    assert curate.clean.pii.email == curate.clean.pii.ip == "mask" and not curate.clean.lines


def test_a_run_file_can_change_one_bound(tmp_path: Path) -> None:
    changes = {"rules": {"gopher_quality": {"min_words": None}}, "mode": "apply"}
    curate = with_recipe(tmp_path, packaged_configs() / "curation/fineweb.yaml", changes).data.curate
    assert curate is not None and curate.mode == "apply"
    names = [rule.name for rule in preset_rules(curate.rules, "data.curate.rules")]
    assert "gopher_quality.min_words" not in names and "fineweb.max_short_lines" in names


def local_models(root: Path) -> dict[str, Any]:
    """Changes of a recipe that put small models and files in place of those of the site."""
    vectors = {"the": [1.0, 0.0], "of": [0.0, 1.0]}
    write_model(root / "language.bin", vectors, {"__label__en": [400.0, 400.0], "__label__de": [0.0, 1.0]})
    write_model(root / "quality.bin", vectors, {"__label__hq": [400.0, 0.0], "__label__cc": [0.0, 1.0]})
    (root / "items.txt").write_text(
        "an item of an evaluation that is long enough to be looked for in any document here"
    )
    return {
        "language": str(root / "language.bin"),
        "quality": str(root / "quality.bin"),
        "items": str(root / "items.txt"),
    }


@pytest.mark.first(1)
@pytest.mark.guard
@pytest.mark.parametrize("recipe", FILES, ids=lambda file: file.stem)
def test_it_curates(recipe: Path, tmp_path: Path) -> None:
    for source, seeds in (("sea", range(40)), ("land", range(20, 60))):
        (tmp_path / source).mkdir()
        records = [
            {"text": text(seed), "url": f"http://a.example/{seed}", "date": f"20{10 + seed}-01-01"} for seed in seeds
        ]
        (tmp_path / source / "a.txt").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in records))
    models = local_models(tmp_path)
    changes: dict[str, Any] = {"language": {"model": models["language"]}}
    written = yaml.safe_load(recipe.read_text())["data"]["curate"]
    if "classifiers" in written:
        changes["classifiers"] = [written["classifiers"][0] | {"model": models["quality"]}]
    if "decontaminate" in written:
        changes["decontaminate"] = {"tasks": [], "files": [models["items"]]}
    config = with_recipe(tmp_path, recipe, changes)
    curate(config)
    for source in ("sea", "land"):
        curation = read_curation(config.data_dir / source / "curate")
        assert config.data.curate is not None
        rules = [*local_rules(config.data.curate, source, {"data.curate.language": {"labels": ["de", "en"]}})]
        rules += compared_rules(config.data.curate.duplicates)
        assert curation.rules == [rule.name for rule in rules]
        assert curation.about["documents"] == 40
        assert (curation.decisions / "report.html").is_file()
    assert curation.about["kept"] + sum(curation.about["removed"].values()) == 40
    if "exact" in written["duplicates"]:
        both = [read_curation(config.data_dir / source / "curate").about["removed"] for source in ("sea", "land")]
        assert sum(each["duplicates.exact"] for each in both) >= 10
