"""Runs with a mirror: what is in it, how another folder continues from it, and what a mirror may not change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from pipeline.common.errors import EXIT_REFUSED
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.urls import ObjectUrl
from pipeline.config.load import load
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.bucket import Mirror
from pipeline.train.run.folder import read_metrics
from pipeline.train.run.mirror_state import read_mirror_state
from pipeline.train.start.from_mirror import check_mirror
from tests.train.runs import exact, start, train, weights_hash

URL = "s3://corpus/runs/one"
MIRROR = f"train.checkpoint.mirror.to={URL}"
KEEP = "train.checkpoint.keep=9"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """A store in memory that all URLs are of."""
    found = MemoryStore()

    def open_memory(url: ObjectUrl, access: RemoteAccess, writes: bool) -> Any:
        return found

    monkeypatch.setattr(stores, "_open", open_memory)
    stores._Stores.opened.clear()
    yield found
    stores._Stores.opened.clear()


@pytest.fixture(scope="module")
def straight(root: Path) -> Path:
    """A run without a mirror."""
    return train(root, "straight", KEEP)


def mirrored(url: str = URL) -> list[int]:
    return [each.step for each in Mirror.of(url, RemoteAccess(patience_s=0)).commits()]


def test_a_run_continues_from_its_mirror_in_a_new_folder(root: Path, straight: Path, bucket: MemoryStore) -> None:
    run = train(root, "mirrored", MIRROR, KEEP)
    assert mirrored()[-1] == 8 and exact(run) == exact(straight)
    state = read_mirror_state(run)
    assert state is not None and (state.step, state.behind, state.failed) == (8, 0, 0)
    assert [row["mirrored_step"] for row in read_metrics(run) if "mirrored_step" in row][-1] == 8
    shutil.rmtree(run)
    bucket.delete("runs/one/step-00000008/COMMIT")
    assert mirrored()[-1] < 8

    other = train(root, "elsewhere", MIRROR, KEEP, f"resume.from_mirror={URL}")
    assert exact(other) == exact(straight)
    assert weights_hash(other, 8) == weights_hash(straight, 8) and mirrored()[-1] == 8
    # The folder is known there now, and needs no option.
    shutil.rmtree(other / "checkpoints")
    code, out = start(root, "elsewhere", MIRROR, KEEP)
    assert code == 0 and "fetching step 8" in out and "nothing to do" in out


def test_a_mirror_of_another_run_is_refused(root: Path, bucket: MemoryStore) -> None:
    train(root, "first", MIRROR)
    code, out = start(root, "second", MIRROR)
    assert code == EXIT_REFUSED and "of another run" in out and "--from-mirror" in out
    assert not (root / "second" / "metrics.jsonl").exists()
    code, out = start(root, "third", f"resume.from_mirror={URL}/none")
    assert code == EXIT_REFUSED and "has no checkpoint" in out


def test_damaged_checkpoints_in_the_mirror_are_passed_over(root: Path, straight: Path, bucket: MemoryStore) -> None:
    run = train(root, "before", MIRROR, KEEP)
    newest, older = mirrored()[-1], mirrored()[-2]
    keys = [str(meta["path"]) for page in bucket.list() for meta in page]
    key = next(key for key in keys if f"{newest:08d}/" in key and key.endswith(".distcp"))
    bucket.put(key, b"x" * len(bytes(bucket.get(key).bytes())))
    shutil.rmtree(run / "checkpoints")
    code, out = start(root, "before", MIRROR, KEEP)
    assert code == 0 and f"of step {newest}" in out and "is damaged" in out and f"step {older}" in out
    assert exact(run) == exact(straight)


def test_a_store_that_is_down_changes_nothing_but_the_status(
    root: Path, straight: Path, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(url: ObjectUrl, access: RemoteAccess, writes: bool) -> Any:
        raise ConnectionError("Connection refused")

    monkeypatch.setattr(stores, "_open", down)
    patience = "train.checkpoint.mirror.patience_seconds=0.1"
    monkeypatch.setattr("pipeline.train.start.from_mirror._LOOK_S", 0.1)
    code, out = start(root, "down", MIRROR, KEEP, patience)
    assert code == 0 and out.count("no answer") <= 3, out
    assert exact(root / "down") == exact(straight) and weights_hash(root / "down") == weights_hash(straight)
    state = read_mirror_state(root / "down")
    assert state is not None and state.waiting == 8 and "no answer" in state.words(state.since)


def test_a_rewound_run_mirrors_its_new_line(root: Path, bucket: MemoryStore) -> None:
    run = train(root, "back", MIRROR, KEEP, "train.checkpoint.mirror.keep=9", "train.duration=6 steps")
    train(
        root, "back", MIRROR, KEEP, "train.checkpoint.mirror.keep=9", "resume.from=3", "train.checkpoint.every_steps=4"
    )
    assert mirrored() == [3, 4, 8] == [each.step for each in Checkpoints.of_run(run).all()]


def test_a_preview_looks_at_the_mirror(root: Path, bucket: MemoryStore) -> None:
    config = load(root / "run.yaml", [f"run.dir={root / 'new'}", MIRROR])
    assert check_mirror(config) == [] and mirrored() == []
    assert not [meta for page in bucket.list() for meta in page]
