"""Planted pairs found, by their true similarity, against the theory of bands; and what is removed, by the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.curation.curate import DuplicatesConfig, NearConfig
from pipeline.data.curate.duplicates.files import EDGE
from tests.data.curate.duplicates.made import (
    Engine,
    jaccard,
    make_passes,
    make_scope,
    near_copy,
    removed,
    run_all,
    words,
)

BINS = np.array([0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.001])
SETTINGS = DuplicatesConfig(near=NearConfig())


def _recall(folder: Path, pairs: int, engine: Engine) -> tuple[list[tuple[int, float, float, float]], float, float]:
    """Plant pairs of known similarity.

    Returns:
        By bin: (pairs, share in a band together, theory, share of which one is removed).
        The least true similarity of a removed document to the kept one, and the share of removed ones from .7 on.
    """
    rng = np.random.default_rng(11)
    found: list[tuple[list[str], list[str], float]] = []
    for number in range(pairs):
        one = words(rng, int(rng.integers(120, 400)), 10**6)
        # A changed word changes five shingles: this many give about the similarity that is wanted.
        wanted = 0.58 + 0.4 * (number + 0.5) / pairs
        changes = max(1, round((1 - wanted) / (1 + wanted) * len(one) / 5))
        other = near_copy(rng, one, changes)
        found.append((one, other, jaccard(one, other)))
    texts = [" ".join(text) for one, other, _ in found for text in (one, other)]
    passes = make_passes(make_scope(folder, {"web": texts}, SETTINGS, engine=engine), SETTINGS, engine=engine)
    run_all(passes)
    edges = {
        (int(edge["first"]), int(edge["document"]))
        for path in (passes.scope.folder / "edges").iterdir()
        for edge in np.fromfile(path, EDGE)
    }
    gone = removed(passes)
    similarity = np.array([true for _, _, true in found])
    together = np.array([(2 * pair, 2 * pair + 1) in edges for pair in range(pairs)])
    went = np.array([("web", 2 * pair) in gone or ("web", 2 * pair + 1) in gone for pair in range(pairs)])
    bins = []
    for low, high in itertools.pairwise(BINS):
        inside = (similarity >= low) & (similarity < high)
        theory = float((1 - (1 - similarity[inside] ** 8) ** 14).mean())
        bins.append((int(inside.sum()), float(together[inside].mean()), theory, float(went[inside].mean())))
    of_removed = similarity[went]
    assert all(kept[1] // 2 == place[1] // 2 for place, (_, kept, _) in gone.items())
    return bins, float(of_removed.min()), float((of_removed >= 0.7).mean())


@pytest.mark.parametrize("engine", ["python", "numba"])
def test_recall_of_some_pairs(tmp_path: Path, engine: Engine) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    bins, least, share = _recall(tmp_path, 700, engine)
    for low, (count, together, theory, _) in zip(BINS, bins, strict=False):
        assert count > 40
        assert abs(together - theory) < 3.5 * np.sqrt(theory * (1 - theory) / count) + 0.01, low
    assert bins[-1][3] == 1
    assert least >= 0.7
    assert share == 1
    for low, (_, together, _, went) in zip(BINS, bins, strict=False):
        assert went == (together if low >= 0.7 else 0), "all that share a band, and no other"


@pytest.mark.slow
def test_recall_is_that_of_theory(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    bins, least, share = _recall(tmp_path, 9000, "numba")
    for low, (count, together, theory, went) in zip(BINS, bins, strict=False):
        print(f"J {low:.2f}: {count} pairs, together {together:.3f}, theory {theory:.3f}, removed {went:.3f}")
        assert count > 500
        if low >= 0.7:
            assert abs(together - theory) < 0.03, low
        assert went == (together if low >= 0.7 else 0)
    assert least >= 0.7
    assert share == 1
