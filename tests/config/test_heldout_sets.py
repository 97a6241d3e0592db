"""Named held-out sets in the run file: what is not possible is refused with the key and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from tests import tiny

OWN = [{"name": "own", "paths": ["own/*.txt"]}]


def read(root: Path, changes: dict[str, Any]) -> Config:
    return load(tiny.write_run(root, changes))


def test_what_a_set_has_by_default(tmp_path: Path) -> None:
    sets = {"a": {"sources": ["sea"]}, "b": {"sources": ["own"], "sequence_length": 8, "every_steps": 3}}
    config = read(tmp_path, {"data.heldout_sources": OWN, "heldout_sets": sets})
    assert [config.set_length(name) for name in "ab"] == [32, 8]
    assert [config.set_every(name) for name in "ab"] == [4, 3]
    assert config.max_sequence_length == 32, "of the training alone: it decides the size of learned positions"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"heldout_sets": {"a": {"sources": ["see"]}}}, "heldout_sets.a.sources: 'see' is neither"),
        ({"heldout_sets": {"a": {"sources": []}}}, "heldout_sets.a.sources"),
        ({"heldout_sets": {"a": {"sources": ["sea", "sea"]}}}, "'sea' is there twice"),
        ({"heldout_sets": {"a/b": {"sources": ["sea"]}}}, "'a/b' is not a valid name of a set"),
        ({"heldout_sets": {"a": {"sources": ["sea"], "split": "test"}}}, "heldout_sets.a.split: 'test'"),
        ({"heldout_sets": {"a": {"sources": ["sea"], "split": "train"}}}, "is what the run trains on"),
        ({"heldout_sets": {"a": {"sources": ["sea"], "objective": {"type": "fim"}}}}, "objective.type: fim"),
        ({"heldout_sets": {"a": {"sources": ["sea"], "objective": {"type": "masked"}}}}, "heldout_sets.a.objective"),
        ({"heldout_sets": {"a": {"sources": ["sea"], "sequence_length": 8}}, "eval": {"stride": 9}}, "eval.stride: 9"),
        (
            {"heldout_sets": {"a": {"sources": ["sea"], "sequence_length": 64}}, "model.positions": "learned"},
            "heldout_sets.a.sequence_length: 64",
        ),
        ({"data.heldout_sources": OWN}, "no set has 'own'"),
        ({"data.heldout_sources": [{**OWN[0], "name": "sea"}]}, "'sea' is the name of another source"),
        ({"data.heldout_sources": [{**OWN[0], "split": "test"}]}, "split: 'test' is for a `dataset`"),
        (
            {
                "data.dir": "/here",
                "data.heldout_sources": [{"name": "y", "dataset": "/here/sea", "split": "train"}],
            },
            "data.heldout_sources.0: /here/sea is one of data.sources, whose split 'train' is trained on",
        ),
        (
            {
                "data.sources": [{"name": "x", "dataset": "/x"}],
                "data.heldout_sources": [{"name": "y", "dataset": "/x", "split": "train"}],
            },
            "whose split 'train' is trained on",
        ),
        ({"train.checkpoint": {"keep_best": 1, "best_of": "a"}}, "train.checkpoint.best_of: 'a'"),
        (
            {"heldout_sets": {"a": {"sources": ["sea"]}}, "train.checkpoint": {"best_of": "a"}},
            "set train.checkpoint.keep_best",
        ),
        ({"train.checkpoint": {"keep_best": 1, "every_steps": 6}}, "train.validation.every_steps"),
        (
            {
                "heldout_sets": {"a": {"sources": ["sea"], "samples": 0}},
                "train.checkpoint": {"keep_best": 1, "best_of": "a", "every_steps": 4},
            },
            "heldout_sets.a.samples: 0",
        ),
    ],
)
def test_what_is_not_possible_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, changes)
    assert told in str(caught.value)
