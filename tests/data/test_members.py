"""Links and pipes that a member of the group puts in the place of what is read and written of datasets."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.datasets.merge import merge
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.status import read_state
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.verify.command import verify_all
from tests.common.test_links import MEMBER, as_owner, link
from tests.data.runs import make_config, tree, write_jsonl

QUIET = Console(quiet=True)
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives links to another user")


def config_of(root: Path, **settings: str) -> Config:
    path = root / "a.jsonl"
    if not path.exists():
        write_jsonl(path, 30)
        with path.open("a") as file:
            file.write("not JSON\n")
    source = {"name": "web", "type": "jsonl", "paths": [str(path)], "metadata": ["id"]}
    return make_config(root, [source], preprocess={"max_error_rate": 0.1, **settings})


def pipe(path: Path) -> Path:
    path.unlink()
    os.mkfifo(path)
    return path


def test_a_pipe_in_place_of_rejected_records(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    preprocess(config)
    (path,) = (config.data_dir / "web" / "receipts").rglob("*.rejected.jsonl")
    pipe(path)
    with pytest.raises(UserError, match=f"{path} is not a regular file"):
        preprocess(config)


def test_a_pipe_in_place_of_a_receipt(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    preprocess(config, units=True)
    (state,) = read_state(config)
    (path, *_) = sorted((config.data_dir / "web" / "receipts").rglob("00000000.json"))
    pipe(path)
    (now,) = read_state(config)
    assert (now.unreadable, now.done) == (1, state.done - 1)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".prov", ".meta"])
def test_a_pipe_in_place_of_a_run_of_the_global_shuffle(tmp_path: Path, suffix: str) -> None:
    config = config_of(tmp_path, shuffle="global")
    preprocess(config, units=True)
    (path, *_) = sorted((config.data_dir / "web/train/unshuffled").rglob(f"*{suffix}"))
    kept = path.read_bytes()
    pipe(path)
    # The units are made again, as something is wrong with what they gave.
    preprocess(config)
    assert kept and (config.data_dir / "web/train/manifest.json").exists()


def test_a_pipe_in_place_of_tokens_that_are_merged(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    preprocess(config)
    train = config.data_dir / "web" / "train"
    (path, *_) = sorted(train.rglob("*.bin"))
    pipe(path)
    with pytest.raises(UserError, match=f"{path}"):
        merge(train, tmp_path / "merged")


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """Data folders of the owner that are equal, of which a member may write to one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        config = config_of(Path(name, "private"))
        preprocess(config)
        shutil.copytree(config.data_dir, Path(name, "shared"))
        subprocess.run(["chown", "-R", "61001:61000", name], check=True)
        Path(name, "shared", "web").chmod(0o2775)
        yield Path(name, "shared"), config.data_dir


def as_member(folders: tuple[Path, Path], place: str, does: Callable[[], object]) -> str:
    """What a function of the owner ends with while a link leads to the private folder, which has to stay as it is."""
    shared, private = (each / place for each in folders)
    shared.rename(f"{shared}.aside")
    link(shared, private, MEMBER)
    before = tree(folders[1]), sorted(folders[1].rglob("*"))
    said = as_owner(does)
    assert (tree(folders[1]), sorted(folders[1].rglob("*"))) == before
    return said


@ROOT
def test_no_dataset_is_written_through_a_link(folders: tuple[Path, Path]) -> None:
    shared, _ = folders
    tokenizer = Tokenizer.open(shared / "tokenizer")
    about = {"source": "web", "split": "train", "text_bytes": 1, "config_hash": "h", "code_version": "3"}
    table = np.zeros(0, PART)
    said = as_member(folders, "web", lambda: write_dataset(shared / "web" / "more", table, tokenizer, about))
    assert f"user {MEMBER}" in said
    assert f"user {MEMBER}" in as_owner(lambda: tokenizer.save(shared / "web" / "tokens"))


@ROOT
def test_a_repair_does_not_go_through_a_link(folders: tuple[Path, Path]) -> None:
    shared, private = folders
    (path, *_) = sorted((private / "web" / "train").rglob("*.bin"))
    path.write_bytes(b"\0" * path.stat().st_size)
    said = as_member(folders, "web", lambda: verify_all(shared, [], QUIET, repairs=True))
    assert f"user {MEMBER}" in said
