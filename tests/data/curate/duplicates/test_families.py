"""Families of templated pages: similarity is counted, however many partners a document has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config.curation.curate import DuplicatesConfig, NearConfig
from pipeline.data.curate.duplicates.leaders import compiled, leader_choice
from tests.data.curate.duplicates.made import Engine, jaccard, make_passes, make_scope, removed, run_all

SETTINGS = DuplicatesConfig(near=NearConfig())


def _letters(number: int) -> str:
    return "".join(chr(ord("a") + (number >> shift & 15)) for shift in range(0, 40, 4))


def pages(count: int, own: int, seed: int = 0) -> list[list[str]]:
    """Pages of 120 shared words and some of their own."""
    rng = np.random.default_rng(seed)
    template = [_letters(number) for number in rng.integers(0, 2**40, 120).tolist()]
    return [template + [_letters(number) for number in row] for row in rng.integers(0, 2**40, (count, own)).tolist()]


@pytest.mark.parametrize("engine", ["python", "numba"])
def test_pages_of_a_template_below_the_bound_stay(tmp_path: Path, engine: Engine) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    family = pages(1500, 40)
    assert 0.58 < jaccard(family[0], family[1]) < 0.6
    # Among them, copies of some pages with other last words: those are similar to one page alone.
    copies = [[*page[:-4], "some", "other", "last", "words"] for page in family[:50]]
    assert jaccard(family[0], copies[0]) > 0.9
    texts = [" ".join(page) for page in [*family, *copies]]
    passes = make_passes(make_scope(tmp_path, {"web": texts}, SETTINGS, engine=engine), SETTINGS, engine=engine)
    run_all(passes)
    (joined,) = passes.counts("join")
    assert joined["largest"] > 1000, "most are in one component"
    gone = removed(passes)
    pairs = {frozenset([place[1], kept[1]]) for place, (_, kept, _) in gone.items()}
    assert pairs == {frozenset([number, 1500 + number]) for number in range(50)}
    for place, (_, kept, value) in gone.items():
        one, other = ([*family, *copies][row] for row in (place[1], kept[1]))
        assert value == pytest.approx(jaccard(one, other), abs=1e-6)


@pytest.mark.parametrize("own", [48, 40, 31, 27])
def test_pages_of_a_template_are_hardly_compared(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix filter proposes nearly no pair of a family, up to just below the bound."""
    from pipeline.data.curate.duplicates.leaders.plain import PlainLeaders

    count, shared = 400, 116
    rng = np.random.default_rng(own)
    sets = [
        np.unique(np.append(np.arange(shared), rng.integers(1000, 2**32, own - int(rng.integers(0, 2)))))
        for _ in range(count)
    ]
    shingles = np.concatenate(sets).astype(np.uint32)
    starts = np.append(0, np.cumsum([len(each) for each in sets]))
    ids = np.arange(count)
    bands, roles = np.zeros((count, 1), np.uint64), np.zeros(count, np.uint8)
    frequencies = leader_choice.Frequencies(len(shingles))
    frequencies.add(shingles, starts)
    proposed = []
    real = PlainLeaders._proposed

    def counting(self: PlainLeaders, size: int, order: list[tuple[int, int]]) -> set[int]:
        found = real(self, size, order)
        proposed.append(len(found))
        return found

    monkeypatch.setattr(PlainLeaders, "_proposed", counting)
    members = leader_choice.Members(shingles, starts, bands, ids, ids, roles)
    assert not PlainLeaders(0.7, frequencies).add(members).rule.any()
    assert sum(proposed) < count


def test_engines_share_the_numbers_of_the_filter() -> None:
    pytest.importorskip("numba")
    for size in [*range(1, 200), 1000, 12345]:
        assert compiled._size_class(size) == leader_choice.size_class(size)
        for bound in (0.0, 0.5, 0.7, 1.0):
            assert compiled._prefix_size(size, bound) == leader_choice.prefix_size(size, bound)
            for other in (1, size // 2, size, 2 * size):
                expected = leader_choice.largest_other(size, other // 3, bound, 2**20)
                assert compiled._largest_other(size, other // 3, bound, 2**20) == expected
                assert compiled._fewest_common(size, other, bound) == leader_choice.fewest_common(size, other, bound)
                common = leader_choice.fewest_common(size, other, bound)
                if common > 1:
                    assert (common - 1) / (size + other - common + 1) < bound
