from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from tests import tiny
from tests.train.distributed.ranks import Ranks, kept_ranks

# The models here are so small that a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with its run file, preprocessed once for a module."""
    folder = tmp_path_factory.mktemp("corpus")
    preprocess(load(tiny.write_run(folder)))
    return folder


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, kept from one test to the next."""
    with kept_ranks() as get:
        yield get
