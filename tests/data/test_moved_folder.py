"""A data folder that was moved: all of it stays valid, since no file of it has the place that it lies in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config.data import LoaderConfig
from pipeline.data.curate.stage import curate
from pipeline.data.datasets.merge import merge
from pipeline.data.preprocess.stage import preprocess
from tests.data.curate.runs import curate_config, everything, write_documents
from tests.data.runs import tree

OLD = "old"
"""A source that was curated before the others, which are compared with it."""


def _config(root: Path, corpus: Path, *, first: bool) -> Config:
    """A run with curation, a global shuffle and packs. `first`: of the source that the others are compared with."""
    settings = everything(corpus) | {"scopes": {}, "by_source": {}, "engine": "python"}
    if not first:
        settings["against"] = [str(root / "data" / OLD / "curate")]
    config = curate_config(root, corpus, settings, preprocess={"shuffle": "global"})
    a, b, _ = config.data.sources
    sources = [b.model_copy(update={"name": OLD})] if first else [a]
    loader = LoaderConfig(packing="best_fit")
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"sources": sources, "loader": loader, "dir": root / "data"}),
        }
    )


def _make(root: Path, corpus: Path) -> dict[str, bytes]:
    curate(_config(root, corpus, first=True))
    config = _config(root, corpus, first=False)
    curate(config)
    preprocess(config)
    return tree(config.data_dir)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    """(corpus, root after the move, files before it)."""
    folder = tmp_path_factory.mktemp("moved")
    corpus = folder / "corpus"
    old = write_documents(corpus / "b.jsonl", 30, 2).read_bytes()
    new = write_documents(corpus / "a.jsonl", 60, 1)
    new.write_bytes(new.read_bytes() + old)
    (corpus / "items.txt").write_text("seven brave sailors counted nine golden lanterns while the captain slept\n")
    before = _make(folder / "first", corpus)
    os.rename(folder / "first", folder / "second")
    return corpus, folder / "second", before


def test_no_file_has_the_place_of_its_folder(moved):
    _, root, before = moved
    place = str(root.with_name("first")).encode()
    assert {name.rpartition("/")[0] for name in before} >= {"a/train/packs/8", "curate/a/chunks", "old/curate"}
    assert [name for name, content in before.items() if place in content] == []


def test_nothing_is_made_again(moved):
    corpus, root, before = moved
    inodes = {path: path.stat().st_ino for path in root.rglob("*") if path.is_file() and path.suffix != ".tmp"}
    assert _make(root, corpus) == before
    made_again = [str(path) for path, inode in inodes.items() if not path.exists() or path.stat().st_ino != inode]
    # The page of all sources is that of the last run: several share the folder.
    assert [path for path in made_again if "/.items/" not in path and "/data/curate/report.html" not in path] == []


def test_a_merged_dataset_has_no_place(moved):
    _, root, _ = moved
    merge(root / "data" / "a" / "train", root / "merged" / "all")
    assert [name for name, content in tree(root / "merged").items() if str(root).encode() in content] == []
