"""A run of the preprocess stage on two small sources, `t` and `j`; a module that needs another has its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.data.preprocess.stage import preprocess
from tests.data.runs import both, make_config, write_both


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_both(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def sources(corpus: Path) -> list[dict[str, Any]]:
    return both(corpus)


@pytest.fixture(scope="module")
def done(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, for all tests of a module."""
    config = make_config(tmp_path_factory.mktemp("done"), both(corpus))
    preprocess(config)
    return config


@pytest.fixture
def config(done: Config, sources: list[dict[str, Any]], tmp_path: Path) -> Config:
    """A copy of the finished run, to be changed."""
    config = make_config(tmp_path, sources)
    shutil.copytree(done.data_dir, config.data_dir)
    return config
