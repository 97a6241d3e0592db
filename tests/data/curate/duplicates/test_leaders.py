"""Leaders: small and large clusters, engines, and roles."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from pipeline.data.curate.duplicates import choose, match
from pipeline.data.curate.duplicates.choose import choose_in_one, choose_small
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CAN_LEAD,
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    LeaderChoice,
    Members,
)
from pipeline.data.curate.duplicates.signature import NO_VALUE
from tests import tiers
from tests.data.curate.duplicates.made import make_passes, make_scope, removed, run_all, without_receipts
from tests.data.curate.duplicates.test_passes import SETTINGS, family_texts

BANDS, ROWS = 4, 3
ENGINES: tuple[Literal["numba", "python"], ...] = ("numba", "python")


def _members(seed: int, count: int) -> Members:
    """Documents in families: values of an original, changed here and there."""
    rng = np.random.default_rng(seed)
    originals = rng.integers(0, 2**32 - 1, (max(count // 8, 1), BANDS * ROWS), np.uint32)
    signatures = originals[rng.integers(0, len(originals), count)]
    change = rng.random(signatures.shape) < rng.random((count, 1)) * 0.4
    signatures[change] = rng.integers(0, 50, int(change.sum()), np.uint32)
    signatures[rng.random(count) < 0.1] = NO_VALUE
    signed = (signatures != NO_VALUE).any(axis=1)
    roles = rng.choice([CAN_LEAD, CANNOT_LEAD, MUST_LEAD], count, p=[0.7, 0.2, 0.1]).astype(np.uint8)
    exact = rng.integers(0, count, count, np.uint64)
    url = rng.integers(0, 4 * count, count, np.uint64)
    return Members(signatures, signed, exact, url, roles)


def _lists(choice: LeaderChoice) -> list[list[int]]:
    return [choice.leader.tolist(), choice.rule.tolist(), choice.equal.tolist()]


def _part(members: Members, low: int, high: int) -> Members:
    return Members(*(getattr(members, name)[low:high] for name in ("signatures", "signed", "exact", "url", "roles")))


@pytest.mark.parametrize("seed", tiers.first(2, range(5), rest="guard"))
def test_ways_to_choose_agree(seed: int) -> None:
    pytest.importorskip("numba")
    members = _members(seed, 300)
    bounds = np.array([0, 1, 5, 105, 300])
    found = choose_small("python")(members, bounds, BANDS, 8)
    assert {EXACT, NEAR} < set(found.rule.tolist())
    assert _lists(choose_small("numba")(members, bounds, BANDS, 8)) == _lists(found)
    for block in (1, 7, 1000):
        for low, high in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
            blocks = [_part(members, start, min(start + block, high)) for start in range(low, high, block)]
            for engine in ENGINES:
                part = choose_in_one(engine)(blocks, BANDS, 8)
                leader = np.where(part.leader < 0, -1, part.leader + low)
                assert leader.tolist() == found.leader[low:high].tolist()
                assert part.rule.tolist() == found.rule[low:high].tolist()
                assert part.equal.tolist() == found.equal[low:high].tolist()
    assert (found.leader[members.roles == MUST_LEAD] < 0).all()
    leaders = found.leader[found.leader >= 0]
    assert (found.leader[leaders] < 0).all()
    assert (members.roles[leaders] != CANNOT_LEAD).all()


@pytest.mark.parametrize(("bands", "rows"), [(14, 8), (8, 8), (26, 11), (3, 20)])
def test_documents_that_share_a_band_and_differ_by_about_the_bound(bands: int, rows: int) -> None:
    pytest.importorskip("numba")
    rng, values = np.random.default_rng(bands), bands * rows
    signatures = rng.integers(0, 2**32 - 1, (300, values), np.uint32)
    same = rng.random(signatures.shape) < rng.uniform(0.6, 0.95, (300, 1))
    signatures = np.where(same, signatures[0], signatures)
    signatures[:, :rows] = signatures[0, :rows]
    ids = np.arange(300, dtype=np.uint64)
    members = Members(signatures, np.ones(300, np.bool_), ids, ids, np.zeros(300, np.uint8))
    fewest = round(0.7 * values)
    found = choose_in_one("python")([members], bands, fewest)
    assert _lists(choose_in_one("numba")([members], bands, fewest)) == _lists(found)
    assert 20 < (found.rule == NEAR).sum() < 300


def test_without_signatures() -> None:
    pytest.importorskip("numba")
    members = _members(0, 50)
    bare = Members(np.zeros((50, 0), np.uint32), np.zeros(50, np.bool_), members.exact, members.url, members.roles)
    bounds = np.array([0, 50])
    found = choose_small("python")(bare, bounds, 0, 1)
    assert NEAR not in found.rule.tolist()
    assert _lists(choose_small("numba")(bare, bounds, 0, 1)) == _lists(found)
    for engine in ENGINES:
        assert _lists(choose_in_one(engine)([bare], 0, 1)) == _lists(found)


def test_tables_of_a_large_cluster_grow() -> None:
    pytest.importorskip("numba")
    members = _members(7, 6000)
    # Few share a band, so most lead, and the tables of bands have to grow some times.
    rng = np.random.default_rng(1)
    members.signatures[members.signed] = rng.integers(0, 2**32 - 1, (int(members.signed.sum()), BANDS * ROWS))
    members.signatures[3000:4000] = members.signatures[:1000]
    blocks = [_part(members, low, low + 700) for low in range(0, 6000, 700)]
    found = choose_in_one("python")(blocks, BANDS, 8)
    assert _lists(choose_in_one("numba")(blocks, BANDS, 8)) == _lists(found)
    assert (found.rule == NEAR).sum() > 100


def test_large_clusters_give_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"web": family_texts(6, 30)}
    for name, large, block in (("small", 4096, 2**16), ("large", 1, 3)):
        monkeypatch.setattr(choose, "LARGE", large)
        monkeypatch.setattr(choose, "_BLOCK", block)
        run_all(make_passes(make_scope(tmp_path / name, texts, SETTINGS), SETTINGS))
    assert without_receipts(tmp_path / "small") == without_receipts(tmp_path / "large")


def test_giant_groups_are_stars_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "GIANT", 100)
    copies = 3000
    texts = {"web": [f"the same text of some words here {'!' * (place % 3)}" for place in range(copies)]}
    passes = make_passes(make_scope(tmp_path, texts, SETTINGS), SETTINGS)
    run_all(passes)
    near = [counts for counts in passes.counts("match") if counts["rows"] == copies * 8]
    assert [counts["edges"] for counts in near] == [copies - 1]  # the same star in each of eight bands
    assert [counts["giant"] for counts in near] == [8]
    assert near[0]["largest"][0] == [copies, 0]
    assert len(removed(passes)) == copies - 1
