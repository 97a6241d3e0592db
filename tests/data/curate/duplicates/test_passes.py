"""Duplicates from texts to verdicts, against plain Python over all pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.curation.curate import DuplicatesConfig, NearConfig
from pipeline.data.curate.duplicates.passes import EXACT, NEAR, URL, DuplicatePasses
from pipeline.data.curate.duplicates.rank import rank_keys, rank_type
from pipeline.data.curate.duplicates.signature import reference_signature, shingle_hashes
from pipeline.data.curate.scope import document
from tests.data.curate.duplicates.made import (
    make_passes,
    make_scope,
    near_copy,
    removed,
    run_all,
    without_receipts,
    words,
)

SETTINGS = DuplicatesConfig(exact="text", near=NearConfig(words=3, bands=8, rows=3, min_similarity=0.6))


def family_texts(seed: int, families: int) -> list[str]:
    """Originals with several near copies each, exact copies, short and empty texts, shuffled."""
    rng = np.random.default_rng(seed)
    texts = ["", "!!!", "???", "one", "one", "two words", "!!!"]
    for _ in range(families):
        base = words(rng, int(rng.integers(3, 60)))
        texts.append(" ".join(base))
        for _ in range(int(rng.integers(0, 6))):
            copy = near_copy(rng, base, int(rng.integers(0, max(2, len(base) // 6))))
            texts.append(" ".join(copy) + " extra" * int(rng.integers(0, 2)))
    return [texts[place] for place in rng.permutation(len(texts)).tolist()]


def plain_leaders(
    texts: dict[str, list[str]], preference: tuple[str, ...], bad: dict[str, list[int]], seed: int
) -> dict[tuple[str, int], tuple[int, tuple[str, int], float]]:
    """The definition over all pairs: each document in rank order is compared with every kept one before it."""
    near = SETTINGS.near
    assert near is not None
    names = tuple(sorted(texts))
    keep = tuple(SETTINGS.keep)
    documents = [(number, row) for number, name in enumerate(names) for row in range(len(texts[name]))]
    ranks = np.zeros(len(documents), rank_type(keep))
    ranks["state"] = [row in bad.get(names[number], []) for number, row in documents]
    ranks["bytes"] = [len(texts[names[number]][row].encode()) for number, row in documents]
    numbers = np.array([document(number, 0, row) for number, row in documents], np.uint64)
    keys = rank_keys(ranks, numbers, keep, names, preference, seed)
    order = sorted(range(len(documents)), key=lambda place: [int(key[place]) for key in keys])
    kept: list[tuple[str, int, list[int], set[int]]] = []
    found: dict[tuple[str, int], tuple[int, tuple[str, int], float]] = {}
    for place in order:
        number, row = documents[place]
        text = texts[names[number]][row]
        shingles = set(shingle_hashes(text, near.words))
        signature = reference_signature(text, near.words, near.bands * near.rows)
        bands = [tuple(signature[start : start + near.rows]) for start in range(0, len(signature), near.rows)]
        verdict = None
        for name, other, _, _ in kept:
            if text and texts[name][other] == text:
                verdict = (EXACT, (name, other), 1.0)
                break
        if verdict is None and set(signature) != {2**32 - 1}:
            for name, other, theirs, others in kept:
                similarity = len(shingles & others) / max(len(shingles | others), 1)
                shares = any(
                    band == tuple(theirs[each * near.rows : (each + 1) * near.rows]) for each, band in enumerate(bands)
                )
                if similarity >= near.min_similarity and shares:
                    verdict = (NEAR, (name, other), float(np.float32(similarity)))
                    break
        if verdict is not None:
            found[names[number], row] = verdict
        elif not ranks["state"][place]:
            kept.append((names[number], row, signature, shingles))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_leaders_are_those_of_all_pairs(tmp_path: Path, seed: int) -> None:
    texts = {"web": family_texts(seed, 40), "book": family_texts(seed, 12), "code": family_texts(9, 5)}
    bad = {"web": [3, 5, 30, 31], "book": [0, 7, 20]}
    scope = make_scope(tmp_path, texts, SETTINGS, bad=bad)
    passes = make_passes(scope, SETTINGS, seed=seed)
    run_all(passes)
    expected = plain_leaders(texts, tuple(texts), bad, seed)
    assert {rule for rule, _, _ in expected.values()} == {EXACT, NEAR}
    assert removed(passes) == expected
    gone = {place for place, _ in removed(passes).items()}
    for rule, kept, _ in expected.values():
        assert kept not in gone
        assert kept[1] not in bad.get(kept[0], [])
        assert rule


def _results(passes: DuplicatePasses) -> dict[str, Any]:
    run_all(passes)
    return {"removed": removed(passes)}


@pytest.mark.guard
def test_result_is_independent_of_chunks_buckets_and_engines(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    texts = {"web": family_texts(2, 60), "book": family_texts(3, 30)}
    bad = {"web": [1, 2, 3]}
    found = []
    for number, (chunks, bucket_bytes) in enumerate([(1, 2**29), (4, 2**16), (7, 2**10)]):
        scope = make_scope(tmp_path / str(number), texts, SETTINGS, chunks=chunks, bad=bad)
        passes = make_passes(scope, SETTINGS, bucket_bytes=bucket_bytes)
        run_all(passes)
        found.append(removed(passes))
        if number == 2:
            assert len(passes.jobs("match")) > 10
            assert len(passes.jobs("choose")) > 3
            measured = make_scope(tmp_path / "numba", texts, SETTINGS, chunks=chunks, bad=bad, engine="numba")
            compiled = make_passes(measured, SETTINGS, bucket_bytes=bucket_bytes, engine="numba")
            run_all(compiled)
            assert without_receipts(tmp_path / "numba") == without_receipts(tmp_path / "2")
    assert found[0] == found[1] == found[2]
    assert found[0]


def test_jobs_in_any_order_give_the_same_files_and_are_skipped_when_done(tmp_path: Path) -> None:
    texts = {"web": family_texts(4, 30)}
    settings = SETTINGS.model_copy(update={"exact": "normalized"})
    for name in ("one", "other"):
        passes = make_passes(make_scope(tmp_path / name, texts, settings), settings, bucket_bytes=2**12)
        for each in passes.names:
            jobs = passes.jobs(each)
            for job in jobs if name == "one" else reversed(jobs):
                job.run(None, lambda amount: None)
        assert run_all(passes) == 0
    assert without_receipts(tmp_path / "one") == without_receipts(tmp_path / "other")


def test_other_bounds_redo_only_what_reads_them(tmp_path: Path) -> None:
    texts = {"web": family_texts(5, 30)}
    scope = make_scope(tmp_path, texts, SETTINGS)
    assert run_all(make_passes(scope, SETTINGS)) > 0
    assert SETTINGS.near is not None
    other = SETTINGS.model_copy(update={"near": SETTINGS.near.model_copy(update={"min_similarity": 0.9})})
    passes = make_passes(scope, other, name="others")
    assert all(job.find() for name in ("match", "join", "shingles") for job in passes.jobs(name))
    assert run_all(passes) == len(passes.jobs("rank")) + len(passes.jobs("choose"))
    assert len(removed(passes)) < len(removed(make_passes(scope, SETTINGS)))


def test_keep(tmp_path: Path) -> None:
    text = " ".join(words(np.random.default_rng(0), 50))
    dates = [b'{"date": "2021-05-01"}', b'{"date": 1700000000}', b'{"date": "no"}', None]
    urls = {"web": [text, text, text, text]}
    for keep, row in (("newest:date", 1), ("oldest:date", 0)):
        settings = DuplicatesConfig(exact="text", keep=[keep])
        folder = tmp_path / keep[:6]
        passes = make_passes(make_scope(folder, urls, settings, metadata={"web": dates}), settings)
        run_all(passes)
        assert {kept for _, kept, _ in removed(passes).values()} == {("web", row)}
    # A document that a rule removes never wins, and what is better does not go for it.
    settings = DuplicatesConfig(exact="text")
    passes = make_passes(make_scope(tmp_path, urls, settings, bad={"web": [0, 1, 3]}), settings)
    run_all(passes)
    assert {place: kept for place, (_, kept, _) in removed(passes).items()} == {
        ("web", row): ("web", 2) for row in (0, 1, 3)
    }


def test_url(tmp_path: Path) -> None:
    addresses = ["http://www.a.org/x/", "https://a.org/x?utm_source=y#z", "a.org/y", None, 7, "", "https://a.org/y?"]
    objects = [b"{}" if each is None else b'{"u": %s}' % repr(each).replace("'", '"').encode() for each in addresses]
    settings = DuplicatesConfig(url="u", keep=["longest"])
    texts = {"web": [f"text {number}" + "x" * number for number in range(len(objects))]}
    passes = make_passes(make_scope(tmp_path, texts, settings, metadata={"web": objects}), settings)
    run_all(passes)
    assert removed(passes) == {("web", 0): (URL, ("web", 1), 1.0), ("web", 2): (URL, ("web", 6), 1.0)}


@pytest.mark.parametrize("seed", range(3))
def test_what_was_kept_stays(tmp_path: Path, seed: int) -> None:
    texts = family_texts(seed + 20, 60)
    passes = make_passes(make_scope(tmp_path / "first", {"web": texts}, SETTINGS), SETTINGS)
    run_all(passes)
    gone = removed(passes)
    assert gone
    left = [text for row, text in enumerate(texts) if ("web", row) not in gone]
    again = make_passes(make_scope(tmp_path / "again", {"web": left}, SETTINGS, chunks=2), SETTINGS, seed=7)
    run_all(again)
    assert not removed(again)
