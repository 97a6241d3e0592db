"""Finished curations that a scope is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import file_hash
from pipeline.config.curation.curate import DuplicatesConfig, NearConfig
from pipeline.data.curate.duplicates.against import FinishedCuration, read_curation
from pipeline.data.curate.duplicates.measure import duplicate_settings
from pipeline.data.curate.duplicates.passes import DuplicatePasses
from pipeline.data.curate.files import CURATION_FILE, VERDICT, decisions_folder, measured_file, verdicts_file
from pipeline.data.curate.scope import Chunk, Scope
from pipeline.data.work.sorted_runs import DamagedResult
from tests.data.curate.duplicates.made import bad_rule, make_passes, make_scope, removed, run_all
from tests.data.curate.duplicates.test_passes import SETTINGS, family_texts


def _finish(passes: DuplicatePasses) -> Path:
    """Write verdicts and `curation.json` of a scope of one source."""
    scope = passes.scope
    folder = scope.chunks[0].curation
    decisions = decisions_folder(folder, "0" * 32)
    listed = {}
    for chunk in scope.chunks:
        verdicts = np.zeros(chunk.records, VERDICT)
        table = passes.open_table(chunk)
        verdicts["rule"][bad_rule().fires(table)] = 1
        verdicts["rule"][passes.chosen(chunk)["row"]] = 2
        path = verdicts_file(decisions, chunk.unit, chunk.chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        verdicts.tofile(path)
        listed[str(path.relative_to(decisions))] = f"{file_hash(path):016x}"
    about = {
        "decide_hash": "0" * 32,
        "verdicts": listed,
        "settings": {"duplicates": duplicate_settings(passes.settings)},
    }
    storage.put_json(folder / CURATION_FILE, about)
    return folder


def _old(folder: Path, texts: list[str], bad: list[int]) -> tuple[DuplicatePasses, Any]:
    scope = make_scope(folder, {"old": texts}, SETTINGS, bad={"old": bad})
    passes = make_passes(scope, SETTINGS)
    run_all(passes)

    def chunks(of: Path) -> tuple[Chunk, ...]:
        assert of == scope.chunks[0].curation
        return scope.chunks

    return passes, chunks


def _read(folder: Path, chunks: Any, settings: DuplicatesConfig = SETTINGS) -> FinishedCuration:
    return read_curation(folder, settings, chunks)


@pytest.mark.parametrize("seed", range(3))
def test_new_source_against_an_old_one_is_as_both_together(tmp_path: Path, seed: int) -> None:
    texts = family_texts(seed, 60)
    old, new = texts[::2], texts[1::2]
    bad = {"old": [2, 3, 5, 8, 13], "new": [1, 4, 9]}
    passes, chunks = _old(tmp_path / "alone", old, bad["old"])
    curation = _read(_finish(passes), chunks)
    scope = make_scope(tmp_path / "later", {"new": new}, SETTINGS, bad=bad)
    later = make_passes(scope, SETTINGS, against=(curation,))
    run_all(later)

    settings = SETTINGS.model_copy(update={"keep": ["source", "longest"]})
    both = make_passes(make_scope(tmp_path / "both", {"old": old, "new": new}, settings, bad=bad), settings)
    run_all(both)
    together = removed(both)
    found = removed(later)
    assert {place: rule for place, (rule, _, _) in found.items()} == {
        place: rule for place, (rule, _, _) in together.items() if place[0] == "new"
    }
    assert {place: kept for place, (_, kept, _) in removed(passes).items()} == {
        place: kept for place, (_, kept, _) in together.items() if place[0] == "old" and kept[0] == "old"
    }
    kept_by_old = {place for place, (_, kept, _) in found.items() if kept[0] == str(curation.folder)}
    assert kept_by_old == {place for place, (_, kept, _) in together.items() if place[0] == "new" and kept[0] == "old"}
    assert kept_by_old


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    passes, chunks = _old(tmp_path, family_texts(0, 10), [])
    folder = passes.scope.chunks[0].curation
    with pytest.raises(UserError, match="not a finished curation"):
        _read(folder, chunks)
    _finish(passes)
    other = SETTINGS.model_copy(update={"near": NearConfig()})
    with pytest.raises(UserError, match=r"data\.curate\.duplicates\.near"):
        _read(folder, chunks, other)
    with pytest.raises(UserError, match=r"data\.curate\.duplicates\.url"):
        _read(folder, chunks, SETTINGS.model_copy(update={"url": "u"}))
    # Bounds may differ.
    near = SETTINGS.near
    assert near is not None
    _read(folder, chunks, SETTINGS.model_copy(update={"near": near.model_copy(update={"min_similarity": 0.9})}))
    chunk: Chunk = passes.scope.chunks[0]
    measured_file(folder, chunk.unit, chunk.chunk, "bands").unlink()
    with pytest.raises(UserError, match="bands is missing"):
        _read(folder, chunks)


@pytest.mark.parametrize("name", ["bands", "signatures", "verdicts"])
def test_damage_in_a_finished_curation(tmp_path: Path, name: str) -> None:
    texts = family_texts(1, 20)
    passes, chunks = _old(tmp_path / "alone", texts, [])
    curation = _read(_finish(passes), chunks)
    each = curation.chunks[0]
    path = each.verdicts if name == "verdicts" else each.path(name)
    assert path is not None
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    later = make_passes(make_scope(tmp_path / "later", {"new": texts}, SETTINGS), SETTINGS, against=(curation,))
    with pytest.raises(UserError, match=r"data\.curate\.against: .* is damaged") as error:
        run_all(later)
    # It is no file of this run, which may not remove it.
    assert not isinstance(error.value, DamagedResult)


def test_numbers_of_sources(tmp_path: Path) -> None:
    passes, chunks = _old(tmp_path / "alone", ["one text", "another text"], [])
    curation = _read(_finish(passes), chunks)
    scope: Scope = make_scope(tmp_path / "later", {"new": ["another text"], "more": ["one text"]}, SETTINGS)
    later = make_passes(scope, SETTINGS, against=(curation,))
    assert later.source_names == ("more", "new", str(curation.folder))
    run_all(later)
    assert {place: kept for place, (_, kept, _) in removed(later).items()} == {
        ("new", 0): (str(curation.folder), 1),
        ("more", 0): (str(curation.folder), 0),
    }
