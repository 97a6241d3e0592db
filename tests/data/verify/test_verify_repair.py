"""`data verify --repair`: damage is replaced by the bytes that were written, or nothing is changed."""

from __future__ import annotations

import errno
import gzip
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.config import Config
from pipeline.data.curate.stage import curate
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.merge import merge
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.verify import repair
from pipeline.data.verify.command import verify_all
from tests.data.curate.runs import curate_config, write_corpus
from tests.data.runs import make_config, tree, write_jsonl
from tests.data.stage import killed_at_rename, write_run_file

QUIET = Console(quiet=True)


def config_of(root: Path, **settings: Any) -> Config:
    source = {"name": "web", "type": "jsonl", "paths": [str(root / "corpus" / "*")], "metadata": ["id"]}
    return make_config(root, [source], preprocess={"unit_bytes": 6000, "max_document_bytes": 1024, **settings})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain files and a compressed one, of several chunks; with a bad record."""
    root = tmp_path_factory.mktemp("made")
    plain = write_jsonl(root / "corpus" / "a.jsonl", 60)
    with plain.open("a") as file:
        file.write("not JSON\n")
    write_jsonl(root / "b.jsonl", 60, seed=3, words=300)
    (root / "corpus" / "b.jsonl.gz").write_bytes(gzip.compress((root / "b.jsonl").read_bytes(), mtime=0))
    preprocess(config_of(root, max_error_rate=0.1))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy to damage; its plan names the files of `made`."""
    shutil.copytree(made, tmp_path / "root")
    return tmp_path / "root"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def parts(root: Path) -> list[Path]:
    found = sorted(path for path in (root / "run/data/web").glob("*/parts/*/*") if path.stat().st_size)
    assert any("-00001." in path.name for path in found)
    return found


def test_damage_is_replaced_by_the_bytes_that_were_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = root / "run" / "data"
    before = tree(data)
    chance = random.Random(5)
    every = parts(root)
    chosen = chance.sample([path for path in every if path.suffix != ".meta"], 5)
    chosen += [path for path in every if path.suffix == ".meta"][:1]
    for path, damage in zip(chosen, [flip, truncate, Path.unlink] * 2, strict=True):
        damage(path)
    harmed = tree(data)
    assert harmed != before
    assert not verify_all(data, [], QUIET)
    assert not verify_all(data, [], QUIET, repairs=True, dry_run=True)
    assert tree(data) == harmed
    capsys.readouterr()
    assert verify_all(data, [], QUIET, repairs=True)
    assert tree(data) == before
    assert "made again" in capsys.readouterr().out


@pytest.mark.guard
def test_each_file_alone_and_receipts(root: Path) -> None:
    data = root / "run" / "data"
    before = tree(data)
    file = write_run_file(config_of(root, max_error_rate=0.1), root / "run.yaml")
    receipts = sorted((data / "web" / "receipts").rglob("*.json"))
    for number, path in enumerate([*parts(root)[::7], *receipts[::3]]):
        (Path.unlink, truncate)[number % 2](path)
        assert verify_all(file if number % 2 else data / "web", [], QUIET, repairs=True), path
        assert tree(data) == before
    assert not list(data.rglob("*.tmp"))


