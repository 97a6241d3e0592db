"""Leaders: engines, blocks and roles, against the definition over all pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.data.curate.duplicates import choose, match
from pipeline.data.curate.duplicates.choose import make_leaders
from pipeline.data.curate.duplicates.leaders.leader_choice import (
    CAN_LEAD,
    CANNOT_LEAD,
    EXACT,
    MUST_LEAD,
    NEAR,
    URL,
    Frequencies,
    Members,
    empty_choice,
)
from tests import tiers
from tests.data.curate.duplicates.made import make_passes, make_scope, removed, run_all, without_receipts
from tests.data.curate.duplicates.test_passes import SETTINGS, family_texts

BANDS = 3
ENGINES: tuple[Literal["numba", "python"], ...] = ("numba", "python")
Lists = tuple[list[int], list[int], list[float]]


def _members(seed: int, count: int) -> Members:
    """Documents of some templates with shingles of their own, in sets of many sizes; some have none."""
    rng = np.random.default_rng(seed)
    sets: list[npt.NDArray[np.uint32]] = []
    for _ in range(count):
        template = int(rng.integers(0, 4))
        shared = np.arange(template * 1000, template * 1000 + 40 * template + 9)
        some = shared[rng.random(len(shared)) < rng.choice([1, 0.95, 0.7])]
        own = rng.integers(10**6, 10**6 + rng.choice([50, 10**8]), int(rng.integers(0, 12)))
        sets.append(np.unique(np.concatenate([some, own])).astype(np.uint32) if rng.random() < 0.95 else some[:0])
    starts = np.append(0, np.cumsum([len(each) for each in sets])).astype(np.int64)
    return Members(
        np.concatenate(sets).astype(np.uint32),
        starts,
        rng.integers(0, 3, (count, BANDS)).astype(np.uint64),
        rng.integers(0, count, count),
        np.where(rng.random(count) < 0.1, rng.integers(0, count, count), np.arange(count)),
        rng.choice([CAN_LEAD, CANNOT_LEAD, MUST_LEAD], count, p=[0.8, 0.1, 0.1]).astype(np.uint8),
    )


def _all_pairs(members: Members, bound: float) -> Lists:
    """The definition: each document is compared with every earlier kept one."""
    choice = empty_choice(len(members))
    sets = [set(members.part(place, place + 1).shingles.tolist()) for place in range(len(members))]
    kept: list[int] = []
    for place, role in enumerate(members.roles.tolist()):
        found = [(EXACT, other, 1.0) for other in kept if members.exact[other] == members.exact[place]]
        found += [(URL, other, 1.0) for other in kept if members.url[other] == members.url[place]]
        for other in kept if sets[place] else ():
            similarity = len(sets[place] & sets[other]) / len(sets[place] | sets[other])
            # With a common band there is a common shingle; these bands are random.
            if similarity and similarity >= bound and (members.bands[place] == members.bands[other]).any():
                found.append((NEAR, other, similarity))
        if found and role != MUST_LEAD:
            choice.rule[place], choice.leader[place], choice.similarity[place] = found[0]
        elif role != CANNOT_LEAD:
            kept.append(place)
    return choice.leader.tolist(), choice.rule.tolist(), choice.similarity.tolist()


def _choose(members: Members, engine: Literal["numba", "python"], bound: float, block: int) -> Lists:
    frequencies = Frequencies(len(members.shingles))
    frequencies.add(members.shingles, members.starts)
    leaders = make_leaders(engine, bound, frequencies, BANDS, len(members))
    cuts = range(0, len(members), block)
    parts = [leaders.add(members.part(low, min(low + block, len(members)))) for low in cuts]
    names = ("leader", "rule", "similarity")
    leader, rule, similarity = (np.concatenate([getattr(part, name) for part in parts]).tolist() for name in names)
    return leader, rule, similarity


@pytest.mark.parametrize("seed", tiers.first(1, range(12), rest="guard"))
@pytest.mark.parametrize("bound", [0.7, 0.85, 1.0, 0.3, 0.0])
def test_choices_are_those_of_all_pairs(seed: int, bound: float) -> None:
    pytest.importorskip("numba")
    members = _members(seed, 180)
    expected = _all_pairs(members, bound)
    assert {EXACT, URL} < set(expected[1])
    assert NEAR in expected[1] or bound == 1
    for engine in ENGINES:
        for block in (7, 180):
            assert _choose(members, engine, bound, block) == expected


def test_large_clusters_give_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"web": family_texts(6, 30)}
    for name, block, room in (("small", 2**13, 2**25), ("large", 3, 200)):
        monkeypatch.setattr(choose, "BLOCK", block)
        monkeypatch.setattr(choose, "ROOM", room)
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
