"""Sorted runs: ranges against plain lists, and every flipped byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.work.sorted_runs import (
    HASHES,
    MAX_RANGES,
    DamagedResult,
    RunFile,
    RunWriter,
    SectionFile,
    bucket_count,
    bucket_range,
    run_ranges,
    write_run,
    write_sections,
)

ROW = np.dtype([("hash", "<u8"), ("rest", "<u8"), ("row", "<u4")])
_EDGES = [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
_HASHES = st.one_of(st.sampled_from(_EDGES), st.integers(0, 2**64 - 1))


def _records(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, ROW)


def _write(path: Path, records: np.ndarray) -> None:
    with write_run(path, records) as file:
        file.commit()


@given(rows=st.lists(st.tuples(_HASHES, _HASHES, st.integers(0, 2**32 - 1))), first=_HASHES, end=_HASHES)
@settings(max_examples=150)
def test_range_is_that_of_a_sorted_list(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], first: int, end: int
) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    _write(path, _records(rows))
    first, end = min(first, end), max(first, end)
    with RunFile(path, ROW, "measure") as run:
        assert run.read_range(first, end).tolist() == sorted(row for row in rows if first <= row[0] < end)
        assert run.read_range(0, HASHES).tolist() == sorted(rows)


def test_many_ranges(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = np.zeros(20_000, ROW)
    records["hash"] = rng.integers(0, 2**64, len(records), np.uint64) & np.uint64(0xFFFFFFFF00000000)
    records["hash"][:5000] = records["hash"][0]
    records["row"] = rng.permutation(len(records))
    with RunWriter(tmp_path / "run", ROW) as writer:
        for block in np.array_split(records, 7):
            writer.add(block)
        writer.finish().commit()
    _write(tmp_path / "other", records[::-1])
    assert (tmp_path / "run").read_bytes() == (tmp_path / "other").read_bytes()
    with RunFile(tmp_path / "run", ROW, "measure") as run:
        assert run.sections > 100
        for buckets in (1, 3, 7, 1000):
            parts = [run.read_range(*bucket_range(bucket, buckets)) for bucket in range(buckets)]
            assert np.array_equal(np.concatenate(parts), np.sort(records, order=["hash", "rest", "row"]))


def test_uncommitted_run_leaves_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", ROW) as writer:
        writer.add(_records([(1, 2, 3)]))
        writer.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    records = np.zeros(300, ROW)
    records["hash"] = rng.integers(0, 2**64, len(records), np.uint64)
    path = tmp_path / "run"
    _write(path, records)
    data = path.read_bytes()
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(DamagedResult) as error, RunFile(path, ROW, "measure") as run:
            run.read_range(0, HASHES)
        assert error.value.path == path
        assert "measure" in str(error.value)


def test_truncated_missing_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _write(path, _records([(1, 2, 3), (4, 5, 6)]))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedResult):
            RunFile(path, ROW, "measure")
    path.write_bytes(data + b"\0")
    with pytest.raises(DamagedResult):
        RunFile(path, ROW, "measure")
    path.write_bytes(data)
    with pytest.raises(DamagedResult):
        RunFile(path, [("hash", "<u8"), ("rest", "<u8"), ("line", "<u4")], "measure")
    with pytest.raises(DamagedResult):
        RunFile(tmp_path / "none", ROW, "measure")


def test_sections(tmp_path: Path) -> None:
    records = _records([(9, 9, 9), (1, 1, 1), (5, 5, 5)])
    with write_sections(tmp_path / "file", records, np.array([0, 2, 2, 3])) as file:
        file.commit()
    with SectionFile(tmp_path / "file", ROW, "choose") as sections:
        assert [len(sections.read_sections(place, place + 1)) for place in range(3)] == [2, 0, 1]
        assert sections.read_sections(0, 3).tolist() == records.tolist()
        assert sections.read_sections(1, 1).tolist() == []


@pytest.mark.parametrize("buckets", [1, 2, 3, 7, 1100, 4097])
def test_buckets_are_all_hashes(buckets: int) -> None:
    ranges = [bucket_range(bucket, buckets) for bucket in range(buckets)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == HASHES
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


def test_numbers() -> None:
    assert bucket_count(0, 24, 2**20) == 1
    assert bucket_count(2**20, 24, 2**20) == 24
    assert run_ranges(0) == 1
    assert run_ranges(2**40) == MAX_RANGES
