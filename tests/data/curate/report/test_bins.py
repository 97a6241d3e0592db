"""Bins against comparisons with each edge, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.report.bins import BINS, Scale, bins, dense, edges, kept_at, scale_of, sparse


@pytest.mark.parametrize("scale", ["linear", "logarithmic"])
@pytest.mark.parametrize("keeps", ["min", "max"])
def test_each_edge_divides_the_documents_as_a_bound_does(scale: Scale, keeps: str) -> None:
    inner = edges(scale)
    assert len(inner) == BINS - 1 and np.all(np.diff(inner) > 0)
    chance = np.random.default_rng(1)
    values = np.concatenate([inner, inner * 1.0001, chance.random(500), chance.integers(0, 10**6, 500), [1e13]])
    counts = np.bincount(bins(values, scale, keeps), minlength=BINS)
    assert len(counts) == BINS
    expected = [(values >= edge).sum() if keeps == "min" else (values <= edge).sum() for edge in inner]
    assert kept_at(counts, keeps).tolist() == expected
    assert dense(sparse(counts)).tolist() == counts.tolist()


def test_bounds_of_the_presets_are_edges() -> None:
    presets = RulesConfig.model_validate({name: {} for name in RulesConfig.model_fields})
    both = set(edges("linear").tolist()) | set(edges("logarithmic").tolist())
    for preset in presets.model_dump().values():
        assert {float(bound) for bound in preset.values()} <= both


def test_shares_and_scores_are_linear() -> None:
    assert [scale_of(about) for about in ("share of lines", "score of `en`", "words", "mean length of a word")] == [
        "linear",
        "linear",
        "logarithmic",
        "logarithmic",
    ]
