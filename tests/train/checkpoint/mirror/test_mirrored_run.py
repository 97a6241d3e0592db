"""Runs with a mirror: what is in it, how another folder continues from it, and what a mirror may not change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from obstore.store import MemoryStore
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.console import Console
from pipeline.common.errors import EXIT_OTHER, EXIT_REFUSED, UserError
from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.urls import ObjectUrl
from pipeline.config.load import load, load_written
from pipeline.config.parsing.code_keys import code_values
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.mirror.bucket import Mirror
from pipeline.train.checkpoint.mirror.copies import fetch_run
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


@pytest.mark.guard
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


@pytest.mark.guard
def test_a_rewound_run_mirrors_its_new_line(root: Path, bucket: MemoryStore) -> None:
    run = train(root, "back", MIRROR, KEEP, "train.checkpoint.mirror.keep=9", "train.duration=6 steps")
    train(
        root, "back", MIRROR, KEEP, "train.checkpoint.mirror.keep=9", "resume.from=3", "train.checkpoint.every_steps=4"
    )
    assert [each.step for each in Checkpoints.of_run(run).all()] == [3, 4, 8]
    assert mirrored()[-1] == 8 and {*mirrored()} <= {3, 4, 8}  # which of them are there is a matter of speed


def test_a_preview_looks_at_the_mirror(root: Path, bucket: MemoryStore) -> None:
    config = load(root / "run.yaml", [f"run.dir={root / 'new'}", MIRROR])
    assert check_mirror(config) == [] and mirrored() == []
    assert not [meta for page in bucket.list() for meta in page]


def command(*words: object) -> tuple[int, str]:
    """A command in this process: its exit code, and what it printed."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        if not isinstance(done.exception, UserError):
            raise done.exception
        return done.exception.exit_code, done.output + str(done.exception)
    return done.exit_code, done.output


@pytest.mark.guard
def test_commands_read_mirrors(
    root: Path, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = train(root, "read", MIRROR, KEEP)
    here = Checkpoints.of_run(run)
    code, out = command("checkpoint", "list", URL, "--json")
    rows = orjson.loads(out)
    assert code == 0 and rows[-1]["step"] == 8 and rows[-1]["latest"] and rows[-1]["parent"] == 6
    code, out = command("checkpoint", "show", URL, "--json")
    assert code == 0 and orjson.loads(out)["fingerprint"] == here.at(8).fingerprint
    code, out = command("checkpoint", "verify", URL)
    assert code == 0 and "step-00000008: good" in out
    assert not (tmp_path / "pretraining-pipeline" / "mirrors").exists()  # the large files are not fetched for these
    code, out = command("report", URL)
    assert code == 0 and (tmp_path / "report.html").is_file(), out

    shutil.rmtree(run)
    code, out = command("checkpoint", "export", URL, "--to", tmp_path / "weights")
    assert code == 0 and f"{URL}: fetching step 8" in out and (tmp_path / "weights").is_dir()
    code, out = command("convert", "to-hf", URL, tmp_path / "hf")
    assert code == 0 and "was fetched before" in out and (tmp_path / "hf" / "config.json").is_file()
    code, out = command("eval", URL)
    assert code == 0, out
    code, out = command("eval", URL, "--step", 7)
    assert code == EXIT_REFUSED and "does not have a checkpoint of step 7" in out
    for words in (("checkpoint", "prune", URL), ("train", URL), ("eval", URL, "--local"), ("serve", URL, "--watch")):
        code, out = command(*words)
        assert code == EXIT_REFUSED and URL in out

    (commit,) = (each for each in Mirror.of(URL, RemoteAccess()).commits() if each.step == 8)
    name = next(name for name in commit.files if name.endswith(".distcp"))
    bucket.put(f"runs/one/step-00000008/{commit.upload}/{name}", b"x" * commit.files[name][0])
    code, out = command("checkpoint", "verify", URL)
    assert code == EXIT_OTHER and name in out


@pytest.mark.guard
def test_code_in_the_run_file_of_a_mirror_is_left_out(
    root: Path, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train(root, "code", MIRROR, "notify=[{command: [touch, x], on: [done]}]")
    found = fetch_run(URL, None, Console())
    config = load_written(found / "config.yaml")
    assert not config.notify and not list(code_values(config, "notify"))
