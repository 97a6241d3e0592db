"""Files of datasets that say a terabyte and take no room on the disk: `data verify` tells by their size, unread."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.files import packs_folder
from pipeline.data.datasets.packing.verify import verify_packs
from pipeline.data.datasets.verify import verify
from pipeline.data.packing.make import PackMaker
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.verify.command import verify_all
from tests.data.runs import make_config, tree

TEBIBYTE = 2**40
QUIET = Console(quiet=True)
LENGTH = 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose parts have metadata and weights, and packs."""
    root = tmp_path_factory.mktemp("made")
    records = [{"id": f"r{number}", "text": f"the boat {number} comes", "weight": 1.5} for number in range(40)]
    (root / "a.jsonl").write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    source = {"name": "web", "type": "jsonl", "paths": [str(root / "a.jsonl")], "metadata": ["id"]}
    config = make_config(root, [source | {"weight_key": "weight"}])
    preprocess(config)
    PackMaker(Dataset.open(config.data_dir / "web" / "train"), LENGTH).make(QUIET, 1)
    return config.data_dir


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("size", [TEBIBYTE, TEBIBYTE + 1, 5], ids=["sparse", "uneven", "cut"])
@pytest.mark.parametrize("suffix", [".bin", ".idx", ".prov", ".meta", ".weight"])
def test_a_part(data: Path, suffix: str, size: int) -> None:
    (path, *_) = sorted((data / "web" / "train" / "parts").rglob(f"*{suffix}"))
    before, content = path.stat().st_size, path.read_bytes()
    os.truncate(path, size)
    found = verify(data)
    (problem,) = found.problems
    assert problem.startswith(f"{path}: {size:,} bytes; expected: ")
    # The number of sequences is not in the counts of a part, and the table of a cut file is not there.
    assert suffix == ".idx" or (suffix, size) == (".meta", 5) or f"expected: {before:,} " in problem
    assert [folder for folder, _, _ in found.damaged] == [data / "web" / "train"]
    if size == TEBIBYTE:
        assert verify_all(data, [], QUIET, repairs=True)
        assert path.read_bytes() == content


def test_a_pipe(data: Path) -> None:
    path = next((data / "web" / "train" / "parts").rglob("*.bin"))
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    (problem,) = verify(data).problems
    assert problem.startswith(f"{path} is not a regular file")
    assert verify_all(data, [], QUIET, repairs=True)
    assert path.read_bytes() == content


def test_a_tokenizer(data: Path) -> None:
    path = data / "web" / "train" / "tokenizer.json"
    os.truncate(path, TEBIBYTE)
    assert all(str(path) in problem for problem in verify(data).problems)
    assert verify(data).problems


@pytest.mark.parametrize("name", ["groups.bin", "blocks/00000/00000000.bin"])
def test_packs(data: Path, name: str) -> None:
    path = packs_folder(data / "web" / "train", LENGTH) / name
    before = tree(data)
    assert verify_packs(data).problems == []
    os.truncate(path, TEBIBYTE)
    (problem,) = verify_packs(data).problems
    assert problem.startswith(str(path))
    assert (
        name == "groups.bin" or f"{TEBIBYTE:,} bytes; expected: {len(before[str(path.relative_to(data))]):,}" in problem
    )
