"""Damaged files of every pass are found, and made again by the same command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config.curation.curate import DuplicatesConfig, LinesConfig, NearConfig
from pipeline.data.curate.duplicates.kinds import SIGNATURES
from pipeline.data.curate.duplicates.passes import DuplicatePasses, PassName
from pipeline.data.curate.files import measured_file
from pipeline.data.work.sorted_runs import DamagedResult
from tests.data.curate.duplicates.made import make_passes, make_scope, run_all, without_receipts
from tests.data.curate.duplicates.test_passes import family_texts

SETTINGS = DuplicatesConfig(
    exact="text",
    near=NearConfig(words=3, bands=4, rows=3, min_similarity=0.5),
    lines=LinesConfig(min_bytes=3, min_count=2),
)


def _passes(folder: Path) -> DuplicatePasses:
    texts = {"web": [f"a line\n{text}" for text in family_texts(7, 20)]}
    return make_passes(make_scope(folder, texts, SETTINGS), SETTINGS)


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0x10
    path.write_bytes(data)


def _read_all(passes: DuplicatePasses) -> None:
    for chunk in passes.scope.chunks:
        passes.chosen(chunk)
        passes.removed_lines(chunk)


def test_flipped_bytes_in_results(tmp_path: Path) -> None:
    passes = _passes(tmp_path)
    run_all(passes)
    folder = tmp_path / "curate"
    right = without_receipts(folder)
    assert {path.split("/")[1] for path in right if "choices" not in path} == {
        "edges",
        "members",
        "candidates",
        "shingles",
    }
    rng = np.random.default_rng(0)
    order: tuple[PassName, ...] = ("join", "shingles", "choose", "kept", "lines")
    receipts = {each: [job.receipt for job in passes.jobs(each)] for each in order}
    # The first pass that reads what is in a folder.
    readers = {"edges": 0, "candidates": 1, "members": 2, "shingles": 2, "rank": 2, "chosen": 3, "kept": 4, "lines": 5}
    for name in sorted(right):
        path = folder / name
        if not path.stat().st_size:
            continue
        _flip(path, int(rng.integers(0, 10**6)))
        # Passes behind it are done anew, as by bounds that have changed.
        reader = readers[next(part for part in path.parts if part in readers)]
        for each in order[reader:]:
            for receipt in receipts[each]:
                receipt.unlink()
        with pytest.raises(DamagedResult) as error:
            run_all(make_passes(passes.scope, SETTINGS))
            _read_all(make_passes(passes.scope, SETTINGS))
            raise AssertionError(f"{name} is read as it is")
        assert error.value.path == path
        path.unlink()
        last = make_passes(passes.scope, SETTINGS)
        run_all(last)
        _read_all(last)
        assert without_receipts(folder) == right


@pytest.mark.first(4)
@pytest.mark.parametrize("name", ["bands", "exact", "lines", SIGNATURES])
@pytest.mark.parametrize("way", ["flip", "cut", "missing"])
def test_damaged_measures(tmp_path: Path, name: str, way: str) -> None:
    passes = _passes(tmp_path)
    chunk = passes.scope.chunks[1]
    path = measured_file(chunk.curation, chunk.unit, chunk.chunk, name)
    data = path.read_bytes()
    if way == "flip":
        # A signature that is not compared with another one is not read.
        for place in range(0, len(data), 13 if name == SIGNATURES else 10**6):
            _flip(path, place - 1)
    elif way == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(DamagedResult) as error:
        run_all(passes)
    assert error.value.path == path
    assert error.value.made_by == "measure"
    path.write_bytes(data)
    run_all(passes)