@pytest.mark.slow
def test_killed_at_any_instant(root: Path, tmp_path: Path) -> None:
    data, kept, log = root / "run" / "data", tmp_path / "kept", tmp_path / "renames"
    before = tree(data)
    for path in parts(root)[::9]:
        truncate(path)
    shutil.copytree(data, kept)
    words = ("data", "verify", data, "--repair")
    clean = killed_at_rename(log, 0, *words)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    renames = log.stat().st_size
    assert tree(data) == before and renames > 8
    for number in range(1, renames + 1, max(1, renames // 6)):
        shutil.rmtree(data)
        shutil.copytree(kept, data)
        assert killed_at_rename(log, number, *words).returncode == -9
        # What is there is as it was written, or as it was found.
        found = {name: content for name, content in tree(data).items() if ".tmp/" not in name}
        damaged = tree(kept)
        assert all(found[name] in (before[name], damaged[name]) for name in damaged)
        assert verify_all(data, [], QUIET, repairs=True) is True
        assert {name: content for name, content in tree(data).items() if ".tmp/" not in name} == before


@pytest.mark.guard
def test_other_input_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", 60)
    config = config_of(tmp_path)
    preprocess(config)
    flip(parts_of(config)[0])
    flip(parts_of(config)[-1])
    harmed = tree(config.data_dir)
    text = (tmp_path / "corpus" / "a.jsonl").read_text()
    for changed, reason in ((text.replace("tokens", "TOKENS"), "other bytes"), (text[:-40], "bytes, and had")):
        (tmp_path / "corpus" / "a.jsonl").write_text(changed)
        capsys.readouterr()
        assert not verify_all(config.data_dir, [], QUIET, repairs=True)
        said = "".join(capsys.readouterr())
        assert "the source has changed" in said and reason in said
        assert tree(config.data_dir) == harmed
    (tmp_path / "corpus" / "a.jsonl").unlink()
    assert not verify_all(config.data_dir, [], QUIET, repairs=True)
    assert "cannot be read" in "".join(capsys.readouterr())
    assert tree(config.data_dir) == harmed


def parts_of(config: Config) -> list[Path]:
    return sorted((config.data_dir / "web").glob("train/parts/*/*.bin"))


@pytest.mark.guard
def test_what_cannot_be_repaired_is_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, pair = root / "run" / "data", tmp_path / "merged"
    merge(data / "web" / "train", pair)
    adopt([pair], tmp_path / "adopted", tokenizer=data / "tokenizer" / "tokenizer.json", link="copy")
    flip(next((tmp_path / "adopted").rglob("parts/*/*.bin")))
    harmed = tree(tmp_path / "adopted")
    assert not verify_all(tmp_path / "adopted", [], QUIET, repairs=True)
    assert "other programs made it" in "".join(capsys.readouterr())
    assert tree(tmp_path / "adopted") == harmed
    with pytest.raises(Exception, match="a pair of .bin and .idx without a manifest"):
        verify_all(pair, [], QUIET, repairs=True)
    shuffled = config_of(tmp_path / "two", shuffle="global")
    write_jsonl(tmp_path / "two" / "corpus" / "a.jsonl", 30)
    preprocess(shuffled)
    flip(parts_of(shuffled)[0])
    assert not verify_all(shuffled.data_dir, [], QUIET, repairs=True)
    assert "shuffle: global" in "".join(capsys.readouterr())


def test_a_verification_names_the_way_to_repair(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(parts(root)[0])
    assert not verify_all(root / "run" / "data", [], QUIET)
    assert "the same command with --repair" in "".join(capsys.readouterr())


def test_a_full_disk_is_not_said_to_be_the_fault_of_the_source(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "part.bin")

    flip(parts(root)[0])
    monkeypatch.setattr(repair, "run_leased", full)
    with pytest.raises(OSError, match="No space left"):
        verify_all(root / "run" / "data", [], QUIET, repairs=True)


@pytest.mark.slow
def test_documents_that_were_curated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"mode": "apply", "rules": {"gopher_quality": {"min_words": 5}}, "clean": {"pii": {"email": "mask"}}}
    config = curate_config(tmp_path, write_corpus(tmp_path / "corpus"), settings)
    curate(config)
    preprocess(config)
    before = tree(config.data_dir)
    assert b'"curation"' in before["a/plan.json"]
    for number, path in enumerate(sorted(config.data_dir.glob("*/train/parts/*/*.bin"))):
        (flip, Path.unlink)[number % 2](path)
    assert not verify_all(config.data_dir, [], QUIET, repairs=True)
    assert "name the run file" in "".join(capsys.readouterr())
    file = write_run_file(config, tmp_path / "run.yaml")
    assert verify_all(file, [], QUIET, repairs=True)
    assert tree(config.data_dir) == before
