"""The recipes of curation that ship: a run file may include each, and every rule that it names is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load, packaged_configs
from pipeline.config.root import Config
from pipeline.data.curate.rules.presets import preset_rules
from tests import tiny

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
